"""From traces to credit: hand-made batches, and random ones against a token-by-token reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.reference import reference_advantages
from tests.traces import masks, trace_of
from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType, Segment, TurnTable, segment_map
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import GCAConfig
from verl_bridge.embedded.tokenizer import train_tokenizer
from verl_bridge.qa.actions import read_turn
from verl_bridge.trace import SearchTrace, SearchTurn

UNIFORM = GCAConfig(enable=True, salience="uniform")


def grpo(rewards, groups):
    from verl_bridge.algorithms.bridge import standardised_outcome

    return standardised_outcome(torch.tensor(rewards), torch.tensor(groups))


def test_one_group_by_hand():
    """A, B1, B2, D of one question: each turn's tokens get λ·ρ·c̄ = λ·0.05 of |A|, tags and observations nothing."""
    traces = [
        trace_of("miss", "hit", "miss", answer="Lima"),
        trace_of("hit", answer="Quito"),
        trace_of("hit", "bad"),
        trace_of(answer="Lima"),
    ]
    groups, rewards = torch.zeros(4, dtype=torch.int64), torch.tensor([1.0, 0.0, 0.0, 1.0])
    signals = credit.batch_signals(traces, groups)
    assert signals.types.tolist() == [RolloutType.A, RolloutType.B1, RolloutType.B2, RolloutType.D_RETRIEVABLE]
    assert signals.first_hit_turn.tolist() == [1, 0, 0, -1]
    mask = masks(traces)
    base = torch.tensor([2.0, -2.0, -2.0, 2.0])[:, None] * mask
    result = credit.ground(traces, signals, base, mask, groups, rewards, group_relative=True, settings=UNIFORM)
    up, down = 0.5 * 0.05, -0.5 * 0.05
    a = [0, up, up, 0, 0, 0] * 2 + [0, down, down, 0, 0, 0] + [0, up, up, 0]
    b1 = [0, up, up, 0, 0, 0, 0, -0.05, -0.05, 0]
    b2 = [0, up, up, 0, 0, 0, 0, down / 2, down / 2, 0]
    d = [0, down, down, 0]
    for row, parts in enumerate((a, b1, b2, d)):
        expected = base[row, : len(parts)] + 2.0 * torch.tensor(parts)
        torch.testing.assert_close(result.advantages[row, : len(parts)], expected, rtol=0, atol=1e-6)


def test_yes_no_questions_are_gated_and_can_be_kept():
    traces = [trace_of("hit", answer="yes", gold="yes"), trace_of("miss", answer="no", gold="yes")]
    groups, rewards, mask = torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.0]), masks(traces)
    signals = credit.batch_signals(traces, groups)
    base = torch.tensor([1.0, -1.0])[:, None] * mask
    gated = credit.ground(traces, signals, base, mask, groups, rewards, group_relative=True, settings=UNIFORM)
    assert torch.equal(gated.advantages, base)
    keep = GCAConfig(enable=True, yes_no="keep", salience="uniform")
    kept = credit.ground(traces, signals, base, mask, groups, rewards, group_relative=True, settings=keep)
    # right without evidence, and nobody of the group found any: it leaves the loss
    assert signals.types[0] == RolloutType.D_NOT_RETRIEVABLE and not kept.advantages[0].any()
    teaching = [
        credit.rl_mask(signals, groups, rewards, group_relative=True, settings=chosen).tolist()
        for chosen in (GCAConfig(enable=True), GCAConfig(enable=False, yes_no="keep"), keep)
    ]
    assert teaching == [[True, True], [True, True], [False, True]]


@pytest.mark.parametrize("group_relative", [True, False])
def test_what_leaves_the_policy_loss_is_what_does_not_teach(group_relative):
    """Groups: all right, mixed, yes/no, and one alone whose oracle found nothing."""
    traces = [trace_of("miss", answer=answer) for answer in ("Lima", "Lima", "Lima", "Quito")]
    traces += [trace_of("miss", answer=answer, gold="yes") for answer in ("yes", "no")]
    traces += [trace_of("miss", answer="Lima")]
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    signals = credit.batch_signals(traces, groups, oracle_hit=torch.zeros(7, dtype=torch.bool))
    mask = masks(traces)
    base = torch.tensor([0.4, 0.4, 0.4, -0.6, 0.4, -0.6, 0.4])[:, None] * mask  # whitened over the batch
    common = {"group_relative": group_relative, "settings": UNIFORM}
    result = credit.ground(traces, signals, base, mask, groups, rewards, **common)
    excluded = ((result.advantages == 0) | (mask == 0)).all(dim=1)
    assert excluded.tolist() == [not group_relative] * 2 + [True, False, False, False, True]
    assert (~credit.rl_mask(signals, groups, rewards, **common)).tolist() == excluded.tolist()


def test_a_cap_that_32_bits_round_up_holds_for_advantages_of_64():
    trace = trace_of("hit", answer="Lima")
    trace = replace(trace, turns=(replace(trace.turns[0], tag_spans=()), trace.turns[1]))
    groups, mask = torch.tensor([0]), masks([trace])
    margin, entropy = torch.zeros(mask.shape), torch.zeros(mask.shape)
    margin[0, :4], entropy[0, 0] = torch.tensor([-9.0, 1.0, 1.1, 0.9]), 1.0  # the first token is far the least sure
    result = credit.ground(
        [trace],
        credit.batch_signals([trace], groups),
        mask.double(),
        mask,
        groups,
        torch.ones(1),
        group_relative=False,
        settings=GCAConfig(enable=True, c_max=0.1),
        margin=margin,
        top_entropy=entropy,
    )
    assert torch.tensor(0.1).double() > 0.1 + 1e-9
    assert result.metrics["gca/residual_max"] == pytest.approx(0.2 * 0.5 * 0.1, rel=1e-12)  # that token is at the cap


def test_parallel_calls_with_the_first_hit_are_all_useful():
    """Call spans (0, 4), (4, 8), observations (8, 10), (10, 12); a later search and the answer."""
    found = trace_of("hit", "miss", answer="Lima")
    first, later, answer = found.turns
    calls = (
        replace(first, tag_spans=((0, 1),), observation_span=(8, 10)),
        replace(later, span=(4, 8), tag_spans=((7, 8),), observation_span=(10, 12)),
        replace(later, span=(13, 15), tag_spans=(), observation_span=(15, 16)),
        replace(answer, span=(16, 18), tag_spans=()),
    )
    trace = replace(found, turns=calls, answer_span=(16, 18), response_length=18)
    mask, groups = masks([trace]), torch.tensor([0])
    signals = credit.batch_signals([trace], groups)
    segments = segment_map(TurnTable.of([trace.turns]), signals.first_hit_turn, mask)
    n, v, r, a = Segment
    assert segments.tolist() == [[n, *[v] * 6, n, *[n] * 5, r, r, n, a, a]]
    assert masks([trace]).tolist() == [[1] * 8 + [0] * 5 + [1, 1, 0, 1, 1]]


def test_several_searches_in_one_turn_by_tags_are_one_search_turn():
    """The first action wins: what was written after it is no part of the rollout."""
    tokenizer = train_tokenizer(["<search> a b </search> <answer> c </answer>"], vocabulary=300)
    text = "<search>ab</search><search>c</search><answer>d</answer>"  # one token a tag and a letter
    read = read_turn(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert (read.action.kind, read.action.content, read.length) == ("search", "ab", 4)
    found = trace_of("hit").turns[0]
    turn = replace(found, span=(0, read.length), tag_spans=read.tag_spans, query=read.action.content)
    trace = replace(trace_of("hit"), turns=(turn,))
    signals = credit.batch_signals([trace], torch.tensor([0]))
    segments = segment_map(TurnTable.of([trace.turns]), signals.first_hit_turn, masks([trace]))
    n, v, _, _ = Segment
    assert len(trace.searches) == 1 and segments.tolist() == [[n, v, v, n, n, n]]


def test_a_truncated_turn_and_an_empty_response():
    cut = SearchTrace("q", ("Lima",), (SearchTurn("malformed", (0, 3)),), None, None, "length", 3)
    empty = SearchTrace("q", ("Lima",), (), None, None, "length", 1)
    right = trace_of("hit", answer="Lima")
    traces, groups, rewards = [right, cut, empty], torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 0.0, 0.0])
    mask = masks(traces)
    signals = credit.batch_signals(traces, groups)
    assert signals.types.tolist() == [RolloutType.A, RolloutType.C, RolloutType.C]
    base = grpo(rewards.tolist(), groups.tolist())[:, None] * mask
    table = VerlBridgeConfig.from_mapping({"gca": {"salience": "uniform", "routing": {"C": {"RSEARCH": -0.5}}}}).gca
    result = credit.ground(traces, signals, base, mask, groups, rewards, group_relative=True, settings=table)
    # no hit: the cut turn counts as a later search, A·(1 + 0.2·0.5·0.25) of a negative A
    torch.testing.assert_close(result.advantages[1, :3], base[1, :3] * 1.025)
    assert not result.advantages[2].any() and not mask[2].any()


def test_trajectory_advantage_of_grpo_is_its_token_advantage_and_else_the_outcome():
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0]])
    advantages = torch.tensor([[9.0, 0.7, 0.7], [-0.7, -0.7, 9.0], [9.0, 9.0, 9.0]])
    rewards, groups = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0])
    grpo_ = credit.trajectory_advantages("grpo", advantages, mask, rewards, groups)
    torch.testing.assert_close(grpo_, torch.tensor([0.7, -0.7, 0.0]))
    other = credit.trajectory_advantages("gae", advantages, mask, rewards, groups)
    torch.testing.assert_close(other, torch.tensor([1.1547, -0.5774, -0.5774]), atol=1e-4, rtol=0)


def test_trajectory_advantage_of_lone_rollouts_and_of_equal_rewards():
    mask = torch.ones(6, 2)
    # verl's GRPO hands a lone rollout its reward, and equal rewards the rounding error of their mean
    verl = torch.tensor([1.0, 0.0, 1.0, 0.0, -0.056, -0.056])[:, None] * mask
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.8, 0.8]), torch.tensor([0, 1, 2, 3, 4, 4])
    found = credit.trajectory_advantages("grpo", verl, mask, rewards, groups)
    assert found[4:].tolist() == [0.0, 0.0]
    standard = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(found[:4], standard[:4])


def test_search_metrics_by_hand():
    traces = [trace_of("hit", "failed", answer="Lima"), trace_of(answer="x"), trace_of("bad")]
    assert credit.search_metrics(traces) == pytest.approx(
        {
            "search/per_rollout": 2 / 3,
            "search/toolless_share": 2 / 3,
            "search/failed_share": 1 / 2,
            "search/malformed_turn_share": 1 / 5,
            "search/answered_share": 2 / 3,
        }
    )


ROLLOUTS = st.tuples(
    st.lists(st.sampled_from(("hit", "miss", "failed", "bad", "hit+miss", "miss+hit+failed+bad")), max_size=4),
    st.sampled_from((None, "Lima", "Quito")),
    st.sampled_from(("Lima", "yes")),
).filter(lambda rollout: rollout[0] or rollout[1])


@given(st.lists(st.tuples(ROLLOUTS, st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=80, deadline=None)
def test_equals_the_token_by_token_reference(rows):
    """With uniform salience, and with margins and entropies."""
    golds = {}
    traces, groups = [], []
    for (steps, answer, gold), group in rows:
        traces.append(trace_of(*steps, answer=answer, gold=golds.setdefault(group, gold)))
        groups.append(group)
    rewards = [float(trace.answer == trace.golden_answers[0]) for trace in traces]
    # one rollout alone tells nothing about its prompt: that case has its own test in algorithms
    keep = [i for i, group in enumerate(groups) if groups.count(group) > 1]
    if not keep:
        return
    traces, groups, rewards = ([part[i] for i in keep] for part in (traces, groups, rewards))
    mask = masks(traces)
    base = grpo(rewards, groups)[:, None] * mask
    index, reward = torch.tensor(groups), torch.tensor(rewards)
    signals = credit.batch_signals(traces, index)
    result = credit.ground(traces, signals, base, mask, index, reward, group_relative=True, settings=UNIFORM)
    reference = reference_advantages(traces, base, mask, groups, rewards)
    torch.testing.assert_close(result.advantages, reference, rtol=0, atol=1e-6)

    generator = torch.Generator().manual_seed(len(rows))
    statistics = {
        "margin": 3 * torch.randn(mask.shape, generator=generator),
        "top_entropy": torch.rand(mask.shape, generator=generator),
    }
    weighed = GCAConfig(enable=True)
    assert weighed.salience == "margin_entropy"
    result = credit.ground(
        traces, signals, base, mask, index, reward, group_relative=True, settings=weighed, **statistics
    )
    reference = reference_advantages(traces, base, mask, groups, rewards, **statistics)
    torch.testing.assert_close(result.advantages, reference, rtol=0, atol=1e-6)


def test_salience_without_statistics_is_refused():
    trace = trace_of("hit", answer="Lima")
    signals = credit.batch_signals([trace], torch.tensor([0]))
    mask = masks([trace])
    with pytest.raises(ValueError, match="salience=uniform"):
        credit.ground(
            [trace], signals, mask, mask, torch.tensor([0]), torch.ones(1), group_relative=False, settings=GCAConfig()
        )


def test_the_oracle_is_asked_where_a_type_hangs_on_it_and_decides_it():
    alone = trace_of("miss", answer="Lima")  # right without evidence, and so is nobody's hit
    others = [trace_of("hit", answer="Quito"), trace_of("miss", answer="Quito")]
    groups = torch.tensor([0, 0])
    assert credit.oracle_queries([alone, others[1]], groups) == {0: ("capital? Lima", ("Lima",))}
    assert credit.oracle_queries([alone, others[0]], groups) == {}  # a hit: retrievable already
    assert credit.oracle_queries([others[1]], groups[:1]) == {}  # wrong: type C
    # the same text in another group is another question: its hit says nothing about this one, nor the other way round
    apart = torch.tensor([7, 3])
    assert credit.oracle_queries([alone, others[0]], apart) == {7: ("capital? Lima", ("Lima",))}
    other_gold = replace(alone, golden_answers=("Cusco",), answer="Cusco")
    assert credit.oracle_queries([alone, other_gold], apart) == {
        7: ("capital? Lima", ("Lima",)),
        3: ("capital? Cusco", ("Cusco",)),
    }
    for found, kind in ((True, RolloutType.D_RETRIEVABLE), (False, RolloutType.D_NOT_RETRIEVABLE)):
        hits = torch.tensor([found, found])
        types = credit.batch_signals([alone, others[1]], groups, oracle_hit=hits).types.tolist()
        assert types == [kind, RolloutType.C]
        silent = torch.tensor([False, False])
        unknown = credit.batch_signals([alone, others[1]], groups, oracle_hit=hits, oracle_known=silent).types.tolist()
        assert unknown == [RolloutType.D_NOT_RETRIEVABLE, RolloutType.C]


def test_entropy_by_segment():
    trace = trace_of("hit", "miss", answer="Lima")  # tokens 0-3, 6-9 and 12-15, the outer two of each are tags
    mask, entropy = masks([trace]), torch.arange(16.0).unsqueeze(0)
    signals = credit.batch_signals([trace], torch.tensor([0]))
    result = credit.ground(
        [trace],
        signals,
        mask.float(),
        mask,
        torch.tensor([0]),
        torch.ones(1),
        group_relative=False,
        settings=UNIFORM,
        entropy=entropy,
    )
    # VSEARCH 1, 2; RSEARCH 7, 8; ANS 13, 14; tags 0, 3, 6, 9, 12, 15
    expected = {"VSEARCH": 1.5, "RSEARCH": 7.5, "ANS": 13.5, "NONE": 7.5}
    assert {name: result.metrics[f"gca/entropy/{name}"] for name in expected} == expected


def test_unicode_aliases_find_what_the_default_does_not():
    trace = trace_of("hit", answer="x", gold="Ｌｉｍａ")  # full width
    index = torch.tensor([0])
    assert not credit.batch_signals([trace], index).hit.item()
    assert credit.batch_signals([trace], index, unicode=True).hit.item()
