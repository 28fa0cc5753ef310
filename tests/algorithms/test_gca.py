"""GCA residuals: hand-derived numbers, the bound, and what must stay exactly as it was."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.residual import with_residual
from verl_bridge.algorithms.gca import RoutingTable, grounded_advantages
from verl_bridge.algorithms.grounding import RolloutType, Segment

A, B1, B2, C, D, D_LOST, D_OPEN = RolloutType
N, V, R, S = Segment
TABLE = {  # of verl_bridge/algorithms/README.md
    A: {V: 0.5, R: -0.5, S: 0.5},
    B1: {V: 0.5, R: -0.5, S: -1.0},
    B2: {V: 0.5, R: -0.25, S: 0.0},
    C: {V: 0.0, R: 0.0, S: 0.0},
    D: {R: -0.25, S: -0.5},
    D_LOST: {},
    D_OPEN: {},
}


def same_bits(first, second):
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


def ground(advantages, segments, types, rewards, groups=None, mask=None, **kwargs):
    advantages = torch.as_tensor(advantages)
    result = grounded_advantages(
        advantages,
        torch.ones_like(advantages) if mask is None else torch.as_tensor(mask),
        torch.as_tensor(segments, dtype=torch.int8),
        torch.as_tensor(types, dtype=torch.int8),
        torch.zeros(len(advantages), dtype=torch.int64) if groups is None else torch.as_tensor(groups),
        torch.as_tensor(rewards),
        **({"group_relative": True} | kwargs),
    )
    return with_residual(advantages, result)


def test_every_cell_of_the_table_by_hand():
    # |δ| = ρ·|λ|·c_max/2 = 0.2·|λ|·0.25 = 0.05·|λ|
    result = ground(
        advantages=[[2.0] * 4, [-1.0] * 4, [-1.0] * 4, [-1.0] * 4, [2.0] * 4],
        segments=[[N, V, R, S]] * 5,
        types=[A, B1, B2, C, D],
        rewards=[1.0, 0.0, 0.0, 0.0, 1.0],
    )
    expected = torch.tensor(
        [
            [2.0, 2.05, 1.95, 2.05],
            [-1.0, -0.975, -1.025, -1.05],
            [-1.0, -0.975, -1.0125, -1.0],
            [-1.0, -1.0, -1.0, -1.0],
            [2.0, 2.0, 1.975, 1.95],
        ]
    )
    torch.testing.assert_close(result.advantages, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        result.residual[:3],
        torch.tensor([[0, 0.025, -0.025, 0.025], [0, -0.025, 0.025, 0.05], [0, -0.025, 0.0125, 0]]),
    )


def test_salience_weighs_the_residual_and_scale_all_of_it():
    salience = torch.tensor([[0.0, 0.1, 0.5, 9.0]])
    kwargs = dict(segments=[[V, V, R, N]], types=[A], rewards=[1.0], group_relative=False)
    result = ground([[1.0] * 4], salience=salience, **kwargs)
    torch.testing.assert_close(result.residual, torch.tensor([[0.0, 0.01, -0.05, 0.0]]))
    half = ground([[1.0] * 4], salience=salience, scale=0.5, **kwargs)
    torch.testing.assert_close(half.residual, result.residual / 2)


@pytest.mark.parametrize("value", [-0.1, 0.6, math.nan])
def test_salience_out_of_range_is_refused_where_it_is_used(value):
    kwargs = dict(types=[A], rewards=[1.0], group_relative=False, salience=torch.tensor([[value, 0.2]]))
    with pytest.raises(ValueError, match=r"salience lies outside \[0, c_max=0.5\]"):
        ground([[1.0, 1.0]], [[V, V]], **kwargs)
    assert ground([[1.0, 1.0]], [[N, V]], **kwargs).residual.tolist() == [[0.0, pytest.approx(0.02)]]


def test_the_default_settings_meet_the_bound_exactly():
    RoutingTable().check_bound(rho=0.2, scale=1.0, kappa=0.1, c_max=0.5)
    assert RoutingTable().largest == 1.0


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"rho": 0.21}, r"rho\*s\*lambda_max\*c_max <= kappa is broken: 0.21\*1\*1\*0.5 = 0.105 > 0.1"),
        ({"scale": 2.0}, r"0.2\*2\*1\*0.5 = 0.2 > 0.1; lower rho, s, c_max or the largest entry of routing"),
        ({"c_max": 0.6}, r"0.2\*1\*1\*0.6 = 0.12 > 0.1"),
        ({"routing": RoutingTable(b1=(0.5, -0.5, -1.5))}, r"0.2\*1\*1.5\*0.5 = 0.15 > 0.1"),
        ({"kappa": 1.0}, r"gca.kappa=1.0 must lie in \(0, 1\)"),
        ({"kappa": 0.0}, "gca.kappa=0.0"),
        ({"rho": -0.1}, "gca.rho=-0.1 must be a number of at least 0"),
        ({"scale": math.nan}, "gca.s=nan"),
        ({"c_max": math.inf}, "gca.c_max=inf"),
    ],
)
def test_settings_that_break_the_bound_are_refused(settings_, message):
    with pytest.raises(ValueError, match=message):
        ground([[1.0]], [[V]], [A], [1.0], **settings_)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"b2": (-0.1, 0.0, 0.0)}, "routing.b2: VSEARCH is -0.1"),
        ({"a": (0.5, math.nan, 0.5)}, "routing.a=.* three finite numbers"),
        ({"c": (0.0, 0.0)}, "routing.c=.* three finite numbers"),
    ],
)
def test_tables_that_break_the_rules_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        RoutingTable(**rows)


def test_zero_variance_groups_stay_bit_for_bit():
    # whatever the base advantages are: -0.0, rounding noise, even NaN
    base = torch.tensor([[0.0, -0.0, 1e-7], [math.nan, -1e-7, 3.0], [1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    result = ground(base, [[V, R, S]] * 4, [A, D_LOST, A, B1], [1.0, 1.0, 1.0, 0.0], groups=[4, 4, 2, 2])
    assert same_bits(result.advantages[:2], base[:2])
    assert result.residual[:2].count_nonzero() == 0
    assert result.residual[2:].count_nonzero() == 6
    assert result.metrics["gca/groups_zero_variance"] == 1


def test_there_is_no_variance_gate_with_a_critic_or_a_group_of_one():
    kwargs = dict(segments=[[V], [V]], types=[A, A], rewards=[1.0, 1.0])
    critic = ground([[1.0], [-1.0]], group_relative=False, **kwargs)
    torch.testing.assert_close(critic.residual, torch.tensor([[0.025], [-0.025]]))
    alone = ground([[1.0], [-1.0]], groups=[0, 1], **kwargs)
    torch.testing.assert_close(alone.residual, critic.residual)


def test_a_miss_that_is_not_retrievable_leaves_the_loss_and_its_group_is_counted():
    base = torch.tensor([[1.5, 1.5, 7.0], [-0.5, -0.5, -0.5], [-0.5, -0.5, -0.5]])
    mask = [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    result = ground(base, [[R, S, N]] * 3, [D_LOST, C, C], [1.0, 0.0, 0.0], mask=mask)
    assert result.advantages.tolist() == [[0.0, 0.0, 7.0], [-0.5] * 3, [-0.5] * 3]
    assert result.residual.count_nonzero() == 0
    assert result.metrics["gca/rollouts_left_loss"] == 1
    assert result.metrics["gca/groups_only_negative"] == 1


def test_undetermined_misses_keep_their_base():
    base = torch.tensor([[1.5, -1.5]])
    result = ground(base, [[R, S]], [D_OPEN], [1.0], group_relative=False)
    assert same_bits(result.advantages, base)


def test_gated_questions_get_neither_residual_nor_mask():
    base = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    result = ground(
        base,
        [[R, S]] * 4,
        [D_LOST, B1, D_LOST, B1],
        [1.0, 0.0, 1.0, 0.0],
        groups=[0, 0, 1, 1],
        gated_rows=torch.tensor([True, True, False, False]),
    )
    assert same_bits(result.advantages[:2], base[:2])
    assert result.advantages[2].tolist() == [0.0, 0.0]
    assert result.metrics["gca/rollouts_left_loss"] == 1


def test_padding_rows_stay_and_do_not_count():
    base = torch.tensor([[1.0], [1.0], [-1.0]])
    kwargs = dict(segments=[[V], [V], [V]], types=[A, A, B1], rewards=[1.0, 1.0, 0.0])
    result = ground(base, row_mask=torch.tensor([True, True, False]), **kwargs)
    assert same_bits(result.advantages, base)  # without the padding row the group has no variance
    assert ground(base, **kwargs).residual.count_nonzero() == 3
    assert result.metrics["gca/token_share/VSEARCH"] == 1.0


def test_nan_and_garbage_at_masked_positions_are_harmless():
    base = torch.tensor([[1.0, math.nan, 1.0], [-1.0, math.inf, -1.0]])
    mask = [[1, 0, 1], [1, 0, 1]]
    result = ground(base, [[V, V, S]] * 2, [A, B1], [1.0, 0.0], mask=mask)
    clean = ground(base.nan_to_num(0.0, 0.0), [[V, N, S]] * 2, [A, B1], [1.0, 0.0], mask=mask)
    assert same_bits(result.advantages[:, ::2], clean.advantages[:, ::2])
    assert result.residual[:, 1].tolist() == [0.0, 0.0]
    assert result.metrics == clean.metrics | {
        key: result.metrics[key] for key in result.metrics if key.startswith("gca/token_share/")
    }
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_an_empty_response_is_a_zero_row():
    result = ground([[0.0, 0.0], [1.0, 1.0]], [[N, N], [V, S]], [C, A], [0.0, 1.0], mask=[[0, 0], [1, 1]])
    assert result.advantages[0].tolist() == [0.0, 0.0]


def test_a_hit_in_an_all_wrong_group_moves_nothing():
    # a bonus added to the reward would be standardised to [1.5, -0.5, -0.5, -0.5] here
    base = torch.zeros(4, 3)
    result = ground(base, [[V, R, S]] * 4, [B1, C, C, C], [0.0] * 4)
    assert same_bits(result.advantages, base)


@st.composite
def batches(draw):
    rows, length = draw(st.integers(1, 8)), 6
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    types = torch.randint(0, 7, (rows,), generator=generator)
    segments = torch.randint(0, 4, (rows, length), generator=generator)
    rewards = torch.randint(0, 2, (rows,), generator=generator).float()
    advantages = torch.randn(rows, length, generator=generator) * 10 ** draw(st.integers(-6, 6))
    return dict(
        advantages=advantages,
        segments=segments,
        types=types,
        rewards=rewards,
        groups=torch.randint(0, 3, (rows,), generator=generator),
        mask=torch.randint(0, 2, (rows, length), generator=generator),
        salience=torch.rand(rows, length, generator=generator) * 0.5,
        gated_rows=torch.rand(rows, generator=generator) < 0.2,
        row_mask=torch.rand(rows, generator=generator) < 0.8,
        group_relative=draw(st.booleans()),
    )


def slow_residual(batch, row, token, rho=0.2):
    """δ of one token from the definition, None for a token that leaves the loss."""
    same = [
        other
        for other in range(len(batch["types"]))
        if batch["groups"][other] == batch["groups"][row] and batch["row_mask"][other]
    ]
    rewards = {batch["rewards"][other].item() for other in same}
    exempt = not batch["row_mask"][row] or batch["gated_rows"][row]
    if batch["group_relative"] and len(same) >= 2 and len(rewards) == 1:
        exempt = True
    if exempt or not batch["mask"][row, token]:
        return 0.0
    kind = RolloutType(batch["types"][row].item())
    if kind == D_LOST:
        return None
    routed = TABLE[kind].get(Segment(batch["segments"][row, token].item()), 0.0)
    sign = math.copysign(1.0, batch["advantages"][row, token])
    return sign * rho * routed * batch["salience"][row, token].item()


@settings(deadline=None)
@given(batches())
def test_residuals_equal_the_slow_reference(batch):
    batch["segments"] = batch["segments"].where(batch["types"].unsqueeze(1) != D, batch["segments"] % 2 * 2)
    result = ground(**batch)
    for row, line in enumerate(batch["advantages"]):
        for token, base in enumerate(line):
            residual = slow_residual(batch, row, token)
            expected = 0.0 if residual is None else base.item() * (1 + residual)
            assert result.advantages[row, token].item() == pytest.approx(expected, rel=1e-6)
            assert result.residual[row, token].item() == pytest.approx(residual or 0.0, abs=3e-7)


@settings(deadline=None)
@given(batches())
def test_sign_bound_and_search_credit(batch):
    base, result = batch["advantages"], ground(**batch)
    left = result.advantages == 0
    assert torch.equal(result.advantages.sign()[~left], base.sign()[~left])
    assert left.any(dim=1)[batch["types"] != D_LOST].count_nonzero() == 0
    assert (result.residual.abs() <= 0.1 * (1 + 1e-6)).all()
    assert ((result.residual * base)[batch["segments"] == V] >= 0).all()
    kept = (result.residual == 0) & ~left
    assert same_bits(result.advantages[kept], base[kept])


@settings(deadline=None)
@given(batches(), st.integers(0, 2**31))
def test_permuting_rows_permutes_advantages(batch, seed):
    order = torch.randperm(len(batch["types"]), generator=torch.Generator().manual_seed(seed))
    shuffled = {key: value[order] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    first, second = ground(**batch), ground(**shuffled)
    assert same_bits(second.advantages, first.advantages[order])
    assert second.metrics == pytest.approx(first.metrics)


def test_metrics_by_hand():
    result = ground(
        [[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]],
        [[V, R, S, N], [V, S, N, N]],
        [A, B1],
        [1.0, 0.0],
        mask=[[1, 1, 1, 1], [1, 1, 1, 0]],
    )
    metrics = result.metrics
    assert metrics["gca/token_share/active"] == pytest.approx(5 / 7)
    assert metrics["gca/token_share/VSEARCH"] == pytest.approx(2 / 7)
    assert metrics["gca/token_share/NONE"] == pytest.approx(2 / 7)
    assert metrics["gca/residual_mean"] == pytest.approx((4 * 0.025 + 0.05) / 5)
    assert metrics["gca/residual_max"] == pytest.approx(0.05)
    assert metrics["gca/groups_only_negative"] == 0
    # A: its later search; B1: its useful search
    assert metrics["gca/conflict_cell_share"] == pytest.approx(2 / 5)
    assert metrics["gca/conflict_token_share"] == pytest.approx(2 / 5)


def test_conflict_cells_of_every_type_by_hand():
    # two tokens of each segment; the outcome disagrees with the sub-outcome in the cells named
    conflicts = {A: [R], B1: [V], B2: [V], C: [], D: [R, S], D_LOST: [], D_OPEN: []}
    for kind, cells in conflicts.items():
        segments = [V, V, R, R, S, S] if kind in (A, B1, B2) else [R, R, R, R, S, S]
        # zero variance: the diagnosis does not depend on the advantage
        result = ground([[0.0] * 6] * 2, [segments] * 2, [kind] * 2, [1.0, 1.0])
        there = len(set(segments))
        assert result.metrics["gca/conflict_cell_share"] == pytest.approx(len(cells) / there), kind
        share = sum(segments.count(cell) for cell in cells) / 6
        assert result.metrics["gca/conflict_token_share"] == pytest.approx(share), kind


def test_the_share_at_the_bound():
    # ρ·|λ|·c = 0.2·1·0.5 = κ on the first token of B1's answer, 0.2·0.5·0.5 on the second one
    result = ground(
        [[1.0, 1.0, 1.0], [-1.0] * 3],
        [[V, V, N], [S, V, R]],
        [A, B1],
        [1.0, 0.0],
        salience=torch.tensor([[0.5, 0.25, 0.5], [0.5, 0.5, 0.0]]),
    )
    assert result.metrics["gca/residual_at_bound_share"] == pytest.approx(1 / 4)
    assert result.metrics["gca/residual_max"] == pytest.approx(0.1)
    assert ground([[1.0]], [[V]], [A], [1.0]).metrics["gca/residual_at_bound_share"] == 0


def test_an_empty_batch_has_finite_metrics():
    empty = torch.zeros(0, dtype=torch.int64)
    result = grounded_advantages(
        torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3), empty, empty, torch.zeros(0), group_relative=True
    )
    assert result.advantages.shape == (0, 3) and set(result.metrics.values()) == {0.0}
