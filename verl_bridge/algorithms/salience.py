"""Token salience: how a segment's credit is spread over its tokens (README.md beside this file, "Salience").

[paper] is arXiv 2610.23148, [ours] a choice made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_bridge.algorithms.grounding import Segment

_BLOCK = 128  # words of the vocabulary whose maximum is taken together
_WORK = 2**22  # numbers in a chunk's arrays, unless its size is given: 16 MiB in float32
_TOKENS = 2**18  # tokens whose salience is worked out together, so that what is in between stays in a cache
_FLOOR = 87.0  # exp(-87) is about the smallest normal float32
_SMALLEST_CELL = 4  # tokens
_SMALLEST_MAD = 1e-6


@dataclass(frozen=True)
class TokenStatistics:
    """What the old policy's logits say about each sampled token, float32 ``(tokens,)`` each.

    Args:
        margin: log π(y) minus the mean of the K highest log π among the other tokens, nats: how confident.
        entropy: entropy of the M likeliest tokens, renormalised, over log M, in [0, 1]: how open.
    """

    margin: Tensor
    entropy: Tensor


@torch.no_grad()
def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    margin_k: int = 3,
    entropy_m: int = 32,
    chunk_tokens: int | None = None,
) -> TokenStatistics:
    """Margin and entropy of sampled tokens [paper], in float32, without gradient.

    The margin is a difference of log-probabilities, hence one of logits: no normaliser is computed. An M beyond the
    vocabulary means all of it: the full entropy over log V. A token more than 87 nats below the likeliest counts as
    87 below [ours], so logits of -inf leave all results finite. A NaN makes its own row NaN and no other.

    The logits are read once more, for the maxima of blocks: the K+1 or M largest lie in as many blocks.

    Args:
        logits: temperature-scaled, any float type, ``(tokens, vocabulary)``.
        labels: the sampled tokens y, ``(tokens,)`` int64.
        margin_k: K.
        entropy_m: M.
        chunk_tokens: rows worked on at once; as many as need about 16 MiB when None.

    Raises:
        ValueError: shapes that do not fit, K < 1, M < 2, or a vocabulary that has not K other tokens.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} are not (tokens, vocabulary)")
    tokens, vocabulary = logits.shape
    if not 1 <= margin_k < vocabulary:
        raise ValueError(
            f"gca.margin_k={margin_k} must be at least 1 and less than the vocabulary's {vocabulary} tokens: "
            "the margin is taken to that many others"
        )
    if entropy_m < 2:
        raise ValueError(f"gca.entropy_m={entropy_m} must be at least 2: the entropy of one token is always 0")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    whole = entropy_m >= vocabulary
    count = margin_k + 1 if whole else max(margin_k + 1, entropy_m)
    blocks = not whole and vocabulary // _BLOCK >= 2 * count  # else their maxima narrow little down
    if chunk_tokens is None:
        each = 2 * count * _BLOCK + 2 * vocabulary // _BLOCK if blocks else 2 * vocabulary
        chunk_tokens = max(1, _WORK // each)

    margin = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(margin)
    for start in range(0, tokens, chunk_tokens):
        part = slice(start, start + chunk_tokens)
        rows = logits[part]
        largest = (_largest_by_blocks(rows, count) if blocks else rows.topk(count, dim=-1).values).float()
        floor = largest[:, :1] - _FLOOR
        largest = largest.maximum(floor)
        sampled = rows.gather(-1, labels[part, None]).float().maximum(floor)  # (chunk, 1)
        # The sampled token's place among the K+1 largest: it, an equal one, or else the last is none of the others.
        others = largest[:, : margin_k + 1]
        place = (others > sampled).sum(dim=-1, keepdim=True).clamp(max=margin_k)
        others = others.scatter(-1, place, 0.0).sum(dim=-1) / margin_k
        margin[part] = sampled.squeeze(-1) - others
        log_probs = (rows.float().maximum(floor) if whole else largest[:, :entropy_m]).log_softmax(dim=-1)
        nats = -(log_probs.exp() * log_probs).sum(dim=-1)
        entropy[part] = (nats / math.log(log_probs.shape[-1])).clamp(0.0, 1.0)
    return TokenStatistics(margin, entropy)


def _largest_by_blocks(rows: Tensor, count: int) -> Tensor:
    """The ``count`` largest values of each row, descending, ``(rows, count)``.

    They lie in the ``count`` blocks with the largest maxima: any other block's values are at most the least of these.
    """
    cut = rows.shape[-1] // _BLOCK * _BLOCK
    blocks = rows[:, :cut].unflatten(-1, (-1, _BLOCK))
    chosen = blocks.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    candidates = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
    return torch.cat([candidates, rows[:, cut:]], dim=-1).topk(count, dim=-1).values


@torch.no_grad()
def token_salience(
    margin: Tensor,
    entropy: Tensor,
    segments: Tensor,
    response_mask: Tensor,
    routed_sign: Tensor,
    *,
    c_max: float = 0.5,
) -> Tensor:
    """Salience c of every token, with mean exactly c̄ = c_max/2 over each cell [paper; ours: the standardisation].

    A cell holds the sampled tokens of one segment of one rollout. u = σ(−z), z the margin's distance from the cell's
    median over 1.4826·MAD, clipped to ±3; h is the entropy. c⁺ = 0.6u + 0.3h + 0.1uh, uncertain but useful, where
    λ > 0, and c⁻ = 0.6(1−u) + 0.3(1−h) + 0.1(1−u)(1−h), confident but harmful, where λ < 0. Then c = min(c_max, a·c±)
    with the a that makes the cell's mean c̄. Cells of fewer than 4 tokens or with MAD < 1e-6 get c̄ throughout.

    Args:
        margin, entropy: see :class:`TokenStatistics`, ``(batch, response)``; anything, NaN included, where unused.
        segments: :class:`Segment` codes, ``(batch, response)``.
        response_mask: 1 on sampled tokens, ``(batch, response)``.
        routed_sign: sign of λ(type, segment), the same for all tokens of a cell, ``(batch, response)``.
        c_max: cap of the salience.

    Returns:
        ``(batch, response)`` of the margin's type: 0 outside all cells, c̄ in cells without a route (λ = 0).

    Raises:
        ValueError: c_max ≤ 0, or a margin or entropy that is not finite on a token with a route.
    """
    if not 0 < c_max < math.inf:
        raise ValueError(f"gca.c_max={c_max} must be a positive number")
    salience = torch.empty_like(margin, memory_format=torch.contiguous_format)
    rows = max(1, _TOKENS // max(1, margin.shape[1]))
    for start in range(0, len(margin), rows):
        part = slice(start, start + rows)
        inside = response_mask[part].bool() & (segments[part] != Segment.NONE)
        salience[part] = inside.to(margin.dtype) * (c_max / 2)
        routed = (inside & (routed_sign[part] != 0)).flatten().nonzero().squeeze(-1)  # token numbers, row by row
        values = torch.stack([x[part].flatten()[routed].double() for x in (margin, entropy, routed_sign)])
        if len(broken := routed[~values.isfinite().all(dim=0)]):
            row = start + int(broken[0]) // margin.shape[1]
            raise ValueError(f"margin or entropy is not finite on a sampled token of rollout {row}: check its logits")
        codes = segments[part].flatten()[routed]
        for code in (Segment.VSEARCH, Segment.RSEARCH, Segment.ANS):
            here = (codes == code).nonzero().squeeze(-1)
            if len(here):
                tokens = routed[here]
                spread = _spread(values[:, here], tokens // margin.shape[1], c_max)
                salience[part].view(-1).index_copy_(0, tokens, spread.to(salience.dtype))
    return salience


def _spread(values: Tensor, cells: Tensor, c_max: float) -> Tensor:
    """c of margin, entropy and sign of λ ``(3, tokens)``; tokens of a cell are neighbours, ``cells`` numbers them."""
    counts = torch.bincount(cells)
    counts = counts[counts > 0].unsqueeze(-1)  # (cells, 1)
    within = torch.arange(int(counts.max()), device=counts.device) < counts  # (cells, longest)
    slots = within.flatten().nonzero().squeeze(-1)  # as many as there are tokens, and in the same order
    packed = values.new_full((3, within.numel()), math.nan).index_copy_(1, slots, values)
    raw = torch.where(within, _raw_salience(*packed.view(3, *within.shape), counts), 0.0)
    return _water_filled(raw, counts, c_max).flatten()[slots]


def _raw_salience(margin: Tensor, entropy: Tensor, sign: Tensor, counts: Tensor) -> Tensor:
    """c± ``(cells, longest)``, equal throughout cells that are too small or too even; anything after a cell's end."""
    median = _median(margin)
    mad = _median((margin - median).abs())
    u = torch.sigmoid(-((margin - median) / (1.4826 * mad)).clamp(-3.0, 3.0))
    u, h = torch.where(sign > 0, u, 1 - u), torch.where(sign > 0, entropy, 1 - entropy)
    raw = 0.6 * u + 0.3 * h + 0.1 * u * h
    return torch.where((mad < _SMALLEST_MAD) | (counts < _SMALLEST_CELL), 1.0, raw)


def _median(values: Tensor) -> Tensor:
    """Median of each row without its NaNs, the mean of the two middle values for an even count. ``(cells, 1)``"""
    low = values.nanmedian(dim=-1, keepdim=True).values  # the lower of the two
    high = -(-values).nanmedian(dim=-1, keepdim=True).values
    return (low + high) / 2


def _water_filled(raw: Tensor, counts: Tensor, c_max: float) -> Tensor:
    """min(c_max, a·raw) with the a that makes each cell's mean c_max/2, ``(cells, longest)``.

    With the j largest at the cap, a = c_max·(counts/2 − j) / sum of the rest. The right j is the first whose
    next value stays within the cap. It is less than half the cell, for raw values are positive; 0 after a cell's end.
    """
    ordered = raw.sort(dim=-1, descending=True).values
    rest = ordered.flip(-1).cumsum(dim=-1).flip(-1)
    capped = torch.arange(raw.shape[-1], device=raw.device, dtype=raw.dtype)
    factor = c_max * ((counts / 2 - capped) / rest)
    first = (factor * ordered <= c_max).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return (factor.gather(-1, first) * raw).clamp(max=c_max)
