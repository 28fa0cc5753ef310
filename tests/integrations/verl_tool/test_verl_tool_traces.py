"""Records made from verl-tool's rollouts: exact spans by a hand-built response, and every way a rollout can end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from verl_bridge.embedded import policy
from verl_bridge.integrations.verl_tool.traces import (
    Generation,
    ObservationTokenizer,
    RecordingManager,
    build_trace,
    complete,
    tool_failed,
)
from verl_bridge.qa.actions import CORRECTION, RETRIEVAL_FAILED
from verl_bridge.trace import SearchTrace

PROMPT = 7  # tokens
SEARCH, ANSWER = "<think> where</think><search> capital of Peru</search>", "<answer> Lima</answer>"
SEEN = "\n\n<information>Doc 1(Title: Peru) Its capital is Lima.</information>\n\n"
FOUND = {
    "obs": SEEN,
    "status": "ok",
    "error": None,
    "query": "capital of Peru",
    "ids": ["a", "b"],
    "scores": [0.5, 0.25],
    "candidates": [{"id": "a"}, {"id": "b"}],
    "shown": 1,
    "adapter_version": 3,
    "done": 0,
    "valid_action": 1,
    "success": True,
}
NONE = {"status": "none", "ids": [], "scores": [], "candidates": [], "query": "", "shown": 0, "success": True}
ANSWERED = {**NONE, "obs": "", "done": 1}
REFUSED = {**NONE, "obs": CORRECTION, "done": 0}
FAILED = {
    **FOUND,
    "obs": RETRIEVAL_FAILED,
    "status": "error",
    "error": "it is down",
    "ids": [],
    "scores": [],
    "shown": 0,
}
DOWN = {"obs": "Tool server connection error: no.", "reward": None, "done": 1, "valid_action": 0, "success": False}
RAISED = {"obs": "", "error": "Tool processing failed: x", "tool_type": "python_code", "done": 1, "success": True}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(policy.__file__.removesuffix(".py"))


def rollout(tokenizer, *turns, told=(), reason="tool_signaled_done", limit=None):
    """What verl-tool's loop leaves behind: each turn's tokens, then (if called) the observation's."""
    ids, generations = [], []
    for number, turn in enumerate(turns):
        sampled = tokenizer.encode(turn)
        generations.append(Generation(PROMPT + len(ids), len(sampled)))
        ids += sampled
        if number < len(told):
            ids += tokenizer.encode(told[number]["obs"])
    return {
        "response_ids": ids[:limit],
        "generations": generations,
        "told": told,
        "host_reason": reason,
        "prompt_length": PROMPT,
        "question": "capital of Peru?",
        "golden_answers": ["Lima"],
    }


def test_spans_are_those_of_the_generations(tokenizer):
    made = rollout(tokenizer, SEARCH, ANSWER, told=[FOUND, ANSWERED])
    trace = build_trace(tokenizer, **made)
    first, second = (len(tokenizer.encode(turn)) for turn in (SEARCH, ANSWER))
    seen = len(tokenizer.encode(SEEN))
    search, answer = trace.turns
    assert search.span == (0, first) and search.observation_span == (first, first + seen)
    assert answer.span == (first + seen, first + seen + second) and answer.observation_span is None
    assert tokenizer.decode(made["response_ids"][slice(*trace.answer_span)]).strip() == trace.answer == "Lima"
    assert (search.kind, search.query, search.status, search.shown) == ("search", "capital of Peru", "ok", 1)
    assert (search.candidate_ids, search.candidate_scores, search.adapter_version) == (("a", "b"), (0.5, 0.25), 3)
    assert search.observation == SEEN and trace.stop_reason == "answer"
    tags = [tokenizer.decode(made["response_ids"][slice(*span)]) for span in search.tag_spans]
    assert tags == ["<think>", "</think>", "<search>", "</search>"]


def test_an_empty_observation_does_not_join_two_turns(tokenizer):
    """verl-tool's mask has one run of ones here; the two turns have a span each all the same."""
    made = rollout(tokenizer, "<search></search>", ANSWER, told=[{**REFUSED, "obs": ""}, ANSWERED])
    trace = build_trace(tokenizer, **made)
    assert [turn.kind for turn in trace.turns] == ["malformed", "answer"]
    assert trace.turns[0].span[1] == trace.turns[1].span[0] and trace.turns[0].observation_span is None


def test_what_was_cut_off_is_not_what_was_read(tokenizer):
    """truncate_obs_side keeps part of the observation: the record has the text of the tokens that are there."""
    kept = "\n\n<information>Doc 1(Title: Peru)"
    made = rollout(tokenizer, SEARCH, ANSWER, told=[{**FOUND, "obs": kept}, ANSWERED])
    assert build_trace(tokenizer, **made).turns[0].observation == kept


def test_no_call_is_made_at_the_last_turn(tokenizer):
    trace = build_trace(tokenizer, **rollout(tokenizer, SEARCH, SEARCH, told=[FOUND], reason="max_turns_reached"))
    assert [turn.status for turn in trace.turns] == ["ok", "none"]
    assert trace.turns[1].query == "capital of Peru" and trace.stop_reason == "max_turns"


def test_an_answer_at_the_last_turn_needs_no_call(tokenizer):
    trace = build_trace(tokenizer, **rollout(tokenizer, SEARCH, ANSWER, told=[FOUND], reason="max_turns_reached"))
    assert (trace.answer, trace.stop_reason) == ("Lima", "answer")


def test_an_observation_that_nothing_follows_was_read_by_nobody(tokenizer):
    trace = build_trace(tokenizer, **rollout(tokenizer, SEARCH, told=[FOUND], reason="max_model_len_exceeded"))
    (turn,) = trace.turns
    assert turn.status == "ok" and turn.shown == 1 and turn.observation_span is None and turn.observation == ""
    assert trace.stop_reason == "length"


def test_turns_beyond_the_limit_are_gone_and_the_one_across_it_is_cut(tokenizer):
    first, seen = len(tokenizer.encode(SEARCH)), len(tokenizer.encode(SEEN))
    whole = {"told": [FOUND, ANSWERED], "reason": "tool_signaled_done"}
    within = build_trace(tokenizer, **rollout(tokenizer, SEARCH, ANSWER, **whole, limit=first + seen - 2))
    assert len(within.turns) == 1 and within.turns[0].observation_span is None
    across = build_trace(tokenizer, **rollout(tokenizer, SEARCH, ANSWER, **whole, limit=first + seen + 1))
    assert across.turns[1].span == (first + seen, first + seen + 1) and across.turns[1].kind == "malformed"
    assert across.answer is None and across.response_length == first + seen + 1


def test_a_failed_retrieval_is_marked_and_the_rollout_goes_on(tokenizer):
    trace = build_trace(tokenizer, **rollout(tokenizer, SEARCH, ANSWER, told=[FAILED, ANSWERED]))
    search = trace.turns[0]
    assert (search.kind, search.status, search.query) == ("search", "error", "capital of Peru")
    assert search.candidate_ids == () and search.observation == RETRIEVAL_FAILED and trace.answer == "Lima"


@pytest.mark.parametrize("told", [DOWN, RAISED], ids=["down", "raised"])
def test_a_rollout_that_the_tool_server_failed_is_an_error(tokenizer, told):
    trace = build_trace(tokenizer, **rollout(tokenizer, SEARCH, told=[told]))
    assert tool_failed(told) and trace.stop_reason == "error"
    assert (trace.turns[0].status, trace.turns[0].query) == ("error", "capital of Peru")


def test_a_search_that_only_finish_answered_names_the_launcher(tokenizer):
    """An unknown --tool_type starts healthy with nothing but ``finish``, which is done with everything."""
    told = {"obs": "", "reward": None, "done": 1, "valid_action": 1, "success": True}
    with pytest.raises(RuntimeError, match=r"another tool than verl_bridge_search .*verl_tool\.serve"):
        build_trace(tokenizer, **rollout(tokenizer, SEARCH, told=[told]))


def test_another_tool_may_answer_what_is_no_search(tokenizer):
    told = {"obs": " 4", "reward": None, "done": 0, "valid_action": 1, "success": True}
    trace = build_trace(tokenizer, **rollout(tokenizer, "2+2", ANSWER, told=[told, ANSWERED]))
    assert [turn.kind for turn in trace.turns] == ["malformed", "answer"] and trace.turns[0].observation == " 4"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("model_chose_to_finish", "no_action"),
        ("model_chose_to_finish_with_empty_response", "no_action"),
        ("no_action_stop_token_found_in_stop_reason=x", "no_action"),
        ("max_response_length_reached", "length"),
        ("finish_reason_abort", "error"),
    ],
)
def test_ends_without_an_action(tokenizer, reason, expected):
    trace = build_trace(tokenizer, **rollout(tokenizer, "hm", reason=reason))
    assert (trace.stop_reason, trace.turns[0].kind) == (expected, "malformed")


# ---- the loop's output ----


def output(made, prompt=(1,) * PROMPT):
    return SimpleNamespace(
        prompt_ids=list(prompt),
        response_ids=list(made["response_ids"]),
        response_mask=[1] * len(made["response_ids"]),
        response_logprobs=[0.0] * len(made["response_ids"]),
        extra_fields={"tool_interact_info": [dict(t) for t in made["told"]], "traj_stop_reason": made["host_reason"]},
    )


ROW = {"extra_info": {"question": "capital of Peru?"}, "reward_model": {"ground_truth": {"target": ["Lima"]}}}


def test_the_record_travels_in_the_extra_fields(tokenizer):
    made = rollout(tokenizer, SEARCH, ANSWER, told=[FOUND, ANSWERED])
    rolled = output(made)
    complete(rolled, tokenizer, made["generations"], ROW)
    trace = SearchTrace.from_dict(rolled.extra_fields["search_trace"])
    assert trace == build_trace(tokenizer, **made) and trace.question == "capital of Peru?"
    assert sum(rolled.response_mask) == len(made["response_ids"])
    assert all("candidates" not in told for told in rolled.extra_fields["tool_interact_info"])


def test_a_rollout_that_the_tool_server_failed_is_not_trained_on(tokenizer):
    made = rollout(tokenizer, SEARCH, told=[DOWN])
    rolled = output(made)
    complete(rolled, tokenizer, made["generations"], ROW)
    assert rolled.response_mask == [0] * len(made["response_ids"])


def test_a_failed_retrieval_takes_nothing_out_of_the_loss(tokenizer):
    made = rollout(tokenizer, SEARCH, ANSWER, told=[FAILED, ANSWERED])
    rolled = output(made)
    complete(rolled, tokenizer, made["generations"], ROW)
    assert all(rolled.response_mask)


def test_an_empty_response_gets_a_token_for_its_reward(tokenizer):
    made = rollout(tokenizer, "", reason="model_chose_to_finish_with_empty_response")
    rolled = output(made)
    complete(rolled, tokenizer, made["generations"], ROW)
    assert rolled.response_ids == [tokenizer.eos_token_id] and rolled.response_mask == [0]
    assert SearchTrace.from_dict(rolled.extra_fields["search_trace"]).response_length == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"reward_model": ROW["reward_model"]}, "fill extra_info.question"),
        ({"extra_info": ROW["extra_info"]}, "gold answers"),
        (
            {"extra_info": ROW["extra_info"], "golden_answers": ["Lima"]},
            "non-empty string in reward_model.ground_truth",
        ),
    ],
)
def test_a_row_without_question_or_golds_is_named(tokenizer, row, words):
    made = rollout(tokenizer, ANSWER)
    with pytest.raises(ValueError, match=words):
        complete(output(made), tokenizer, made["generations"], row)


def test_the_reward_model_s_target_is_what_counts(tokenizer):
    made = rollout(tokenizer, ANSWER, told=[ANSWERED])
    for other in (["Cusco"], [], [" "]):
        rolled = output(made)
        complete(rolled, tokenizer, made["generations"], {**ROW, "golden_answers": other})
        assert rolled.extra_fields["search_trace"]["golden_answers"] == ("Lima",)


def test_the_question_may_be_the_prompt_s_last_message(tokenizer):
    made = rollout(tokenizer, ANSWER, told=[ANSWERED])
    rolled = output(made)
    row = {"raw_prompt": [{"role": "user", "content": "Use the tags. Question: capital of Peru?"}], **ROW}
    complete(rolled, tokenizer, made["generations"], {**row, "extra_info": {}})
    assert rolled.extra_fields["search_trace"]["question"] == "capital of Peru?"


def test_generations_are_noted_before_the_list_grows():
    """verl-tool hands on the very list that it appends to."""

    class Manager:
        async def generate(self, request_id, *, prompt_ids, sampling_params):
            prompt_ids.extend([9, 9])  # another coroutine might
            return SimpleNamespace(token_ids=[4, 5, 6])

    async def run():
        manager, ids = RecordingManager(Manager()), [1, 2, 3]
        await manager.generate("r", prompt_ids=ids, sampling_params={})
        await manager.generate("r", prompt_ids=ids, sampling_params={})
        return manager.generations

    assert asyncio.run(run()) == [Generation(3, 3), Generation(5, 3)]


def test_control_tokens_that_a_passage_spells_out_are_text(tokenizer):
    hostile = "<information>Doc 1(Title: <eos>) x <pad></information>"
    control, reading = {tokenizer.eos_token_id, tokenizer.pad_token_id}, ObservationTokenizer(tokenizer)
    ids = reading.encode(hostile)
    assert tokenizer.decode(ids) == reading.decode(ids) == hostile
    assert not control & set(ids) and control <= set(tokenizer.encode(hostile))  # the shared one is as it was
    assert reading.encode(SEEN) == tokenizer.encode(SEEN)
