"""One update of BRIDGE or of its two-state rival, part by part: what changes the models once on a batch of rollouts.

Both score the answers once without gradient and take the gradient of the policy's own loss. ``bridge`` steps one
retriever state; ``two_state`` steps two, one after the other on the same encoder, and adds the correction
γ·[∇G(θ, η_γ) - ∇G(θ, η*)] to the policy's gradient [paper], which goes through the answers' log-likelihoods. G's
slope in ℓ_d is -post_d/τ_l over the number of turns, so that the correction is one backward pass over the planned
sequences, each once, weighted by how far the two states' posteriors differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.likelihood import LikelihoodPlan, RetrievalTurn, plan_likelihoods
from verl_bridge.evaluation.bench_tokens import load_tokenizer
from verl_bridge.evaluation.bench_world import WorldRollouts
from verl_bridge.evaluation.memory import reset_peak, resident_bytes, return_freed_blocks

Arm = Literal["bridge", "two_state"]
Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(context ids, ids that are scored) of each sequence."""

TAU_LIKELIHOOD = 1.0


@dataclass(frozen=True)
class UpdateSettings:
    """What an arm is made of, the same for both.

    Args:
        corpus, index: the documents and their vectors.
        policy: folder of a causal language model with its tokenizer.
        context: ``question`` or ``prefix``, what precedes a document where its answer is scored.
        micro_batch_tokens: tokens of one pass of the policy, padding included.
        gamma: γ.
        threads: of torch.
    """

    corpus: Path
    index: Path
    policy: str
    context: Literal["question", "prefix"] = "question"
    micro_batch_tokens: int = 4096
    gamma: float = 0.25
    threads: int = 1


@dataclass(frozen=True)
class UpdateCost:
    """One update by its parts: ``plan``, ``likelihood``, ``retriever``, ``correction`` (only of two_state), ``policy``.

    Args:
        seconds: wall time.
        cpu_seconds: of all threads.
        peak_bytes: resident memory at the part's peak, above the loaded models.
    """

    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    peak_bytes: dict[str, int]


# ---- the policy's passes ------------------------------------------------------------------------------------------


def micro_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Positions of sequences of similar length, padded together within ``budget`` tokens (a longer one alone)."""
    group: list[int] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and lengths[group[0]] * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(position)
    if group:
        yield group


def log_probs(model: nn.Module, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the masked tokens of one micro-batch, and the row each belongs to, ``(tokens,)`` each.

    Logits are computed only at those tokens. Padding is on the right, where causal attention never looks.
    """
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = pad_sequence([torch.tensor(row, dtype=torch.bool) for row in masks], batch_first=True)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (rows, longest, hidden)
    scored = mask[:, 1:]
    logits = model.get_output_embeddings()(hidden[:, :-1][scored]).float()  # (tokens, vocabulary)
    values = logits.log_softmax(dim=-1).gather(-1, ids[:, 1:][scored][:, None]).squeeze(-1)
    return values, scored.nonzero()[:, 0]


def score(model: nn.Module, sequences: Sequences, budget: int) -> list[float]:
    """Log-likelihood of each sequence's scored ids in nats, without gradient."""
    out = [0.0] * len(sequences)
    with torch.no_grad():
        for group, sums in _answer_sums(model, sequences, range(len(sequences)), budget):
            for position, value in zip(group, sums.tolist(), strict=True):
                out[position] = value
    return out


def backward_answers(model: nn.Module, sequences: Sequences, weights: Sequence[float], budget: int) -> None:
    """Adds the gradient of Σ weight·log-likelihood to the model's; sequences of weight 0 are left out."""
    used = [position for position, weight in enumerate(weights) if weight]
    for group, sums in _answer_sums(model, sequences, used, budget):
        (sums * torch.tensor([weights[position] for position in group])).sum().backward()


def _answer_sums(
    model: nn.Module, sequences: Sequences, used: Sequence[int], budget: int
) -> Iterator[tuple[list[int], Tensor]]:
    lengths = [sum(map(len, sequences[position])) for position in used]
    for group in micro_batches(lengths, budget):
        group = [used[i] for i in group]
        rows = [[*sequences[i][0], *sequences[i][1]] for i in group]
        masks = [[0] * len(sequences[i][0]) + [1] * len(sequences[i][1]) for i in group]
        values, row = log_probs(model, rows, masks)
        yield group, torch.zeros(len(group)).index_add(0, row, values)


def backward_rollouts(model: nn.Module, batch: WorldRollouts, budget: int) -> None:
    """Adds the gradient of F on the rollouts: PPO's surrogate where policy and old policy are one, mean over tokens."""
    rows = [[*prompt, *response] for prompt, response in zip(batch.prompt_ids, batch.response_ids, strict=True)]
    masks = [[0] * len(prompt) + [*mask] for prompt, mask in zip(batch.prompt_ids, batch.response_mask, strict=True)]
    count = sum(map(sum, masks))
    advantages = torch.tensor(batch.advantages)
    for group in micro_batches([len(row) for row in rows], budget):
        values, row = log_probs(model, [rows[i] for i in group], [masks[i] for i in group])
        ratio = (values - values.detach()).exp()
        (-(ratio * advantages[group][row]).sum() / count).backward()


def correction_weights(shift: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    """Slope of γ·[G(θ, η_γ) - G(θ, η*)] in ℓ_d, per turn and candidate.

    Args:
        shift: post_d(η_γ) - post_d(η*).
    """
    return [[-gamma / (TAU_LIKELIHOOD * len(shift)) * value for value in row] for row in shift]


# ---- one update ---------------------------------------------------------------------------------------------------


class Updating:
    """The models of one arm, loaded, and its update.

    Args:
        arm: ``bridge`` or ``two_state``.
        settings: of both arms.
        batch: the rollouts; each update is on the same.
    """

    def __init__(self, arm: Arm, settings: UpdateSettings, batch: WorldRollouts) -> None:
        from transformers import AutoModelForCausalLM

        from verl_bridge.retrieval.retriever import open_retriever

        torch.set_num_threads(settings.threads)
        self.arm, self.settings, self.batch = arm, settings, batch
        self.policy = AutoModelForCausalLM.from_pretrained(settings.policy, dtype=torch.float32).eval()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6, weight_decay=0.0)
        _, self.tokenize = load_tokenizer(settings.policy)
        retriever = open_retriever(corpus=settings.corpus, index=settings.index, searchable=False)
        self.encoder = retriever.encoder.queries
        # the demo's retriever settings
        make = partial(_updater_of(arm), self.encoder, retriever.index)
        self.updater = make(gamma=settings.gamma, tau_likelihood=TAU_LIKELIHOOD, lr=1e-4, minibatch_size=64)
        self.loaded = resident_bytes("VmRSS")
        self.plan: LikelihoodPlan | None = None

    def run(self, exact_memory: bool = False) -> UpdateCost:
        """One update. ``exact_memory`` makes the peaks those of what is in use, and slows this and later ones down."""
        if exact_memory:
            return_freed_blocks()
        cost = UpdateCost({}, {}, {})

        def timed(part: str, work: Callable[[], Any]) -> Any:
            reset_peak()
            start, cpu = time.perf_counter(), time.process_time()
            result = work()
            cost.seconds[part] = time.perf_counter() - start
            cost.cpu_seconds[part] = time.process_time() - cpu
            cost.peak_bytes[part] = resident_bytes("VmHWM") - self.loaded
            return result

        budget = self.settings.micro_batch_tokens
        plan = self.plan = timed("plan", self._plan)
        values = timed("likelihood", lambda: score(self.policy, plan.sequences, budget))
        update = timed("retriever", lambda: self.updater.update(self._retriever_batch(plan, values)))
        self.optimizer.zero_grad(set_to_none=True)
        if self.arm == "two_state":
            weights = plan.spread(values, correction_weights(update.evidence_shift, self.settings.gamma))
            timed("correction", lambda: backward_answers(self.policy, plan.sequences, weights, budget))

        def policy() -> None:
            backward_rollouts(self.policy, self.batch, budget)
            self._step()
            self.optimizer.zero_grad(set_to_none=True)

        timed("policy", policy)
        return cost

    def _step(self) -> None:
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    def _plan(self) -> LikelihoodPlan:
        batch, prefix = self.batch, self.settings.context == "prefix"
        turns = [
            RetrievalTurn(
                key=position,
                context_ids=batch.prompt_ids[search.row]
                + (batch.response_ids[search.row][: search.end] if prefix else ()),
                candidates=search.candidates,
                golds=(batch.golds[search.row],),
            )
            for position, search in enumerate(batch.searches)
        ]
        return plan_likelihoods(turns, self.tokenize, after_query=prefix)

    def _retriever_batch(self, plan: LikelihoodPlan, values: Sequence[float]) -> RetrieverBatch:
        searches = [self.batch.searches[key] for key in plan.turn_keys]
        return RetrieverBatch(
            queries=[search.query for search in searches],
            candidate_ids=[[document.id for document in search.candidates] for search in searches],
            answer_log_likelihood=plan.gather(values),
            advantages=[self.batch.advantages[search.row] for search in searches],
            rl_mask=[True] * len(searches),
            adapter_version=[self.encoder.adapter_version] * len(searches),
        )


def _updater_of(arm: Arm) -> Any:
    from verl_bridge.bilevel.two_state import TwoStateUpdater
    from verl_bridge.bilevel.updater import RetrieverUpdater

    return {"bridge": RetrieverUpdater, "two_state": TwoStateUpdater}[arm]
