"""verl's rollout loop for search agents: Search-R1's tags, exact token spans, one :class:`SearchTrace` per rollout.

Per turn the model writes ``<think>…</think>`` and one action. A ``<search>`` is answered with an ``<information>``
block of the ``shown`` best documents, an ``<answer>`` ends the rollout, anything else gets a corrective sentence. Token
ids are never re-made by decoding and encoding: what the model sampled is what is trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

from verl_bridge.config import load_settings
from verl_bridge.integrations.sources import ask, search_source
from verl_bridge.integrations.tokens import encode_text
from verl_bridge.plugin import AGENT_LOOP
from verl_bridge.qa.actions import (
    CORRECTIONS,
    NOTHING_FOUND,
    OBSERVATION_HEAD,
    OBSERVATION_TAIL,
    RETRIEVAL_FAILED,
    Action,
    TurnTokens,
    decode,
    format_observation,
    read_turn,
)
from verl_bridge.qa.questions import question_of, training_golds
from verl_bridge.trace import SearchTrace, SearchTurn, Span, StopReason

STOP_TAGS = ("</search>", "</answer>")


@dataclass
class _Response:
    """The response under construction: the first three lists grow together."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[SearchTurn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: {"generate_sequences": 0.0, "tool_calls": 0.0})
    server_fields: dict[str, Any] = field(default_factory=dict)

    def sampled(self, ids: list[int], log_probs: list[float] | None) -> Span:
        start = len(self.ids)
        self.ids += ids
        self.mask += [1] * len(ids)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
        return start, len(self.ids)

    def observed(self, ids: list[int]) -> Span:
        start = len(self.ids)
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        return start, len(self.ids)


@register(AGENT_LOOP)
class SearchAgentLoop(AgentLoopBase):
    """Registered as ``verl_bridge_search``; settings come from the ``verl_bridge`` section of verl's config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = load_settings(self.config)
        self.agent, self.retriever = settings.agent, settings.retriever
        self.response_length = self.rollout_config.response_length
        self.turn_tokens = self.agent.turn_tokens or self.response_length
        self.correction = CORRECTIONS[self.agent.correction]
        # A tag that is one token stops generation by id; otherwise the server has to match the text.
        ids = [self.tokenizer.encode(tag, add_special_tokens=False) for tag in STOP_TAGS]
        if all(len(tag) == 1 for tag in ids):
            self.stop_params: dict[str, Any] = {"stop_token_ids": [tag[0] for tag in ids]}
        elif self.rollout_config.get("name") == "sglang":
            raise ValueError(
                "actor_rollout_ref.rollout.name=sglang cannot stop on text in verl, and this tokenizer spells "
                f"{', '.join(STOP_TAGS)} with several tokens: use vllm, or a tokenizer with the tags as tokens"
            )
        else:
            self.stop_params = {"stop": list(STOP_TAGS), "include_stop_str_in_output": True}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Roll out one question; ``extra_fields["search_trace"]`` carries the record."""
        messages = list(kwargs["raw_prompt"])
        question = question_of({**kwargs, "prompt": messages}) or str(messages[-1]["content"])
        prompt_ids = await self.ct_build_initial_tokens(messages)
        response, request_id = _Response(), uuid4().hex
        answer: str | None = None
        answer_span: Span | None = None
        stop_reason: StopReason | None = None

        for turn in range(self.agent.max_turns):
            room = min(self.turn_tokens, self.response_length - len(response.ids))
            if room < 1:
                stop_reason = "length"
                break
            sampled = await self._sample(response, prompt_ids, request_id, {**sampling_params, "max_tokens": room})
            if sampled is None:
                stop_reason = "error"
                break
            read, span = sampled
            start, tags = span[0], tuple((span[0] + first, span[0] + last) for first, last in read.tag_spans)
            if read.action.kind == "answer":
                first, last = read.content_span
                answer, answer_span = read.action.content, (start + first, start + last)
                response.turns.append(SearchTurn("answer", span, tags))
                stop_reason = "answer"
                break
            made = partial(SearchTurn, read.action.kind, span, tags)
            stop_reason = await self._respond(response, read.action, made, question, turn == self.agent.max_turns - 1)
            if stop_reason is not None:
                break

        if not response.ids:  # verl writes the reward to the last token: an empty response has none
            response.observed([self.tokenizer.eos_token_id])
        trace = SearchTrace(
            question=question,
            golden_answers=training_golds(kwargs, "a question of the dataset"),
            turns=tuple(response.turns),
            answer=answer,
            answer_span=answer_span,
            stop_reason=stop_reason or "max_turns",
            response_length=len(response.ids),
        )
        extra_fields = {"turn_scores": [], "tool_rewards": [], "search_trace": trace.to_dict()}
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response.ids,
            response_mask=response.mask,
            response_logprobs=response.log_probs if sampling_params.get("logprobs") else None,
            num_turns=2 * len(response.turns),
            metrics=response.metrics,
            extra_fields={**response.server_fields, **extra_fields},
        )

    async def _sample(
        self, response: _Response, prompt_ids: list[int], request_id: str, sampling_params: dict[str, Any]
    ) -> tuple[TurnTokens, Span] | None:
        """One turn of the policy, added to the response: what it says and its span. None when it was aborted."""
        with simple_timer("generate_sequences", response.metrics):
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt_ids + response.ids,
                sampling_params={**sampling_params, **self.stop_params},
            )
        # Staleness is a range: the first generation's fields, the last generation's maximum.
        latest = output.extra_fields.get("max_global_steps")
        response.server_fields = response.server_fields or dict(output.extra_fields)
        if latest is not None:
            response.server_fields["max_global_steps"] = latest
        if output.stop_reason == "aborted" and not output.token_ids:
            return None
        # Text after the action is not part of the rollout: it is neither shown again nor trained on.
        sampled = list(output.token_ids)[: sampling_params["max_tokens"]]
        read = read_turn(self.tokenizer, sampled)
        log_probs = list(output.log_probs)[: read.length] if output.log_probs else None
        return read, response.sampled(sampled[: read.length], log_probs)

    async def _respond(
        self, response: _Response, action: Action, made: partial[SearchTurn], question: str, last_turn: bool
    ) -> StopReason | None:
        """What the policy reads after a search or a malformed action, added to the response.

        Args:
            response: so far, with the sampled tokens of the turn.
            action: what the turn asked for.
            made: the turn's record without what was searched and observed.
            question: the rollout's.
            last_turn: nothing can be sampled after this turn.

        Returns:
            why the rollout ends here; None when it goes on.
        """
        room = self.response_length - len(response.ids)
        last = last_turn or room < 1
        text, record = self.correction, {}
        if action.kind == "search":
            record = {"query": action.content}
            if not last:
                with simple_timer("tool_calls", response.metrics):
                    record, text = await self._search(action.content, question)
        observation_ids, observation = self._encode_observation(text)
        if last or len(observation_ids) >= room:
            # Nothing can be sampled after it, so it would be shown to nobody: it does not enter the context.
            response.turns.append(made(**record))
            return "max_turns" if last_turn else "length"
        span = response.observed(observation_ids)
        response.turns.append(made(observation_span=span, observation=observation, **record))
        return None

    async def _search(self, query: str, question: str) -> tuple[dict[str, Any], str]:
        """Ask the retriever: the turn's retrieval fields and the observation's text."""
        record, documents = await ask(self.retriever, query, question, search_source)
        if record["status"] == "error":
            return record, RETRIEVAL_FAILED
        return record, format_observation(documents) if documents else NOTHING_FOUND

    def _encode_observation(self, text: str) -> tuple[list[int], str]:
        """Token ids of an observation within ``agent.observation_tokens``, and the text those ids stand for.

        The head of the passages is kept and the block is closed again, so a cut never loses ``</information>``.
        """
        encode = partial(encode_text, self.tokenizer)
        ids = encode(text)
        limit = self.agent.observation_tokens
        if len(ids) <= limit:
            return ids, text
        if not text.startswith(OBSERVATION_HEAD):
            ids = ids[:limit]
            return ids, decode(self.tokenizer, ids)
        head = encode(OBSERVATION_HEAD)
        tail = encode(OBSERVATION_TAIL)
        body = text[len(OBSERVATION_HEAD) : -len(OBSERVATION_TAIL)]
        body_ids = encode(body)[: max(0, limit - len(head) - len(tail))]
        kept = decode(self.tokenizer, body_ids)
        return head + body_ids + tail, OBSERVATION_HEAD + kept + OBSERVATION_TAIL
