"""The whole of GCA token by token in plain Python, from turns and sub-outcomes to advantages, and what always holds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.residual import with_residual
from verl_bridge.algorithms import gca
from verl_bridge.algorithms.gca import RoutingTable, grounded_advantages
from verl_bridge.algorithms.grounding import RolloutType, TurnTable, rollout_types, segment_map

LENGTH = 18
TABLES = (
    RoutingTable(),
    RoutingTable(a=(0.3, -0.9, 0.2), b1=(0.0, -0.1, -0.7), b2=(1.0, 0.4, -0.6), c=(0.2, -0.2, 0.1)),
    RoutingTable(
        (0.2, 0.2, 0.5), (-0.4, -0.4, -1.0), (-0.1, -0.1, 0.0), (0.0, 0.0, 0.1), (-0.3, -0.3, 0.5), merged=True
    ),
)


@st.composite
def turns_of(draw):
    turns, position = [], 0
    for index in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 2))
        end = min(start + draw(st.integers(0, 4)), LENGTH)
        kind = draw(st.sampled_from(["search", "search", "malformed", "answer"]))
        status = draw(st.sampled_from(["ok", "ok", "error", "none"])) if kind == "search" else "none"
        tags = [(tag, draw(st.integers(tag, end))) for tag in draw(st.lists(st.integers(start, end), max_size=2))]
        hit = kind == "search" and status == "ok" and draw(st.booleans())
        turns.append(SimpleNamespace(kind=kind, span=(start, end), status=status, tag_spans=tags, hit=hit, index=index))
        position = end
        if kind == "answer":
            break
    return turns


@st.composite
def batches(draw):
    rollouts = draw(st.lists(turns_of(), min_size=1, max_size=8))
    n = len(rollouts)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    answered = torch.tensor([bool(turns) and turns[-1].kind == "answer" for turns in rollouts])
    correct = answered & (torch.rand(n, generator=generator) < 0.5)
    mask = (torch.rand(n, LENGTH, generator=generator) < 0.8).long()
    graded = draw(st.booleans())
    advantages = torch.randn(n, LENGTH, generator=generator)
    advantages[torch.rand(n, LENGTH, generator=generator) < 0.1] = 0.0
    return SimpleNamespace(
        rollouts=rollouts,
        first=[next((turn.index for turn in turns if turn.hit), -1) for turns in rollouts],
        correct=correct,
        answered=answered,
        groups=torch.randint(0, 3, (n,), generator=generator),
        rewards=torch.rand(n, generator=generator) if graded else correct.float(),
        advantages=advantages,
        mask=mask,
        salience=torch.rand(n, LENGTH, generator=generator) * 0.5 if draw(st.booleans()) else None,
        gated=torch.rand(n, generator=generator) < 0.15,
        real=torch.rand(n, generator=generator) < 0.85,
        oracle=torch.rand(n, generator=generator) < 0.5 if draw(st.booleans()) else None,
        group_relative=draw(st.booleans()),
        routing=draw(st.sampled_from(TABLES)),
        scale=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )


def fast(batch, **changed):
    batch = SimpleNamespace(**(vars(batch) | changed))
    first = torch.tensor(batch.first)
    types = rollout_types(
        first >= 0, batch.correct, batch.answered, batch.groups, oracle_hit=batch.oracle, row_mask=batch.real
    )
    result = grounded_advantages(
        batch.advantages,
        batch.mask,
        segment_map(TurnTable.of(batch.rollouts), first, batch.mask),
        types,
        batch.groups,
        batch.rewards,
        group_relative=batch.group_relative,
        salience=batch.salience,
        gated_rows=batch.gated,
        row_mask=batch.real,
        routing=batch.routing,
        scale=batch.scale,
    )
    return types, with_residual(batch.advantages, result)


def slow_type(batch, row):
    hit, correct = batch.first[row] >= 0, bool(batch.correct[row])
    if hit:
        return "a" if correct else "b1" if batch.answered[row] else "b2"
    if not correct:
        return "c"
    group = [i for i in range(len(batch.rollouts)) if batch.groups[i] == batch.groups[row] and batch.real[i]]
    if any(batch.first[i] >= 0 for i in group) or (batch.oracle is not None and batch.oracle[row]):
        return "d_retrievable"
    return "open" if batch.oracle is None and len(group) < 2 else "lost"


def slow_segment(turns, first_hit, token):
    for turn in turns:
        if any(start <= token < end for start, end in turn.tag_spans):
            return None
    for turn in turns:
        if turn.span[0] <= token < turn.span[1]:
            if turn.status == "error":
                return None
            if turn.kind == "answer":
                return 2
            return 0 if turn.kind == "search" and turn.index <= first_hit else 1
    return None


def slow(batch):
    """Grounded advantages and δ; algorithms/README.md as written, one token after another."""
    base, mask, grounded = batch.advantages.tolist(), batch.mask.tolist(), batch.advantages.tolist()
    salience = torch.full_like(batch.advantages, 0.25) if batch.salience is None else batch.salience
    residual, salience = torch.zeros_like(batch.advantages).tolist(), salience.tolist()
    for row, turns in enumerate(batch.rollouts):
        group = [i for i in range(len(batch.rollouts)) if batch.groups[i] == batch.groups[row] and batch.real[i]]
        equal = len(group) > 1 and len({float(batch.rewards[i]) for i in group}) == 1
        if not batch.real[row] or batch.gated[row] or (batch.group_relative and equal):
            continue
        kind = slow_type(batch, row)
        for token in range(LENGTH):
            if not mask[row][token]:
                continue
            if kind == "lost":
                grounded[row][token] = 0.0
                continue
            segment = slow_segment(turns, batch.first[row], token)
            if segment is None or kind == "open":
                continue
            advantage = base[row][token]
            change = 0.2 * batch.scale * getattr(batch.routing, kind)[segment] * salience[row][token]
            grounded[row][token] = advantage + abs(advantage) * change
            residual[row][token] = math.copysign(change, change * advantage) if advantage else 0.0
    return grounded, residual


@settings(deadline=None, max_examples=100)
@given(batches())
def test_equals_the_slow_reference(batch):
    types, result = fast(batch)
    names = {"lost": "d_not_retrievable", "open": "d_undetermined"}
    expected = [names.get(kind := slow_type(batch, row), kind) for row in range(len(types))]
    assert [RolloutType(code).name.lower() for code in types.tolist()] == expected
    grounded, residual = slow(batch)
    torch.testing.assert_close(result.advantages, torch.tensor(grounded), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.residual, torch.tensor(residual), rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(batches())
def test_rows_worked_on_a_few_at_a_time_give_the_same_bits(batch):
    _, whole = fast(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gca, "_CHUNK", 2 * LENGTH)
        _, parts = fast(batch)
    assert torch.equal(whole.advantages, parts.advantages) and torch.equal(whole.residual, parts.residual)
    assert parts.metrics == pytest.approx(whole.metrics, abs=1e-7)


@settings(deadline=None, max_examples=60)
@given(batches())
def test_what_holds_for_every_batch(batch):
    types, result = fast(batch)
    base, sampled = batch.advantages, batch.mask.bool()
    assert (result.residual.abs() <= 0.1 + 1e-7).all()
    left = (types == RolloutType.D_NOT_RETRIEVABLE).unsqueeze(1) & sampled & (result.advantages == 0)
    assert torch.equal(result.advantages.sign()[~left], base.sign()[~left])
    assert torch.equal(result.advantages[~sampled], base[~sampled])
    if batch.group_relative:
        for row, group in enumerate(batch.groups):
            rewards = batch.rewards[(batch.groups == group) & batch.real]
            if len(rewards) > 1 and rewards.min() == rewards.max():
                assert torch.equal(result.advantages[row], base[row])
    if not batch.routing.merged:
        for row, turns in enumerate(batch.rollouts):
            for turn in turns:
                if turn.kind == "search" and turn.index <= batch.first[row]:
                    part = slice(*turn.span)
                    assert ((result.residual * base)[row, part] >= 0).all()


@settings(deadline=None, max_examples=50)
@given(batches(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_garbage_where_nothing_was_sampled_is_harmless(batch, garbage):
    hidden = batch.mask == 0
    salience = None if batch.salience is None else batch.salience.masked_fill(hidden, garbage)
    _, clean = fast(batch)
    _, dirty = fast(batch, advantages=batch.advantages.masked_fill(hidden, garbage), salience=salience)
    assert torch.equal(dirty.advantages[~hidden], clean.advantages[~hidden])
    assert torch.equal(dirty.residual, clean.residual) and dirty.metrics == clean.metrics


@settings(deadline=None, max_examples=50)
@given(batches(), st.randoms())
def test_permuting_rows_permutes_the_result(batch, random):
    order = list(range(len(batch.rollouts)))
    random.shuffle(order)
    moved = {
        name: value[order] if isinstance(value, torch.Tensor) else [value[i] for i in order]
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor | list)
    }
    _, first = fast(batch)
    _, second = fast(batch, **moved)
    assert torch.equal(second.advantages, first.advantages[order])
    assert second.metrics == pytest.approx(first.metrics, abs=1e-6)
