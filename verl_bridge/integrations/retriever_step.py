"""One BRIDGE step on a batch of rollouts: likelihoods of the gold under every candidate, then the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from verl.utils.debug import marked_timer

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.likelihood import LikelihoodPlan, NoRoomError, RetrievalTurn, Tokenizer, plan_likelihoods
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.qa.answers import alias_hit
from verl_bridge.retrieval.corpus import Document
from verl_bridge.retrieval.retriever import search_text
from verl_bridge.trace import SearchTurn

logger = logging.getLogger(__name__)

Search = tuple[int, int, SearchTurn]  # row, turn within it, record
Scored = tuple[Sequence[int], Sequence[int]]
"""Context ids and answer ids."""
Score = Callable[[Sequence[Scored]], list[torch.Tensor]]


@dataclass(frozen=True)
class Correction:
    """The sequences that move the policy (``integrations/verl/correction.py``); one entry each.

    Args:
        sequences: (context ids, answer ids).
        log_probs: of the answer's tokens, under the policy before its update.
        coefficients: (γ/τ_l)·c_s, none of them 0.
    """

    sequences: Sequence[Scored]
    log_probs: Sequence[torch.Tensor]
    coefficients: Sequence[float]


@dataclass(frozen=True)
class StepResult:
    """What a step gives: metrics by name, and what ``estimator: two_state`` adds to the policy's update."""

    metrics: dict[str, float]
    correction: Correction | None = None


@dataclass(frozen=True)
class RetrieverStep:
    """Everything of the step that stays the same over a run.

    Args:
        retrieval: who learns and serves (:class:`~verl_bridge.integrations.retrieval.TrainerRetrieval`).
        score: log π of the answer's tokens for each (context ids, answer ids), under the policy as it is now.
        tokenize: the policy's tokenizer, without special tokens.
        synchronous: all rollouts were served by the version published last; anything else stops the run. Otherwise
            searches served by a version that the learner no longer keeps are left out and counted.
        prefix: the trajectory up to the query precedes the document, not only the question.
        all_golds: every golden answer is scored and the likeliest counts, not only the first.
        length_normalize, token_budget, max_tokens: see :func:`~verl_bridge.bilevel.likelihood.plan_likelihoods`.
        max_tokens_key: the setting that ``max_tokens`` comes from.
        query_input: ``query`` or ``question_query``, as the rollouts searched.
        unicode: match aliases in the Unicode-aware way (only in metrics).
        correction_scale: γ/τ_l, the weight of the correction's terms.
    """

    retrieval: Any
    score: Score
    tokenize: Tokenizer
    synchronous: bool
    prefix: bool
    all_golds: bool
    length_normalize: bool
    token_budget: int | None
    max_tokens: int
    max_tokens_key: str
    query_input: str
    unicode: bool
    correction_scale: float

    def __call__(
        self,
        rollouts: RolloutBatch,
        advantages: torch.Tensor,
        rl_mask: torch.Tensor,
        *,
        seed: int,
        timing: dict[str, float],
    ) -> StepResult:
        """Score, update, and have the new adapter served.

        Args:
            rollouts: the batch.
            advantages: :func:`~verl_bridge.credit.trajectory_advantages`, ``(batch,)``.
            rl_mask: :func:`~verl_bridge.credit.rl_mask`, ``(batch,)`` bool.
            seed: of the sample that a token budget takes.
            timing: seconds are added here: ``likelihood``, ``retriever_update`` (until all serve the new version).

        Raises:
            RuntimeError: see ``check_served``, ``update`` and ``publish`` of ``TrainerRetrieval``.
            ConfigError: a prompt leaves no room for a document in ``max_tokens``.
        """
        metrics: dict[str, float] = {}
        searches = self._known(_searches(rollouts), metrics)
        turns = self._turns(rollouts, searches)
        with marked_timer("likelihood", timing):
            plan = self._plan(turns, seed)
            log_probs = self.score(plan.sequences)
        metrics.update({f"bridge/plan/{name}": float(value) for name, value in plan.metrics.items()})
        if not plan.turn_keys:
            return StepResult(metrics)
        sums = [float(row.sum()) for row in log_probs]
        likelihoods = plan.gather(sums)
        kept = [i for i, values in enumerate(likelihoods) if all(map(math.isfinite, values))]
        metrics["bridge/turns_not_finite"] = float(len(likelihoods) - len(kept))
        if not kept:
            return StepResult(metrics)
        keys = [plan.turn_keys[i] for i in kept]
        batch = self._batch(
            rollouts, turns, keys, [likelihoods[i] for i in kept], advantages.tolist(), rl_mask.tolist()
        )
        with marked_timer("retriever_update", timing):
            result = self.retrieval.update(batch)
        not_finite = metrics["bridge/turns_not_finite"] + result.metrics.get("bridge/turns_not_finite", 0.0)
        metrics |= {**result.metrics, "bridge/turns_not_finite": not_finite}
        if result.evidence_shift is None:
            return StepResult(metrics)
        shift = [[0.0] * len(values) for values in likelihoods]
        for i, of_turn in zip(kept, result.evidence_shift, strict=True):
            shift[i] = [e / len(kept) for e in of_turn]  # a mean over turns
        correction = correction_of(plan.sequences, log_probs, plan.spread(sums, shift), scale=self.correction_scale)
        coefficients = correction.coefficients if correction else []
        metrics["bridge/correction/sequences"] = float(len(coefficients))
        metrics["bridge/correction/weight"] = sum(map(abs, coefficients))
        return StepResult(metrics, correction)

    def _known(self, searches: list[Search], metrics: dict[str, float]) -> list[Search]:
        """The searches whose adapter version the learner can go by.

        When none is, a server that was started again may be behind: it gets the adapter, which it otherwise gets only
        after an update.
        """
        served = [turn.adapter_version for *_, turn in searches if turn.status == "ok"]
        self.retrieval.check_served(served, older=not self.synchronous)
        if self.synchronous:
            return searches
        known = set(self.retrieval.known_versions())
        kept = [search for search in searches if search[2].status != "ok" or search[2].adapter_version in known]
        metrics["bridge/turns_stale"] = float(len(searches) - len(kept))
        behind = [max(known) - turn.adapter_version for *_, turn in kept if turn.status == "ok"]
        if behind:  # versions between the one that served a search and the one that learns from it
            metrics["bridge/staleness_mean"] = sum(behind) / len(behind)
            metrics["bridge/staleness_max"] = float(max(behind))
        elif len(kept) < len(searches):
            logger.warning(
                "all %d answered searches were served by adapter versions %s, none of which the learner keeps (%d to "
                "%d): its adapter is published again. A server was started again, or rollouts take longer than "
                "verl_bridge.bridge.max_staleness allows",
                len(served),
                sorted(set(served)),
                min(known),
                max(known),
            )
            self.retrieval.publish()
        return kept

    def _turns(self, rollouts: RolloutBatch, searches: list[Search]) -> list[RetrievalTurn]:
        ids = list(dict.fromkeys(document for *_, turn in searches for document in turn.candidate_ids))
        documents = dict(zip(ids, self._documents(ids), strict=True))
        turns = []
        for row, index, turn in searches:
            golds = rollouts.traces[row].golden_answers
            seen = rollouts.response_ids[row][: turn.span[1]] if self.prefix else ()
            turns.append(
                RetrievalTurn(
                    key=(row, index),
                    context_ids=(*rollouts.prompt_ids[row], *seen),
                    candidates=tuple(documents[document] for document in turn.candidate_ids),
                    golds=tuple(golds) if self.all_golds else tuple(golds[:1]),
                    failed=turn.status == "error",
                )
            )
        return turns

    def _plan(self, turns: list[RetrievalTurn], seed: int) -> LikelihoodPlan:
        try:
            plan = plan_likelihoods(
                turns,
                self.tokenize,
                after_query=self.prefix,
                max_tokens=self.max_tokens,
                token_budget=self.token_budget,
                length_normalize=self.length_normalize,
                seed=seed,
            )
        except NoRoomError as error:
            raise ConfigError(
                f"{error}; max_tokens comes from {self.max_tokens_key}: raise it where it is a setting, or lower "
                "data.max_prompt_length"
            ) from error
        if plan.metrics["turns_used"] == 1 and plan.metrics.get("budget_share", 0.0) > 1:
            _warn_of_budget(self.token_budget)
        return plan

    def _documents(self, ids: list[str]) -> list[Document]:
        return [Document(**document) for document in self.retrieval.documents(ids)] if ids else []

    def _batch(
        self,
        rollouts: RolloutBatch,
        turns: list[RetrievalTurn],
        keys: list[tuple[int, int]],
        likelihoods: list[list[float]],
        advantages: list[float],
        rl_mask: list[bool],
    ) -> RetrieverBatch:
        candidates = {turn.key: turn.candidates for turn in turns}
        rows = [row for row, _ in keys]
        traces = [rollouts.traces[row] for row in rows]
        served = [trace.turns[index] for trace, (_, index) in zip(traces, keys, strict=True)]
        return RetrieverBatch(
            queries=[
                search_text(turn.query, trace.question, self.query_input)
                for trace, turn in zip(traces, served, strict=True)
            ],
            candidate_ids=[turn.candidate_ids for turn in served],
            answer_log_likelihood=likelihoods,
            advantages=[advantages[row] for row in rows],
            rl_mask=[rl_mask[row] for row in rows],
            adapter_version=[turn.adapter_version for turn in served],
            hits=[
                [alias_hit(f"{d.title} {d.text}", trace.golden_answers, unicode=self.unicode) for d in candidates[key]]
                for trace, key in zip(traces, keys, strict=True)
            ],
        )


@cache  # once
def _warn_of_budget(token_budget: int) -> None:
    logger.warning(
        "verl_bridge.bridge.token_budget=%d is less than a single retrieval turn takes, so an update learns from one "
        "turn alone: raise it to many times bridge/plan/tokens",
        token_budget,
    )


def _searches(rollouts: RolloutBatch) -> list[Search]:
    return [
        (row, index, turn)
        for row, trace in enumerate(rollouts.traces)
        for index, turn in enumerate(trace.turns)
        if turn.kind == "search" and turn.status != "none"
    ]


def correction_of(
    sequences: Sequence[Scored], log_probs: Sequence[torch.Tensor], weights: Sequence[float], *, scale: float
) -> Correction | None:
    """The sequences with a weight, whose coefficients are ``scale``·weight; None where there are none."""
    used = [i for i, weight in enumerate(weights) if scale * weight != 0]
    if not used:
        return None
    return Correction([sequences[i] for i in used], [log_probs[i] for i in used], [scale * weights[i] for i in used])
