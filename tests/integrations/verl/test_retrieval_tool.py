"""Function-calling rollouts through verl's own loop, parser and templates: what the trace says is what happened."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from omegaconf import OmegaConf
from tool_standins import END, TEMPLATE, call, roll_out, text
from verl.tools.tool_registry import initialize_tools_from_config

from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.verl.retrieval_tool import TOOL_FILE, RetrievalTool, check_tools, query_of
from verl_bridge.qa.actions import NOTHING_FOUND, RETRIEVAL_FAILED
from verl_bridge.qa.reward import compute_score, score_trace
from verl_bridge.qa.signals import rollout_signals

#: Some templates spell what a tool said as JSON.
JSON_TEMPLATE = TEMPLATE.replace("{{ m.content }}\n</tool", "{{ m.content | tojson }}\n</tool")
#: And what cannot be found again at all.
LOUD_TEMPLATE = TEMPLATE.replace("{{ m.content }}\n</tool", "{{ m.content | upper }}\n</tool")


@pytest.fixture
def roll(monkeypatch):
    return partial(roll_out, monkeypatch)


ANSWER = "so it is</think><answer> Lima </answer>" + END


@pytest.mark.parametrize("family", [None, "qwen2"])
def test_search_then_answer(roll, family):
    output, trace, tok, model, _ = roll("I look it up. " + call() + END, ANSWER, family=family)
    search, answer = trace.turns
    assert (search.kind, search.query, search.status, search.shown) == ("search", "peru", "ok", 2)
    assert search.candidate_ids == tuple("01234") and search.candidate_scores[0] == 0.9 and search.adapter_version == 7
    assert search.observation == "Doc 1(Title: T0) peru number 0\nDoc 2(Title: T1) peru number 1"
    assert text(output, tok, search.observation_span) == search.observation
    assert text(output, tok, search.span) == "I look it up. " + call() + END
    assert [text(output, tok, tag) for tag in search.tag_spans] == ["<tool_call>", "</tool_call>", END]
    assert text(output, tok, answer.span) == ANSWER and text(output, tok, trace.answer_span) == "Lima"
    assert [text(output, tok, tag) for tag in answer.tag_spans] == ["</think>", "<answer>", "</answer>", END]
    assert (trace.answer, trace.stop_reason) == ("Lima", "answer") and score_trace(trace).score == 1.0
    # what the model read: the tool's schema in the prompt, then the response so far, id by id
    assert '"name": "search"' in tok.decode(output.prompt_ids) and "in a few words" in tok.decode(output.prompt_ids)
    assert model.prompts[1] == (output.prompt_ids + output.response_ids)[: len(model.prompts[1])]
    assert len(model.prompts[1]) == len(output.prompt_ids) + answer.span[0]
    assert output.extra_fields["min_global_steps"] == 1 and output.extra_fields["max_global_steps"] == 2


def test_calls_of_one_turn_are_a_turn_each(roll):
    calls = [call("peru"), call("nothing"), call("peru, Lima says"), call("peru")]
    output, trace, tok, model, source = roll("Four. " + "\n".join(calls) + END, ANSWER)
    turns = trace.turns[:4]
    assert source.asked == ["peru", "nothing", "peru, Lima says", "peru"] and len(model.prompts) == 2
    assert [text(output, tok, turn.span) for turn in turns] == [
        "Four. " + calls[0] + "\n",
        calls[1] + "\n",
        calls[2] + "\n",
        calls[3] + END,
    ]
    assert [turn.query for turn in turns] == source.asked and [turn.shown for turn in turns] == [2, 0, 2, 2]
    assert turns[1].observation == NOTHING_FOUND.strip() and turns[1].status == "ok"
    assert "Lima says number 0" in turns[2].observation and turns[0].observation == turns[3].observation
    for turn in turns:
        assert text(output, tok, turn.observation_span) == turn.observation
    # the third found it; a segment is the whole assistant turn, so its last call counts
    assert rollout_signals(trace).first_hit_turn == 3


def test_calls_beyond_verls_limit_are_not_made(roll):
    both = call("peru") + call("chile") + END
    output, trace, tok, _, source = roll(both, ANSWER, max_parallel_calls=1)
    assert source.asked == ["peru"] and [turn.kind for turn in trace.turns] == ["search", "answer"]
    assert text(output, tok, trace.turns[0].span) == both


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (call(name="google"), "Unknown function 'google'"),
        (call(words=["a"]), "needs a query"),
        (call(query="  "), "needs a query"),
        (call(query=3), "needs a query"),
        ('<tool_call>{"name": "search", "arguments": ["x"]}</tool_call>', "needs a query"),
    ],
)
def test_a_call_that_cannot_be_made_is_malformed_and_answered(roll, broken, says):
    output, trace, tok, _, source = roll(call("chile") + broken + END, ANSWER)
    first, second, _ = trace.turns
    assert source.asked == ["chile"] and (first.kind, second.kind) == ("search", "malformed")
    assert text(output, tok, second.span) == broken + END and says in second.observation
    assert score_trace(trace).score == pytest.approx(0.8)


def test_malformed_json_of_arguments(roll, monkeypatch):
    """A parser may hand arguments on unread."""
    from verl.experimental.agent_loop.tool_parser import FunctionCall, HermesToolParser

    async def extract(self, ids, tools=None):
        said = self.tokenizer.decode(ids)
        return said, [FunctionCall(name="search", arguments='{"query": "pe')] if "<tool_call>" in said else []

    monkeypatch.setattr(HermesToolParser, "extract_tool_calls", extract)
    _, trace, *_, source = roll('<tool_call>{"query": "pe</tool_call>' + END, ANSWER)
    assert trace.turns[0].kind == "malformed" and "Invalid JSON in arguments" in trace.turns[0].observation
    assert source.asked == []


def test_a_retriever_that_is_down_is_an_error_and_no_evidence(roll):
    _, trace, *_ = roll(call("broken") + call("Lima") + END, ANSWER)
    failed, made, _ = trace.turns
    assert (failed.status, failed.observation, failed.candidate_ids) == ("error", RETRIEVAL_FAILED.strip(), ())
    assert failed.adapter_version is None and made.status == "ok" and score_trace(trace).tool_hit


def test_an_observation_that_fills_the_response_never_entered_the_context(roll):
    whole, trace, *_ = roll(call("Lima") + END, ANSWER)
    room = trace.turns[1].span[0]  # up to the generation that would follow
    output, cut, _, model, _ = roll(call("Lima") + END, ANSWER, response=room)
    assert len(model.prompts) == 1 and cut.stop_reason == "length"
    assert cut.turns[0].status == "ok" and cut.turns[0].observation_span is None
    assert not score_trace(cut).tool_hit and output.response_ids == whole.response_ids[: cut.turns[0].span[1]]


def test_a_long_observation_keeps_its_head(roll):
    output, trace, tok, *_ = roll(call("Lima é") + END, ANSWER, agent={"observation_tokens": 32}, golds=("number 1",))
    search = trace.turns[0]
    assert search.observation == "Doc 1(Title: T0) Lima é number" and search.shown == 2
    assert text(output, tok, search.observation_span) == search.observation
    assert not score_trace(trace).tool_hit  # the alias stood in the part that was cut


def test_a_document_cannot_write_control_tokens(roll):
    output, trace, tok, *_ = roll(call("evil") + END, ANSWER)
    observed = output.response_ids[slice(*trace.turns[0].observation_span)]
    assert not set(observed) & {tok.eos_token_id, *tok.convert_tokens_to_ids(["<|im_start|>", "</tool_call>"])}
    assert "< |im_end|>" in trace.turns[0].observation and "[answer]" in trace.turns[0].observation


@pytest.mark.parametrize(
    ("template", "seen"), [(JSON_TEMPLATE, [True, True]), (LOUD_TEMPLATE, [False, True]), (TEMPLATE, [True, True])]
)
def test_templates_that_respell_what_the_tool_said(roll, template, seen):
    output, trace, tok, *_ = roll(call("lima one") + call("two") + END, ANSWER, template=template)
    turns = trace.turns[:2]
    assert [turn.observation_span is not None for turn in turns] == seen
    for turn, there in zip(turns, seen, strict=True):
        assert turn.observation == (text(output, tok, turn.observation_span) if there else "")
    assert rollout_signals(trace).first_hit_turn == 1


def test_a_template_that_takes_the_turns_last_token_back(roll):
    """GLM's next message begins with the token that stopped the generation: it was sampled, but is context now."""
    output, trace, tok, *_ = roll(call() + "<|observation|>", ANSWER, family="glm4_moe")
    assert text(output, tok, trace.turns[0].span) == call()
    assert text(output, tok, trace.turns[0].observation_span) == trace.turns[0].observation


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<answer>Lima</answer>" + END, "Lima"),
        ("<think>Peru, Lima</think>\n Lima\n" + END, "Lima"),
        ("Lima" + END, "Lima"),
        ("<think>Lima" + END, None),
        ("<think>Lima</think>" + END, None),
        ("<answer>Lima" + END, None),
        ("<search>peru</search><answer>Lima</answer>" + END, None),
        ("<tool_call>{not json}</tool_call>" + END, None),
        ("<tool_call>{cut off" + END, None),
    ],
)
def test_what_counts_as_the_answer(roll, said, answer):
    output, trace, tok, _, source = roll(said)
    assert trace.answer == answer and source.asked == []
    assert trace.stop_reason == ("answer" if answer else "no_action")
    assert trace.turns[0].kind == ("answer" if answer else "malformed")
    assert answer is None or text(output, tok, trace.answer_span) == answer
    reward = compute_score("nq", "", None, output.extra_fields)
    assert reward["score"] == reward["em"] == reward["format"] == (1.0 if answer else 0.0)


@pytest.mark.parametrize(("ours", "verls"), [(2, None), (2, 9), (9, 2)])
def test_the_last_turn_may_answer_but_not_search(roll, ours, verls):
    limits = {"agent": {"max_turns": ours}, "max_assistant_turns": verls}
    _, trace, _, model, source = roll(call() + END, call("chile") + call("bolivia") + END, **limits)
    assert len(model.prompts) == 2 and source.asked == ["peru"] and trace.stop_reason == "max_turns"
    assert [(t.kind, t.query, t.status) for t in trace.turns[1:]] == [
        ("search", "chile", "none"),
        ("search", "bolivia", "none"),
    ]
    _, trace, *_ = roll(call() + END, ANSWER, **limits)
    assert trace.answer == "Lima"


def test_token_limits(roll):
    _, trace, *_ = roll("Lima is the capital of Peru", response=9)
    assert (trace.stop_reason, trace.turns[0].kind, trace.response_length) == ("length", "malformed", 9)
    _, trace, *_ = roll("Lima is the capital", agent={"turn_tokens": 4})
    assert (trace.stop_reason, trace.answer, trace.response_length) == ("length", None, 4)
    _, trace, *_, source = roll(call(), response=len(call()) - 21)  # the marks are a token each
    assert (trace.stop_reason, trace.turns[0].status, source.asked) == ("length", "none", [])


def test_an_empty_generation_leaves_one_masked_token(roll):
    output, trace, tok, *_ = roll("")
    assert output.response_ids == [tok.eos_token_id] and output.response_mask == [0]
    assert trace.turns[0].kind == "malformed" and score_trace(trace).score == 0.0
    assert output.prompt_ids and tok.decode(output.prompt_ids).endswith("assistant\n")


def test_half_a_surrogate_pair_in_a_call_is_a_question_mark_in_the_record(roll):
    calls = call("lima \ud83d") + END, call("peru") + call("chile \ud83d") + END
    output, trace, tok, *_ = roll(*calls, agent={"max_turns": 2})  # the second turn's are never made
    assert [(turn.query, turn.status) for turn in trace.turns] == [
        ("lima ?", "ok"),
        ("peru", "none"),
        ("chile ?", "none"),
    ]
    assert text(output, tok, trace.turns[2].span) == call("chile \ud83d") + END
    assert trace.turns[0].observation.startswith("Doc 1(Title: T0) lima ? number 0")


def test_the_question_goes_with_the_query_where_asked(roll):
    *_, source = roll(call() + END, ANSWER, retriever={"query_input": "question_query"})
    assert source.asked == ["What is the capital of Peru? peru"]


def test_the_tool_without_its_loop_says_so():
    (tool,) = initialize_tools_from_config(str(TOOL_FILE))
    assert isinstance(tool, RetrievalTool) and tool.name == "search"
    with pytest.raises(RuntimeError, match="default_agent_loop to verl_bridge_tool_agent"):
        asyncio.run(tool.execute("1", {"query": "peru"}))


@pytest.mark.parametrize(
    ("arguments", "query"),
    [({"query": " a "}, "a"), ('{"query": "a"}', "a"), ("{", None), ("[]", None), (None, None), ({"query": ""}, None)],
)
def test_query_of_arguments(arguments, query):
    assert query_of(arguments) == query


OTHER = TOOL_FILE.read_text().replace("verl_bridge.integrations.verl.retrieval_tool.RetrievalTool", "{}")


@pytest.mark.parametrize(
    ("config", "content", "says"),
    [
        ({"function_tool_path": "tools.py"}, None, "function_tool_path=tools.py.*set it to null"),
        ({}, OTHER.replace("{}", "verl.tools.base_tool.BaseTool"), "has search, and.*only RetrievalTool"),
        ({}, OTHER.replace("{}", "verl.tools.nothing.Tool"), "gives no tools.*begin with"),
        ({}, "tools: []", "has no tools"),
    ],
)
def test_tools_that_traces_cannot_tell_of_are_refused(tmp_path, config, content, says):
    path = tmp_path / "tools.yaml"
    path.write_text(content or "")
    with pytest.raises(ConfigError, match=says):
        check_tools(OmegaConf.create({"tool_config_path": str(path), **config}))


def test_our_own_tools_pass(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOL_FILE.read_text().replace("name: search", "name: find"))
    check_tools(OmegaConf.create({"tool_config_path": str(tmp_path / "tools.yaml"), "function_tool_path": None}))
    check_tools(OmegaConf.create({"tool_config_path": None, "function_tool_path": None}))
