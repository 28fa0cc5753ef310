import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.qa.actions import CORRECTION, NOTHING_FOUND, RETRIEVAL_FAILED
from verl_bridge.retrieval import protocol
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.protocol import Invalid, observe, passages, read_actions, read_json, request_models
from verl_bridge.retrieval.wire import LONGEST_REASON

MODELS = request_models(max_queries=3, max_query_characters=20, max_top_k=50)
TWO = [{"id": "a", "title": '"Avelin"', "text": "A town."}, {"id": "b", "title": "", "text": "No title."}]
ANSWER = {
    "status": "ok",
    "error": None,
    "ids": ["a", "b"],
    "scores": [0.75, 0.5],
    "documents": TWO,
    "adapter_version": 4,
}
FAILED = {"status": "error", "error": "why", "ids": [], "scores": [], "documents": [], "adapter_version": 4}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (MODELS.search, {"queries": ["x"]}),
        (MODELS.search, {"queries": ["x" * 20] * 3, "top_k": 50}),
        (MODELS.search, {"queries": ["\0", "🙂", "שלום עולם"], "top_k": None}),
        (MODELS.search, {"queries": ["x"], "top_k": 3.0}),
        (MODELS.retrieve, {"queries": []}),
        (MODELS.retrieve, {"queries": ["x"], "topk": 3, "return_scores": True, "something": {"new": 1}}),
        (MODELS.observation, {"trajectory_ids": ["1"], "actions": ["long " * 99], "finish": [False]}),
        (
            MODELS.observation,
            {"trajectory_ids": ["1"], "actions": [""], "is_last_step": [True], "extra_fields": [{"a": 1}], "more": 2},
        ),
    ],
)
def test_what_clients_send_is_read(model, body):
    read = read_json(json.dumps(body).encode(), model)
    assert {key: getattr(read, key) for key in body if key not in ("something", "more")} == {
        key: value for key, value in body.items() if key not in ("something", "more")
    }


@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        (MODELS.search, '{"queries": []}', "queries: List should have at least 1 item"),
        (MODELS.search, '{"queries": ["a", "b", "c", "d"]}', "queries: List should have at most 3 items"),
        (MODELS.search, f'{{"queries": ["{"x" * 21}"]}}', "queries.0: String should have at most 20 characters"),
        (MODELS.search, '{"queries": ["x"], "top_k": 0}', "top_k: Input should be greater than or equal to 1"),
        (MODELS.search, '{"queries": ["x"], "top_k": -1}', "greater than or equal to 1"),
        (MODELS.search, '{"queries": ["x"], "top_k": 1000000000}', "less than or equal to 50"),
        (MODELS.search, '{"queries": ["x"], "top_k": 1e40}', "top_k: Input should be less than or equal to 50"),
        (MODELS.search, '{"queries": ["x"], "top_k": "3"}', "top_k: Input should be a valid integer"),
        (MODELS.search, '{"queries": ["x"], "top_k": true}', "top_k: Input should be a valid integer"),
        (MODELS.search, '{"queries": ["x"], "top_k": 3.5}', "top_k: Input should be a valid integer"),
        (MODELS.search, '{"queries": ["x"], "topk": 3}', "topk: Extra inputs are not permitted"),
        (MODELS.search, '{"queries": "x"}', "queries: Input should be a valid list"),
        (MODELS.search, '{"queries": [1, null, ["x"]]}', "queries.0: Input should be a valid string; queries.1"),
        (MODELS.search, '{"queries": null}', "queries: Input should be a valid list"),
        (MODELS.search, "[]", "Input should be a valid dictionary"),
        (MODELS.search, "{}", "queries: Field required"),
        (MODELS.retrieve, '{"queries": ["x"], "topk": 0}', "topk: Input should be greater than or equal to 1"),
        (MODELS.retrieve, '{"queries": ["x"], "return_scores": 1}', "return_scores: Input should be a valid boolean"),
        (MODELS.retrieve, '{"queries": ["x"], "return_scores": "true"}', "return_scores: Input should be a valid"),
        (MODELS.observation, '{"trajectory_ids": [], "actions": []}', "at least 1 item"),
        (MODELS.observation, '{"trajectory_ids": [1], "actions": ["x"]}', "trajectory_ids.0: Input should be a valid"),
        (MODELS.observation, '{"trajectory_ids": ["1"], "actions": ["x"], "finish": [0]}', "finish.0: Input should be"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_field_and_the_reason(model, body, reason):
    with pytest.raises(Invalid) as error:
        read_json(body.encode(), model)
    assert reason in str(error.value) and error.value.status == 422


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"queries": ["\xff"]}',
        b'\xef\xbb\xbf{"queries": ["x"]}',
        b'{"queries": ["\\ud800"]}',
        b'{"queries": ["x"], "topk": NaN}',
        b'{"queries": ["x"], "extra": Infinity}',
        b'{"queries": ["x"], "extra": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"queries": ["x"]} trailing',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_not_json_is_said_to_be_so(body):
    with pytest.raises(Invalid, match="the body is not JSON") as error:
        read_json(body, MODELS.retrieve)
    assert error.value.status == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(st.sampled_from(["queries", "topk", "top_k", "return_scores", "x"]), values))
def test_a_reason_is_one_short_line_and_repeats_no_input(body):
    for model in MODELS[:3]:
        try:
            read = read_json(json.dumps({**body, "marker": "REPEATED" * 50}).encode(), model)
        except Invalid as error:
            reason = str(error)
            assert 0 < len(reason) <= LONGEST_REASON and reason.isprintable() and "REPEATED" not in reason
        else:
            assert model is MODELS.retrieve and all(type(query) is str for query in read.queries)


def test_an_answer_too_large_and_a_request_of_blanks_alone_are_refused():
    protocol.check_size(["x"] * 4096, 16)
    with pytest.raises(Invalid, match=r"4096 queries × top_k 17 are more than 65536 documents"):
        protocol.check_size(["x"] * 4096, 17)
    for blank in ("", " ", "\n\t\u2003"):
        protocol.check_size([blank, "x"], 3)
        with pytest.raises(Invalid, match="blank"):
            protocol.check_size([blank, ""], 3)
    protocol.check_size([], 3)


def test_contents_are_the_corpus_s_own_string(tmp_path):
    contents = ['"Avelin"\nA town.\nBy a lake.', '"Only a title"', '"A ""quoted"" one"\n  indented text ']
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": str(i), "contents": c}) + "\n" for i, c in enumerate(contents)))
    documents = [vars(document) for document in Corpus.open(file)]
    answer = {**ANSWER, "documents": documents, "ids": ["0", "1", "2"], "scores": [0.9, 0.8, 0.7]}
    assert passages(answer, False) == [{"id": str(i), "contents": c} for i, c in enumerate(contents)]
    assert passages(answer, True) == [
        {"document": {"id": str(i), "contents": c}, "score": s}
        for i, (c, s) in enumerate(zip(contents, [0.9, 0.8, 0.7], strict=True))
    ]


def test_passages_with_and_without_scores():
    plain = [{"id": "a", "contents": '"Avelin"\nA town.'}, {"id": "b", "contents": "No title."}]
    assert passages(ANSWER, False) == plain
    assert passages(ANSWER, True) == [{"document": plain[0], "score": 0.75}, {"document": plain[1], "score": 0.5}]
    assert passages(FAILED, True) == passages(FAILED, False) == []


def read(**body):
    return MODELS.observation.model_validate(body)


def test_the_first_action_of_a_turn_counts_and_a_goodbye_has_none():
    call = read(
        trajectory_ids=["1", "2", "3"],
        actions=[
            "<think>t</think><search> x </search><search>y</search>",
            "<answer>z</answer>",
            "<search>gone</search>",
        ],
        finish=[False, False, True],
    )
    first, second, third = read_actions(call)
    assert (first.kind, first.content) == ("search", "x") and second.kind == "answer" and third is None


@pytest.mark.parametrize("field", ["trajectory_ids", "finish", "is_last_step", "extra_fields"])
def test_lists_of_different_lengths_are_refused(field):
    fitting = {
        "trajectory_ids": ["1"],
        "actions": ["x"],
        "finish": [True],
        "is_last_step": [True],
        "extra_fields": [{}],
    }
    assert read_actions(read(**fitting)) == [None]
    with pytest.raises(Invalid, match=f"{field}: 2 entries for 1 actions"):
        read_actions(read(**{**fitting, field: fitting[field] * 2}))


def actions(*turns):
    return read_actions(read(trajectory_ids=["1"] * len(turns), actions=list(turns)))


def test_a_search_shows_the_first_documents_and_carries_all_candidates():
    (search,) = actions("I look. <search>town?</search>")
    told, done, valid = observe(search, ANSWER, shown=1)
    assert told == {
        "obs": '\n\n<information>Doc 1(Title: "Avelin") A town.</information>\n\n',
        "status": "ok",
        "error": None,
        "query": "town?",
        "ids": ["a", "b"],
        "scores": [0.75, 0.5],
        "candidates": TWO,
        "shown": 1,
        "adapter_version": 4,
        "invalid_reason": None,
    }
    assert (done, valid) == (False, True)
    both, _, _ = observe(search, ANSWER, shown=5)
    assert both["shown"] == 2 and both["obs"].endswith("Doc 2(Title: ) No title.</information>\n\n")


def test_a_failed_search_is_not_valid_and_looks_like_no_evidence():
    (search,) = actions("<search>town?</search>")
    told, done, valid = observe(search, FAILED, shown=3)
    assert (told["obs"], told["status"], told["error"], told["shown"]) == (RETRIEVAL_FAILED, "error", "why", 0)
    assert (done, valid, told["invalid_reason"]) == (False, False, "why") and "<information>" not in told["obs"]
    nothing, done, valid = observe(search, {**FAILED, "status": "ok", "error": None}, shown=3)
    assert (nothing["obs"], nothing["status"], done, valid) == (NOTHING_FOUND, "ok", False, True)


def test_answers_goodbyes_and_malformed_turns():
    answer, malformed, empty = actions("<answer>x</answer>", "<search>x</answer>", "<search> </search>")
    told = [observe(action, None, 3) for action in (answer, None, malformed, empty)]
    assert [(t["obs"], t["status"], done, valid) for t, done, valid in told] == [
        ("", "none", True, False),
        ("", "none", True, True),
        (CORRECTION, "none", False, False),
        (CORRECTION, "none", False, False),
    ]
    keys = set(observe(actions("<search>x</search>")[0], ANSWER, 3)[0])
    assert all(set(t) == keys for t, _, _ in told)  # verl-tool's batches need the same keys in every row


def test_a_body_of_many_fields_is_refused_before_an_error_is_made_for_each():
    from verl_bridge.retrieval import protocol

    body = b"{" + b",".join(b'"x%d":1' % i for i in range(100_000)) + b"}"
    with pytest.raises(protocol.Invalid, match="100000 fields; give at most 32"):
        protocol.read_json(body, protocol.request_models().search)
