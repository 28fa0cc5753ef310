"""One :class:`SearchTrace` from what verl-tool's loop did: generations, tool answers, and the response's token ids.

verl-tool keeps no spans: where an observation is empty, two turns run together in its mask. The generations, recorded
as they are made, say exactly where each began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_bridge.integrations.tokens import encode_text
from verl_bridge.integrations.verl_tool import TOOL
from verl_bridge.qa.actions import Action, decode, read_turn
from verl_bridge.qa.questions import question_of, training_golds
from verl_bridge.trace import SearchTrace, SearchTurn, Span, StopReason, TurnKind


@dataclass(frozen=True)
class Generation:
    """One call of the language model: where in the sequence its tokens begin, and how many they are."""

    start: int  # tokens of prompt and response before it
    length: int


class RecordingManager:
    """verl-tool's server manager that also notes where every generation of one rollout begins and how long it is."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.generations: list[Generation] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **options: Any) -> Any:
        """As the manager's own."""
        start = len(prompt_ids)  # the loop goes on with this very list
        output = await self._manager.generate(request_id, prompt_ids=prompt_ids, **options)
        self.generations.append(Generation(start, len(output.token_ids)))
        return output


class ObservationTokenizer:
    """The policy's tokenizer for verl-tool's loop, which encodes only observations: control tokens in them are text.

    With the plain one, a passage that spells out ``<|im_end|>`` would end the turn in which it is read.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """As :func:`~verl_bridge.integrations.tokens.encode_text`."""
        return encode_text(self._tokenizer, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def complete(output: Any, tokenizer: Any, generations: Sequence[Generation], row: Mapping[str, Any]) -> None:
    """Gives a rollout of verl-tool's its record, in ``extra_fields["search_trace"]``.

    A rollout that the tool server failed is taken out of the loss by its mask. An empty one gets an end-of-sequence
    token that is not trained on: verl writes the reward to the last token.

    Args:
        output: the loop's ``AgentLoopOutput``.
        row: the dataset's row, as the loop got it.

    Raises:
        ValueError: no question or no gold answers in the row.
        RuntimeError: see :func:`build_trace`.
    """
    messages = row.get("raw_prompt")
    question = question_of({**row, "prompt": None if messages is None else list(messages)})
    if question is None:
        raise ValueError(
            "a row of the dataset has no question: fill extra_info.question, or set data.return_raw_chat=true"
        )
    told = output.extra_fields["tool_interact_info"]
    if not output.response_ids:
        output.response_ids, output.response_mask = [tokenizer.eos_token_id], [0]
        output.response_logprobs = None if output.response_logprobs is None else [0.0]
    if any(map(tool_failed, told)):
        output.response_mask = [0] * len(output.response_mask)
    trace = build_trace(
        tokenizer,
        question=question,
        golden_answers=training_golds(row, "a question of the dataset"),
        prompt_length=len(output.prompt_ids),
        response_ids=output.response_ids,
        generations=generations,
        told=told,
        host_reason=output.extra_fields["traj_stop_reason"],
    )
    for answer in told:
        answer.pop("candidates", None)  # ten documents per search, which nothing after this reads
    output.extra_fields["search_trace"] = trace.to_dict()


def tool_failed(told: Mapping[str, Any]) -> bool:
    """Whether the tool server gave no answer at all: it is down, timed out, or a tool of it raised.

    verl-tool then ends the rollout as ``tool_signaled_done``; the model is not to blame, so such a rollout teaches
    nothing. A retriever that failed behind a tool server that runs is not meant: the rollout goes on.
    """
    return told.get("success") is False or ("error" in told and "tool_type" in told)


def build_trace(
    tokenizer: Any,
    *,
    question: str,
    golden_answers: Sequence[str],
    prompt_length: int,
    response_ids: Sequence[int],
    generations: Sequence[Generation],
    told: Sequence[Mapping[str, Any]],
    host_reason: str,
) -> SearchTrace:
    """The record of one rollout.

    Args:
        tokenizer: the policy's.
        question, golden_answers: of the dataset's row.
        prompt_length: tokens of the prompt.
        response_ids: the response as the trainer gets it, cut to its limit.
        generations: all of them, in order.
        told: what the tool server answered to each, in verl-tool's ``tool_interact_info``; after the last generation
            there may be no call.
        host_reason: verl-tool's ``traj_stop_reason``.

    Raises:
        RuntimeError: a search was answered by another tool than ours.
    """
    ids, turns = list(response_ids), []
    answer: str | None = None
    answer_span: Span | None = None
    starts = [min(g.start - prompt_length, len(ids)) for g in generations]
    for number, (generation, start) in enumerate(zip(generations, starts, strict=True)):
        if number > 0 and start == len(ids):
            break  # cut off with all that follows
        end = min(start + generation.length, len(ids))
        read = read_turn(tokenizer, ids[start:end])
        answered = told[number] if number < len(told) else None
        kind = _kind(read.action, answered)
        follows = starts[number + 1] if number + 1 < len(starts) else len(ids)
        # an observation that nothing was sampled after was read by nobody
        seen = (end, follows) if end < follows < len(ids) else None
        turns.append(
            SearchTurn(
                kind,
                (start, end),
                tuple((start + first, start + last) for first, last in read.tag_spans),
                observation_span=seen,
                observation="" if seen is None else decode(tokenizer, ids[slice(*seen)]),
                **(_retrieval(read.action.content, answered) if kind == "search" else {}),
            )
        )
        if kind == "answer":
            answer = read.action.content
            answer_span = (start + read.content_span[0], start + read.content_span[1])
            break
    return SearchTrace(
        question=question,
        golden_answers=tuple(golden_answers),
        turns=tuple(turns),
        answer=answer,
        answer_span=answer_span,
        stop_reason="answer" if answer is not None else _stop_reason(host_reason, told),
        response_length=len(ids),
    )


def _kind(action: Action, told: Mapping[str, Any] | None) -> TurnKind:
    """What the turn was: by its text, but where our tool was asked it is the tool's word that was acted on."""
    if told is None or tool_failed(told):
        return action.kind
    if "status" not in told:
        if action.kind == "search":
            raise RuntimeError(
                f"a search was answered by another tool than {TOOL} (done={told.get('done')}): verl-tool's server "
                "starts healthy without a tool it does not know; start it by "
                "`python -m verl_bridge.integrations.verl_tool.serve`"
            )
        return action.kind if told.get("done") else "malformed"
    if told["status"] != "none":
        return "search"
    return "answer" if action.kind == "answer" and told.get("done") else "malformed"


def _retrieval(query: str, told: Mapping[str, Any] | None) -> dict[str, Any]:
    """The retrieval fields of a search turn; at the last turn verl-tool asks nobody."""
    if told is None:
        return {"query": query}
    if told.get("status") != "ok":
        return {"query": told.get("query") or query, "status": "error"}
    return {
        "query": told["query"],
        "status": "ok",
        "candidate_ids": tuple(told["ids"]),
        "candidate_scores": tuple(told["scores"]),
        "shown": told["shown"],
        "adapter_version": told["adapter_version"],
    }


def _stop_reason(host_reason: str, told: Sequence[Mapping[str, Any]]) -> StopReason:
    if any(map(tool_failed, told)):
        return "error"
    if host_reason == "max_turns_reached":
        return "max_turns"
    if host_reason in ("max_response_length_reached", "max_model_len_exceeded", "no_tool-length"):
        return "length"
    if host_reason.startswith(("model_chose_to_finish", "no_action_stop_token", "tool_signaled_done", "no_tool")):
        return "no_action"
    return "error"  # finish_reason_abort and the like
