"""Run by verl-tool's own Python: its real agent loop against its real tool server, with a scripted model."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest
from check_tool_server import PACKAGE, retriever, serving  # noqa: F401  a fixture
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl_tool.agent_loop.agent_loop import _DummyConfig
from verl_tool.workers.rollout.replica import VerlToolTokenOutput

from verl_bridge.embedded import policy
from verl_bridge.integrations.verl_tool.agent_loop import BridgeAgentLoop
from verl_bridge.qa.actions import CORRECTION, RETRIEVAL_FAILED
from verl_bridge.trace import SearchTrace

SEARCH, ANSWER, BLANK = (
    "<think> hm</think><search> capital of Peru</search>",
    "<answer> Lima</answer>",
    "<search></search>",
)
ROW = {"extra_info": {"question": "capital of Peru?"}, "reward_model": {"ground_truth": {"target": ["Lima"]}}}
DEAD = "http://127.0.0.1:1/get_observation"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(policy.__file__.removesuffix(".py"))


@pytest.fixture(scope="module")
def tool_server(retriever):  # noqa: F811
    with serving(f"{PACKAGE}.tool_server", retriever) as url:
        yield url


class Model:
    """Says the next of its texts; stops at the tag that ends it."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts = tokenizer, list(texts)

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, audio_data=None):
        text = self.texts.pop(0)
        stop = next((tag for tag in sampling_params["stop"] if text.endswith(tag)), None)
        ids = self.tokenizer.encode(text)
        return VerlToolTokenOutput(token_ids=ids, finish_reason="stop", stop_reason=stop, text=text, finished=True)


@pytest.fixture
def roll(tokenizer, tmp_path):
    def roll(url, *texts, response_length=400, **agent):
        (tmp_path / "stop").write_text("</search>,</answer>")
        given = {"enable_agent": True, "max_turns": 3, "max_obs_length": 200, "truncate_obs_side": "right"}
        given |= {"tool_server_url": url, "action_stop_tokens": str(tmp_path / "stop"), "tool_call_timeout": 30}
        rollout = {"prompt_length": 32, "response_length": response_length, "n": 1, "max_model_len": 600}
        config = {"actor_rollout_ref": {"rollout": rollout, "agent": {**given, "tool_call_max_retries": 0, **agent}}}
        config = OmegaConf.create({**config, "data": {}})

        async def run():
            model = Model(tokenizer, *texts)
            loop = BridgeAgentLoop(_DummyConfig(config), model, tokenizer, None)
            try:
                output = await loop.run({}, raw_prompt_ids=tokenizer.encode("capital of Peru?"), **ROW)
                closing = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                await asyncio.gather(*closing)  # the close call
            finally:
                await BridgeAgentLoop.aclose_session()
            return output

        output = asyncio.run(run())
        return output, SearchTrace.from_dict(output.extra_fields["search_trace"])

    return roll


def text_of(tokenizer, output, span):
    return tokenizer.decode(output.response_ids[slice(*span)])


def test_spans_hold_the_very_turns(roll, tool_server, tokenizer):
    output, trace = roll(tool_server, SEARCH, BLANK, SEARCH, ANSWER, max_turns=4)
    assert [text_of(tokenizer, output, turn.span) for turn in trace.turns] == [SEARCH, BLANK, SEARCH, ANSWER]
    assert [turn.kind for turn in trace.turns] == ["search", "malformed", "search", "answer"]
    search, blank = trace.turns[:2]
    assert search.observation == text_of(tokenizer, output, search.observation_span)
    assert search.observation.startswith("\n\n<information>Doc 1(Title: Title 0) text 0")
    assert (search.candidate_ids, search.shown, search.adapter_version) == (("d0", "d1", "d2", "d3"), 2, 5)
    assert blank.observation == CORRECTION
    runs = [(key, len(list(group))) for key, group in groupby(output.response_mask)]
    spans = [turn.span[1] - turn.span[0] for turn in trace.turns]
    assert [length for key, length in runs if key] == spans
    assert (trace.answer, trace.stop_reason) == ("Lima", "answer")
    assert len(output.extra_fields["tool_interact_info"]) == 4  # the answer was sent to the tool, too


def test_control_tokens_that_a_passage_spells_out_are_text(roll, tool_server, tokenizer):
    output, trace = roll(tool_server, "<search>hostile</search>", ANSWER)
    (seen,) = (turn for turn in trace.turns if turn.observation_span is not None)
    ids = output.response_ids[slice(*seen.observation_span)]
    assert seen.observation.count(tokenizer.eos_token) == 2 and tokenizer.decode(ids) == seen.observation
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert set(tokenizer.encode(seen.observation)) >= {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_a_dead_tool_server_takes_the_rollout_out_of_the_loss(roll):
    output, trace = roll(DEAD, SEARCH)
    assert output.extra_fields["traj_stop_reason"] == "tool_signaled_done"
    assert set(output.response_mask) == {0}
    assert trace.stop_reason == "error" and trace.turns[0].status == "error" and trace.turns[0].query


def test_a_failed_retrieval_does_not(roll, tool_server):
    output, trace = roll(tool_server, "<search>broken</search>", ANSWER)
    assert trace.turns[0].status == "error" and trace.turns[0].observation == RETRIEVAL_FAILED
    assert trace.answer == "Lima" and sum(output.response_mask) > 0


def test_nobody_is_asked_at_the_last_turn(roll, tool_server):
    output, trace = roll(tool_server, SEARCH, SEARCH, max_turns=1)
    assert [turn.status for turn in trace.turns] == ["ok", "none"]
    assert output.extra_fields["traj_stop_reason"] == "max_turns_reached" and trace.stop_reason == "max_turns"
    assert len(output.extra_fields["tool_interact_info"]) == 1


def test_an_answer_at_the_last_turn_counts(roll, tool_server):
    _, trace = roll(tool_server, SEARCH, ANSWER, max_turns=1)
    assert (trace.answer, trace.stop_reason) == ("Lima", "answer")


def test_what_each_side_of_truncation_keeps(roll, tool_server):
    """verl-tool's default, ``left``, loses <information>: base_estimator refuses it."""
    _, left = roll(tool_server, SEARCH, ANSWER, max_obs_length=12, truncate_obs_side="left")
    _, right = roll(tool_server, SEARCH, ANSWER, max_obs_length=12, truncate_obs_side="right")
    assert "<information>" not in left.turns[0].observation
    assert right.turns[0].observation.startswith("\n\n<information>Doc 1(")


def test_a_response_that_is_cut(roll, tool_server, tokenizer):
    searched = len(tokenizer.encode(SEARCH))
    output, trace = roll(tool_server, SEARCH, ANSWER, max_response_length=searched + 1, response_length=searched + 1)
    assert len(output.response_ids) == trace.response_length == searched + 1
    assert trace.turns[0].observation_span is None and trace.stop_reason == "length"
