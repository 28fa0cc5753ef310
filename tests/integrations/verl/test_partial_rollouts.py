"""Rollouts interrupted and resumed by verl's own asynchronous client: the loop notices nothing, spans stay exact."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from test_agent_loop import ANSWER, SEARCH, Retriever, tokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from verl_bridge.integrations.verl import agent_loop
from verl_bridge.trace import SearchTrace


class Server:
    """A rollout server that writes scripted text and is interrupted after scripted numbers of tokens.

    Each entry of ``script`` is one call: (text that the policy would write from the turn's start, tokens before it is
    interrupted or None). A call goes on from what its prompt holds of the turn, under a weights' version of its own.
    """

    def __init__(self, tok, script):
        self.tok, self.script, self.calls, self.written = tok, list(script), [], 0
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, prompt_ids, sampling_params, **kwargs):
        text, interrupted = self.script.pop(0)
        rest = self.tok.encode(text, add_special_tokens=False)[self.written :][: sampling_params["max_tokens"]]
        ids = rest[:interrupted]
        self.calls.append((len(prompt_ids), sampling_params["max_tokens"], ids))
        aborted = interrupted is not None
        self.written = self.written + len(ids) if aborted else 0
        version = len(self.calls)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-float(i) - 100 * version for i in range(len(ids))] if sampling_params["logprobs"] else None,
            stop_reason="aborted" if aborted else "completed",
            num_preempted=0,
            extra_fields={"global_steps": version},
        )


class Client(llm_server.FullyAsyncLLMServerClient):
    """verl's client of the asynchronous modes, in front of one server in this process."""

    server = None

    async def _acquire_server(self, request_id, **extra):
        return "server", self.server

    def _release_server(self, server_id, request_id=None):
        return None


@pytest.fixture
def roll(monkeypatch):
    async def at_once(seconds):
        return None

    monkeypatch.setattr(llm_server, "asyncio", SimpleNamespace(sleep=at_once))  # it waits a second before it resumes
    monkeypatch.setattr(agent_loop, "search_source", lambda settings: Retriever())

    def run(script, *, response=400, single_tags=True, logprobs=True):
        tok = tokenizer(single_tags)
        rollout = {"name": "vllm", "prompt_length": 64, "response_length": response}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, "verl_bridge": {}})
        client = Client(config)
        client.server = Server(tok, script)

        async def roll_out():
            loop = agent_loop.SearchAgentLoop(
                trainer_config=DictConfigWrap(config),
                server_manager=client,
                tokenizer=tok,
                processor=None,
                dataset_cls=None,
                data_config=DictConfigWrap(config.data),
            )
            return await loop.run(
                {"temperature": 1.0, "logprobs": logprobs},
                raw_prompt=[{"role": "user", "content": "capital of Peru?"}],
                reward_model={"ground_truth": {"target": ["Lima"]}},
                extra_info={"question": "What is the capital of Peru?"},
            )

        output = asyncio.run(roll_out())
        assert not client.server.script
        trace = SearchTrace.from_dict(output.extra_fields["search_trace"])
        assert len(output.response_ids) == len(output.response_mask) == trace.response_length
        assert sum(output.response_mask) == sum(turn.span[1] - turn.span[0] for turn in trace.turns)
        return output, trace, tok, client.server.calls

    return run


def test_an_interrupted_rollout_is_the_uninterrupted_one(roll):
    whole, trace, tok, _ = roll([(SEARCH, None), (ANSWER, None)])
    parts, same, _, calls = roll([(SEARCH, 3), (SEARCH, 0), (SEARCH, 2), (SEARCH, None), (ANSWER, 1), (ANSWER, None)])
    assert same == trace
    assert parts.response_ids == whole.response_ids and parts.response_mask == whole.response_mask
    # each attempt goes on from all that was written before it, within what is left
    prompt = len(whole.prompt_ids)
    assert [call[:2] for call in calls[:4]] == [(prompt + n, 400 - n) for n in (0, 3, 3, 5)]
    # every token keeps the log-prob of the weights that drew it, observations have none
    drawn = [value for value, mask in zip(parts.response_logprobs, parts.response_mask, strict=True) if mask]
    expected = [-float(i) - 100 * (n + 1) for n, (*_, ids) in enumerate(calls) for i in range(len(ids))]
    assert drawn == expected and len(drawn) == sum(parts.response_mask)
    # the first and the last weights that had a part in it
    assert (parts.extra_fields["min_global_steps"], parts.extra_fields["max_global_steps"]) == (1, 6)
    assert same.turns[0].span == (0, len(tok.encode(SEARCH, add_special_tokens=False)))


def test_a_stop_tag_across_the_interruption_still_ends_the_turn(roll):
    """A tag of several tokens: the server that goes on looks for it in its own tokens alone, and writes past it."""
    tok = tokenizer(single_tags=False)
    ids = tok.encode(SEARCH + " and more", add_special_tokens=False)
    inside = len(tok.encode(SEARCH, add_special_tokens=False)) - 2
    assert "</search>" not in tok.decode(ids[:inside]) and "</search>" not in tok.decode(ids[inside:])
    output, trace, _, calls = roll(
        [(SEARCH + " and more", inside), (SEARCH + " and more", None), (ANSWER, None)], single_tags=False
    )
    whole, uninterrupted, *_ = roll([(SEARCH, None), (ANSWER, None)], single_tags=False)
    assert trace == uninterrupted and output.response_ids == whole.response_ids
    cut = [value for value in output.response_logprobs if -300 < value <= -200]
    assert len(calls[1][2]) > len(cut) == trace.turns[0].span[1] - inside  # what came after the tag has no log-prob


@pytest.mark.parametrize("interrupted", [6, 10])
def test_the_budget_is_one_for_all_attempts(roll, interrupted):
    """Ten tokens: an interruption takes from them, and one at the last of them ends the response."""
    script = [(SEARCH, interrupted)] + ([(SEARCH, None)] if interrupted < 10 else [])
    output, trace, _, calls = roll(script, response=10)
    assert [call[1] for call in calls] == [10, 4][: len(calls)]
    assert len(output.response_ids) == 10 and trace.stop_reason == "length"


def test_no_log_probs_are_asked_for(roll):
    output, trace, *_ = roll([(SEARCH, 3), (SEARCH, None), (ANSWER, None)], logprobs=False)
    assert output.response_logprobs is None and trace.answer == "Lima"
