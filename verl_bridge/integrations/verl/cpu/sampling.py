"""Sampling parameters of one request, and their application to a batch in which every row has its own.

The meaning is vLLM's, which verl's recipes are written for: repetition penalty, then temperature, then top-k, then
top-p; a log-prob is the sampled token's under the distribution it was drawn from (vLLM's ``processed_logprobs``), and
for a greedy request (temperature 0) under the unscaled one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

# Accepted and without effect on token ids: the first decides what vLLM's *text* holds, the others are implied here.
_NO_EFFECT = {"include_stop_str_in_output", "skip_special_tokens", "detokenize"}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Args:
        max_tokens: at most so many new tokens, at least 1.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        repetition_penalty: divides the positive logits of tokens seen in prompt or output and multiplies the others.
        stop_token_ids: end after one of these; it is part of the output. End-of-sequence ids included.
        stop: end after the token that completes one of these strings in the output's text; that token is part of it.
        seed: draw from a generator of this request's own, seeded so.
        logprobs: whether log-probs are asked for.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, ok, fix in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= -1, "a positive number, or -1 for all"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "a positive number, 1 for none"),
            ("stop", all(self.stop), "no empty string"),
        ):
            if not ok:
                raise ValueError(f"sampling parameter {name}={getattr(self, name)!r}: give {fix}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, max_tokens: int, eos_token_ids: Sequence[int]) -> SamplingParams:
        """Read what an agent loop sends.

        Args:
            values: ``max_new_tokens`` is ``max_tokens``, ``ignore_eos`` leaves the end-of-sequence ids out.
            max_tokens: the limit when none is given, and the most that is allowed.
            eos_token_ids: the model's end-of-sequence ids.

        Raises:
            ValueError: a parameter that is not known or out of range.
        """
        values = {key: value for key, value in values.items() if value is not None and key not in _NO_EFFECT}
        limit = values.pop("max_new_tokens", max_tokens)
        limit = min(values.pop("max_tokens", limit), max_tokens)
        eos = () if values.pop("ignore_eos", False) else tuple(eos_token_ids)
        stop = values.pop("stop", ())
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(
                f"sampling parameter {unknown[0]}={values[unknown[0]]!r} is not supported by the rollout on cpu; "
                f"supported are {[field.name for field in fields(cls)]}"
            )
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), *eos)))
        # logprobs=0 asks only for the sampled token's, which is what there is.
        values["logprobs"] = values.get("logprobs", False) is not False
        return cls(max_tokens=limit, stop=(stop,) if isinstance(stop, str) else tuple(stop), **values)


class RowSampler:
    """Draws the next token of each row.

    The token is found by inverting the cumulative distribution at one uniform number of the row's own, so what a row
    draws depends neither on the other rows nor on their number (but for rounding in the model's matrix products).

    Args:
        params: one per row, ``(rows,)``.
        uniforms: numbers in [0, 1), float64, (rows, steps): column t serves the t-th new token.
    """

    def __init__(self, params: Sequence[SamplingParams], uniforms: Tensor) -> None:
        self.uniforms = uniforms
        temperature = torch.tensor([p.temperature for p in params])
        self.greedy = temperature < 1e-5  # vLLM's bound
        self.temperature = temperature.masked_fill(self.greedy, 1.0)[:, None]
        self.top_k = torch.tensor([p.top_k for p in params])[:, None]
        self.top_p = torch.tensor([p.top_p for p in params])[:, None]
        self.penalty = torch.tensor([p.repetition_penalty for p in params])[:, None]
        self.truncated = ((self.top_k > 0) | (self.top_p < 1)).squeeze(-1) & ~self.greedy

    def __call__(self, step: int, context: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The token and its log-prob.

        Args:
            step: how many new tokens the rows have.
            context: ids each row has seen, (rows, any); padding repeats an id of the row.
            logits: float32, (rows, vocabulary).

        Returns:
            ids (rows,) and log-probs in nats (rows,).
        """
        if bool((self.penalty != 1).any()):
            seen = logits.gather(-1, context)
            seen = torch.where(seen > 0, seen / self.penalty, seen * self.penalty)
            logits = logits.scatter(-1, context, seen)
        scores = logits / self.temperature
        if bool(self.truncated.any()):
            rows = self.truncated.nonzero().squeeze(-1)
            scores[rows] = keep_likeliest(scores[rows], self.top_k[rows], self.top_p[rows])
        log_probs = scores.log_softmax(-1)
        token = logits.argmax(-1)
        if not bool(self.greedy.all()):
            cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
            # right=True: the first token whose cumulative exceeds the target, so never one of probability 0.
            target = self.uniforms[:, step, None] * cumulative[:, -1:]
            drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
            token = torch.where(self.greedy, token, drawn)
        return token, log_probs.gather(-1, token[:, None]).squeeze(-1)


def keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set to -inf what top-k and then top-p leave out; the likeliest token always stays.

    Args:
        scores: logits, (rows, vocabulary).
        top_k: (rows, 1), not positive for all.
        top_p: (rows, 1).
    """
    ordered, index = scores.sort(dim=-1, descending=True)
    rank = torch.arange(scores.shape[-1])
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probability = ordered.softmax(-1)
    # Probability of the tokens before this one: the one that reaches top_p is still kept.
    before = probability.cumsum(-1) - probability
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0), float("-inf"))
    return torch.empty_like(scores).scatter_(-1, index, ordered)
