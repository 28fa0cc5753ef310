"""Rollout types, segments of tokens, and the metrics of grounding, by hand and against slow references."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.algorithms.grounding import (
    Groups,
    RolloutType,
    Segment,
    TurnTable,
    grounding_metrics,
    index_groups,
    rollout_types,
    segment_map,
)

A, B1, B2, C, D, D_LOST, D_OPEN = RolloutType


def booleans(*values):
    return torch.tensor(values, dtype=torch.bool)


def test_groups_are_by_uid_and_not_by_position():
    assert index_groups(["x", "y", "x", "z", "y"]).tolist() == [0, 1, 0, 2, 1]
    assert index_groups([]).tolist() == []


def test_the_six_types_of_one_group():
    types = rollout_types(
        hit=booleans(1, 1, 1, 0, 0),
        correct=booleans(1, 0, 0, 0, 1),
        answered=booleans(1, 1, 0, 0, 1),
        group_index=torch.zeros(5, dtype=torch.int64),
    )
    assert types.tolist() == [A, B1, B2, C, D]
    assert types.dtype == torch.int8


def test_a_miss_is_retrievable_only_through_its_own_group():
    hit, correct = booleans(0, 1, 0, 0), booleans(1, 0, 1, 0)
    interleaved = rollout_types(hit, correct, booleans(1, 1, 1, 1), torch.tensor([7, 7, 3, 3]))
    assert interleaved.tolist() == [D, B1, D_LOST, C]
    swapped = rollout_types(hit, correct, booleans(1, 1, 1, 1), torch.tensor([3, 7, 7, 3]))
    assert swapped.tolist() == [D_LOST, B1, D, C]


def test_the_oracle_query_can_only_make_a_miss_retrievable():
    hit, correct, answered = booleans(0, 0, 0, 1, 0), booleans(1, 1, 0, 1, 1), booleans(1, 1, 1, 1, 1)
    groups = torch.tensor([0, 0, 0, 1, 1])
    without = rollout_types(hit, correct, answered, groups)
    assert without.tolist() == [D_LOST, D_LOST, C, A, D]
    oracle = rollout_types(hit, correct, answered, groups, oracle_hit=booleans(1, 1, 1, 0, 0))
    assert oracle.tolist() == [D, D, C, A, D]


def test_alone_in_its_group_the_oracle_decides_or_nothing_does():
    hit, correct, answered = booleans(0, 0, 1), booleans(1, 1, 1), booleans(1, 1, 1)
    groups = torch.arange(3)
    assert rollout_types(hit, correct, answered, groups).tolist() == [D_OPEN, D_OPEN, A]
    oracle = rollout_types(hit, correct, answered, groups, oracle_hit=booleans(1, 0, 0))
    assert oracle.tolist() == [D, D_LOST, A]


def test_an_oracle_that_did_not_answer_leaves_the_type_to_the_group():
    hit, correct, answered = booleans(0, 0, 0, 0, 1, 0), booleans(1, 1, 1, 0, 1, 1), booleans(1, 1, 1, 1, 1, 1)
    groups, oracle, known = torch.tensor([0, 1, 2, 2, 3, 3]), booleans(0, 1, 1, 1, 0, 0), booleans(0, 0, 0, 0, 0, 0)
    silent = rollout_types(hit, correct, answered, groups, oracle_hit=oracle, oracle_known=known)
    assert (
        silent.tolist() == rollout_types(hit, correct, answered, groups).tolist() == [D_OPEN, D_OPEN, D_LOST, C, A, D]
    )
    known = booleans(1, 1, 0, 1, 0, 0)
    mixed = rollout_types(hit, correct, answered, groups, oracle_hit=oracle, oracle_known=known)
    assert mixed.tolist() == [D_LOST, D, D_LOST, C, A, D]


def test_padding_rows_do_not_speak_for_their_group():
    hit, correct, answered = booleans(1, 0, 0), booleans(1, 1, 1), booleans(1, 1, 1)
    groups = torch.zeros(3, dtype=torch.int64)
    assert rollout_types(hit, correct, answered, groups)[1:].tolist() == [D, D]
    masked = rollout_types(hit, correct, answered, groups, row_mask=booleans(0, 1, 1))
    assert masked[1:].tolist() == [D_LOST, D_LOST]
    single = rollout_types(hit, correct, answered, groups, row_mask=booleans(0, 1, 0))
    assert single[1].item() == D_OPEN


def test_correct_without_an_answer_is_refused():
    with pytest.raises(ValueError, match="rollout 1 is correct but not answered"):
        rollout_types(booleans(1, 1), booleans(1, 1), booleans(1, 0), torch.zeros(2, dtype=torch.int64))


def turn(kind, start, end, *tags, status=None):
    status = status or ("ok" if kind == "search" else "none")
    return SimpleNamespace(kind=kind, span=(start, end), status=status, tag_spans=tags)


def mask(length, *sampled):
    values = torch.zeros(length, dtype=torch.int64)
    for start, end in sampled:
        values[start:end] = 1
    return values


def test_segments_by_hand():
    N, V, R, S = Segment
    turns = [
        turn("search", 0, 3, (0, 1)),
        turn("malformed", 4, 6),
        turn("search", 6, 8),  # first hit: index 2
        turn("search", 9, 11),
        turn("answer", 12, 15, (12, 13), (14, 15)),
    ]
    response_mask = mask(16, (0, 3), (4, 8), (9, 11), (12, 15))
    table = TurnTable.of([turns, turns, turns])
    segments = segment_map(table, torch.tensor([2, 0, -1]), response_mask.repeat(3, 1))
    assert segments.tolist() == [
        [N, V, V, N, R, R, V, V, N, R, R, N, N, S, N, N],
        [N, V, V, N, R, R, R, R, N, R, R, N, N, S, N, N],
        [N, R, R, N, R, R, R, R, N, R, R, N, N, S, N, N],
    ]
    assert segments.dtype == torch.int8


def test_a_failed_retrieval_is_nobodys_fault():
    turns = [turn("search", 0, 2, status="error"), turn("search", 3, 5), turn("search", 6, 8, status="error")]
    segments = segment_map(TurnTable.of([turns]), torch.tensor([1]), mask(8, (0, 2), (3, 5), (6, 8)).unsqueeze(0))
    assert segments.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]


def test_rows_of_any_length_even_none():
    table = TurnTable.of([[], [turn("answer", 0, 9)], [turn("search", 2, 2)]])
    response_mask = torch.ones(3, 4)
    response_mask[0] = 0  # an empty response
    segments = segment_map(table, torch.tensor([-1, -1, 0]), response_mask)
    assert segments.tolist() == [[0] * 4, [3] * 4, [0] * 4]  # clipped at the end of the row; an empty turn is nothing
    assert segment_map(TurnTable.of([[], []]), torch.tensor([-1, -1]), torch.ones(2, 3)).tolist() == [[0] * 3] * 2
    assert segment_map(TurnTable.of([]), torch.zeros(0, dtype=torch.int64), torch.ones(0, 3)).shape == (0, 3)


def test_overlapping_turns_are_refused_and_not_added_up():
    """Two searches over the same tokens would paint VSEARCH + VSEARCH = RSEARCH."""
    fine = [turn("search", 0, 3), turn("search", 3, 4)]
    for broken in ([turn("search", 0, 4), turn("search", 0, 4)], [turn("search", 2, 4), turn("search", 0, 2)]):
        table = TurnTable.of([[], fine, [*fine, turn("answer", 4, 4)], broken])
        with pytest.raises(ValueError, match="rollout 3: turn 1 starts before turn 0 ends"):
            segment_map(table, torch.tensor([-1, 0, 0, 1]), torch.ones(4, 4))
    padded = TurnTable.of([fine, [*fine, turn("answer", 4, 6)]])  # zeros after a row's last turn are no turn
    assert segment_map(padded, torch.tensor([0, 1]), torch.ones(2, 6)).tolist() == [
        [1, 1, 1, 2, 0, 0],
        [1] * 4 + [3] * 2,
    ]


@st.composite
def rollouts(draw):
    turns, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 2))
        end = start + draw(st.integers(0, 4))
        tags = [(a, draw(st.integers(a, end))) for a in draw(st.lists(st.integers(start, end), max_size=2))]
        kind = draw(st.sampled_from(["search", "answer", "malformed"]))
        status = draw(st.sampled_from(["ok", "error", "none"])) if kind == "search" else "none"
        turns.append(turn(kind, start, end, *tags, status=status))
        position = end
    first_hit = draw(st.sampled_from([-1, *range(len(turns))]))
    return turns, first_hit, draw(st.lists(st.integers(0, 1), min_size=20, max_size=20))


def slow_segments(turns, first_hit, response_mask):
    segments = []
    for token, sampled in enumerate(response_mask):
        code = Segment.NONE
        for index, item in enumerate(turns):
            if sampled and item.span[0] <= token < item.span[1] and item.status != "error":
                if item.kind == "answer":
                    code = Segment.ANS
                elif item.kind == "search" and index <= first_hit:
                    code = Segment.VSEARCH
                else:
                    code = Segment.RSEARCH
        if any(start <= token < end for item in turns for start, end in item.tag_spans):
            code = Segment.NONE
        segments.append(int(code))
    return segments


@settings(deadline=None)
@given(st.lists(rollouts(), min_size=1, max_size=4))
def test_segments_equal_the_slow_reference(batch):
    segments = segment_map(
        TurnTable.of([turns for turns, _, _ in batch]),
        torch.tensor([first_hit for _, first_hit, _ in batch]),
        torch.tensor([response_mask for _, _, response_mask in batch]),
    )
    assert segments.tolist() == [slow_segments(*row) for row in batch]


def measure(hit, correct, groups, rewards=None, answered=None, **kwargs):
    hit, correct, groups = booleans(*hit), booleans(*correct), torch.tensor(groups)
    answered = torch.ones_like(hit) if answered is None else booleans(*answered)
    rewards = correct.float() if rewards is None else torch.tensor(rewards)
    row_mask = kwargs.get("row_mask")
    types = rollout_types(hit, correct, answered, groups, row_mask=row_mask)
    return {
        key.removeprefix("grounding/"): value
        for key, value in grounding_metrics(hit, correct, types, groups, rewards, **kwargs).items()
    }


def test_metrics_by_hand():
    #             group 0: mixed       1: all wrong  2: all right, lost  3: alone
    metrics = measure(
        hit=[1, 1, 0, 0, 1, 0, 0, 0, 1],
        correct=[1, 0, 1, 0, 0, 0, 1, 1, 1],
        groups=[0, 0, 0, 0, 1, 1, 2, 2, 3],
        answered=[1, 1, 1, 1, 0, 1, 1, 1, 1],
    )
    shares = {code: metrics[f"type_share/{code.name}"] * 9 for code in RolloutType}
    assert shares == pytest.approx({A: 2, B1: 1, B2: 1, C: 2, D: 1, D_LOST: 2, D_OPEN: 0})
    assert metrics["tool_hit"] == pytest.approx(4 / 9)
    assert metrics["em"] == pytest.approx(5 / 9)
    assert metrics["supcor"] == pytest.approx(2 / 9)
    assert metrics["grounded_share"] == pytest.approx(2 / 5)
    assert metrics["hitacc"] == pytest.approx(2 / 4)
    assert metrics["hit_but_wrong"] == pytest.approx(2 / 9)
    assert metrics["delta"] == pytest.approx(0.0)  # groups 0 and 1 hold both: 1/2 - 1/2 and 0 - 0
    counts = {key: metrics[f"groups_{key}"] for key in ("singleton", "all_right", "all_wrong", "mixed")}
    assert counts == {"singleton": 1, "all_right": 2, "all_wrong": 1, "mixed": 1}
    assert metrics["groups"] == 4
    assert metrics["groups_zero_variance_share"] == pytest.approx(2 / 3)  # of the groups of two or more
    assert metrics["groups_zero_variance_all_right"] == metrics["groups_zero_variance_all_wrong"] == 1


def test_groups_without_variance_are_told_apart_by_their_rewards():
    #                        all wrong, graded   all wrong    all right      alone
    metrics = measure(
        [0] * 7, [0, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 2, 2, 3], rewards=[0.0, 0.1, 0.0, 0.0, 0.8, 0.8, 0.0]
    )
    assert metrics["groups_zero_variance_all_wrong"] == metrics["groups_zero_variance_all_right"] == 1
    assert metrics["groups_all_wrong"] == 3


def test_grounding_gap_and_identity_by_hand():
    # H=1: right, right, wrong; H=0: wrong. p_H = 3/4, gap = 2/3, mean 1/2, σ (n-1) = sqrt(1/3)
    metrics = measure(hit=[1, 1, 1, 0], correct=[1, 1, 0, 0], groups=[5, 5, 5, 5])
    assert metrics["delta"] == pytest.approx(2 / 3)
    expected = 4 * (3 / 4) * (1 / 4) * (2 / 3) / (1 / 3) ** 0.5
    assert metrics["identity_advantage"] == pytest.approx(expected)
    assert metrics["identity_covariance"] == pytest.approx(expected)


def test_four_groups_of_one_row_are_four_singletons():
    metrics = measure(hit=[1, 0, 0, 0], correct=[1, 0, 0, 0], groups=[0, 1, 2, 3])
    assert metrics["groups_singleton"] == metrics["groups"] == 4
    assert metrics["groups_zero_variance_share"] == 0
    assert metrics["identity_advantage"] == metrics["identity_covariance"] == 0


def test_metrics_of_an_empty_batch_are_zero():
    metrics = measure(hit=[0, 0], correct=[0, 0], groups=[0, 0], row_mask=booleans(0, 0))
    assert set(metrics.values()) == {0.0}


batches = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3), st.booleans()), min_size=1, max_size=16)


@settings(deadline=None)
@given(batches)
def test_padding_rows_change_no_metric(rows):
    hit, correct, groups, keep = (list(column) for column in zip(*rows, strict=True))
    kept = [i for i, real in enumerate(keep) if real]
    masked = measure(hit, correct, groups, row_mask=booleans(*keep))
    if kept:
        plain = measure(*([column[i] for i in kept] for column in (hit, correct, groups)))
        assert masked == pytest.approx(plain)


@settings(deadline=None)
@given(batches, st.randoms())
def test_permuting_rows_changes_no_metric(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    first, second = (measure(*[list(column) for column in zip(*order, strict=True)][:3]) for order in (rows, shuffled))
    assert first == pytest.approx(second)


def grpo(rewards, groups):
    """verl's GRPO formula, group by group."""
    advantages = torch.zeros(len(rewards))
    for group in groups.unique():
        rows = groups == group
        advantages[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-6)
    return advantages


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_identity_holds_for_grpo_advantages_and_graded_rewards(seed):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(4).repeat_interleave(5)[torch.randperm(20, generator=generator)]
    hit = torch.rand(20, generator=generator) < 0.5
    rewards = torch.randint(0, 5, (20,), generator=generator) / 4
    types = torch.full((20,), C, dtype=torch.int8)
    metrics = grounding_metrics(hit, rewards > 0.5, types, groups, rewards, outcome_advantages=grpo(rewards, groups))
    expected = []
    for group in range(4):
        h, r = hit[groups == group].double(), rewards[groups == group].double()
        if r.min() < r.max():
            expected.append((5 * ((h * r).mean() - h.mean() * r.mean()) / r.std()).item())
    mean = sum(expected) / max(len(expected), 1)
    assert metrics["grounding/identity_covariance"] == pytest.approx(mean, abs=1e-9)
    assert metrics["grounding/identity_advantage"] == pytest.approx(mean, abs=2e-5)


def test_equal_rewards_have_no_variance_even_when_their_mean_rounds():
    groups = Groups.of(torch.tensor([0, 0, 0, 1, 1]))
    assert groups.zero_variance(torch.tensor([0.1, 0.1, 0.1, 0.1, 0.2])).tolist() == [True, False]


def test_a_group_of_one_says_nothing_about_variance():
    # alone; one counted beside a padding row; two
    groups = Groups.of(torch.tensor([0, 1, 1, 2, 2]), booleans(1, 1, 0, 1, 1))
    assert groups.zero_variance(torch.full((5,), 0.5)).tolist() == [False, False, True]


def test_values_are_centred_on_the_counted_rows_of_their_group():
    groups = Groups.of(torch.tensor([4, 4, 4, 7]), booleans(1, 1, 0, 1))
    centred, sigma = groups.centred(torch.tensor([1.0, 4.0, 99.0, 3.0]))
    assert centred[[0, 1, 3]].tolist() == [-1.5, 1.5, 0.0]
    assert sigma.tolist() == pytest.approx([4.5**0.5, 0.0])  # n-1: (1.5² + 1.5²)/1
