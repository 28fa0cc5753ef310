"""The ablation with one search segment a type: its table from saved tokens, by hand."""

import pytest
import torch

from verl_bridge.algorithms.gca import RoutingTable, grounded_advantages, merged_table
from verl_bridge.algorithms.grounding import RolloutType, Segment

A, B1, B2, C, D, *_ = RolloutType
N, V, R, S = Segment


def tokens(**counts):
    """Tokens (VSEARCH, RSEARCH) by type; NONE and ANS hold what must not matter."""
    table = torch.full((len(RolloutType), len(Segment)), 999)
    table[:, [V, R]] = 0
    for name, (useful, later) in counts.items():
        table[RolloutType[name], V], table[RolloutType[name], R] = useful, later
    return table


def test_sign_of_the_signed_mean_and_size_of_the_absolute_mean():
    # A: 30·0.5 − 10·0.5 > 0, size 0.5; B1: 10·0.5 − 30·0.5 < 0, size 0.5
    # B2: 10·0.5 − 30·0.25 = −2.5 < 0, size (10·0.5 + 30·0.25)/40 = 0.3125
    table = merged_table(tokens(A=(30, 10), B1=(10, 30), B2=(10, 30), C=(0, 50), D_RETRIEVABLE=(0, 7)))
    assert table == RoutingTable(
        a=(0.5, 0.5, 0.5),
        b1=(-0.5, -0.5, -1.0),
        b2=(-0.3125, -0.3125, 0.0),
        c=(0.0, 0.0, 0.0),
        d_retrievable=(-0.25, -0.25, -0.5),
        merged=True,
    )


def test_a_tie_and_a_type_that_was_not_seen_give_0():
    table = merged_table(tokens(A=(20, 20)))
    assert table.a == (0.0, 0.0, 0.5) and table.b1 == (0.0, 0.0, -1.0) and table.b2 == (0.0, 0.0, 0.0)
    assert table.d_retrievable == (-0.25, -0.25, -0.5)  # no hit: later searches are all there can be


def test_another_split_table_can_be_merged():
    split = RoutingTable(a=(0.8, -0.1, 0.3), d_retrievable=(0.0, -0.4, -0.5))
    table = merged_table(tokens(A=(1, 3)), split)
    assert table.a == pytest.approx(((0.8 + 0.3) / 4, (0.8 + 0.3) / 4, 0.3))
    assert table.d_retrievable == (-0.4, -0.4, -0.5)


def test_merging_keeps_the_budget_of_search_when_one_sign_is_all_there_is():
    split, table = RoutingTable(), merged_table(tokens(A=(40, 0), B1=(0, 40)))
    assert table.a[0] == split.a[0] and table.b1[0] == split.b1[1]
    assert table.largest <= split.largest


def test_a_merged_table_may_blame_the_search_that_found_it_and_a_split_one_may_not():
    kwargs = dict(response_mask=torch.ones(2, 3), group_index=torch.tensor([0, 0]), group_relative=True)
    merged = RoutingTable(
        a=(0.5, 0.5, 0.5),
        b1=(-0.5, -0.5, -1.0),
        b2=(0.0, 0.0, 0.0),
        d_retrievable=(0.0, 0.0, 0.0),
        merged=True,
    )
    result = grounded_advantages(
        torch.tensor([[1.0] * 3, [-1.0] * 3]),
        segments=torch.tensor([[V, R, S], [V, R, S]], dtype=torch.int8),
        types=torch.tensor([C, B1], dtype=torch.int8),
        rewards=torch.tensor([1.0, 0.0]),
        routing=merged,
        **kwargs,
    )
    torch.testing.assert_close(result.advantages[1], torch.tensor([-1.025, -1.025, -1.05]))
    with pytest.raises(ValueError, match=r"routing.b1: VSEARCH is -0.5"):
        RoutingTable(b1=(-0.5, -0.5, -1.0))


def test_a_merged_table_with_two_search_entries_is_refused():
    with pytest.raises(ValueError, match=r"routing.a: VSEARCH 0.5 and RSEARCH -0.5 must be equal"):
        RoutingTable(merged=True)
