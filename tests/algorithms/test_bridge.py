"""BRIDGE's loss: hand-derived numbers and a slow per-turn reference, gradients included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.algorithms.bridge import (
    bridge_loss,
    document_weights,
    retrieval_log_probs,
    standardised_outcome,
)


def everything(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool)


def test_retrieval_distribution_by_hand():
    # 0.8/0.4 - 0.4/0.4 = 1
    log_probs = retrieval_log_probs(torch.tensor([[0.8, 0.4, 9.0]]), torch.tensor([[True, True, False]]))
    assert log_probs[0, :2].exp().tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])
    assert log_probs[0, 2] == -math.inf


def test_credit_weights_of_minus_one_and_minus_three():
    likelihood, old = torch.tensor([[-1.0, -3.0, -1.0]]), torch.log(torch.tensor([[0.2, 0.7, 0.1]]))
    mask = torch.tensor([[True, True, False]])
    weights = document_weights(likelihood, old, mask, tau_posterior=1.0)
    assert weights[0].tolist() == pytest.approx([0.8808, 0.1192, 0.0], abs=1e-4)
    posterior = document_weights(likelihood, old, mask, tau_posterior=1.0, form="posterior")
    share = 0.2 * math.e**-1 / (0.2 * math.e**-1 + 0.7 * math.e**-3)
    assert posterior[0].tolist() == pytest.approx([share, 1 - share, 0.0])


def test_loss_by_hand():
    # two documents, p_old = (1/2, 1/2), p = (3/4, 1/4): r = (1.5, 0.5); w = (0.8, 0.2) at τ_p = 1
    scores = torch.log(torch.tensor([[3.0, 1.0]] * 2, dtype=torch.float64)) * 0.4
    likelihood = torch.log(torch.tensor([[0.8, 0.2]] * 2, dtype=torch.float64))
    old = torch.full((2, 2), math.log(0.5), dtype=torch.float64)
    result = bridge_loss(
        scores, old, likelihood, torch.tensor([1.0, -1.0], dtype=torch.float64), everything(2, 2), tau_posterior=1.0
    )
    positive = 0.8 * 1.2 + 0.2 * 0.5  # min(1.5, 1.2), min(0.5, 0.8)
    negative = 0.8 * -1.5 + 0.2 * -0.8  # min(-1.5, -1.2), min(-0.5, -0.8)
    rl, rag = -(positive + negative) / 2, -math.log(0.75 * 0.8 + 0.25 * 0.2)
    assert result.rl_loss.item() == pytest.approx(rl, rel=1e-12)
    assert result.rag_loss.item() == pytest.approx(rag, rel=1e-12)
    assert result.loss.item() == pytest.approx(0.8 * rl + 0.2 * rag, rel=1e-12)  # γ = 0.25
    assert result.metrics["bridge/clip_share"] == 0.5
    assert result.metrics["bridge/ratio_deviation_max"] == pytest.approx(0.5)


def test_equal_likelihoods_leave_only_the_pull_of_rl_towards_uniform_weights():
    scores = torch.tensor([[0.9, 0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    old = retrieval_log_probs(scores.detach(), everything(1, 3))
    likelihood = torch.full((1, 3), -2.5, dtype=torch.float64)
    rag_only = bridge_loss(scores, old, likelihood, torch.zeros(1), everything(1, 3))
    (gradient,) = torch.autograd.grad(rag_only.loss, scores)
    assert gradient.abs().max() < 1e-15
    assert rag_only.rag_loss.item() == pytest.approx(2.5)
    rl = bridge_loss(scores, old, likelihood, torch.ones(1), everything(1, 3), gamma=0.0)
    (gradient,) = torch.autograd.grad(rl.loss, scores)
    torch.testing.assert_close(gradient, (old.exp() - 1 / 3) / 0.4)  # descent lowers p where it exceeds 1/3


def test_before_the_first_update_the_ratio_is_one():
    scores = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    old = retrieval_log_probs(scores, everything(4, 5))
    result = bridge_loss(scores, old, torch.zeros(4, 5), torch.ones(4), everything(4, 5))
    assert result.metrics["bridge/ratio_deviation_max"] == 0
    assert result.rl_loss.item() == pytest.approx(-1.0)


def slow_loss(scores, old, likelihood, advantages, mask, rl_mask, form, clip, gamma, tau_p, tau_l):
    """The formulas of algorithms/README.md, one turn and one document at a time."""
    rl, rag = [], []
    for turn in range(len(scores)):
        documents = [d for d in range(scores.shape[1]) if mask[turn, d]]
        exps = {d: torch.exp(scores[turn, d] / 0.4) for d in documents}
        p = {d: exps[d] / sum(exps.values()) for d in documents}
        raw = {d: math.exp(likelihood[turn, d].item() / tau_p) for d in documents}
        if form == "posterior":
            raw = {d: raw[d] * math.exp(old[turn, d].item()) for d in documents}
        credit = 0.0
        for d in documents:
            ratio = p[d] / math.exp(old[turn, d].item())
            a = advantages[turn].item()
            bounded = min(max(ratio.item(), 1 - clip), 1 + clip) * a
            term = ratio * a if (ratio * a).item() <= bounded or abs(ratio.item() - 1) <= clip else bounded
            credit = credit + raw[d] / sum(raw.values()) * term
        if rl_mask[turn]:
            rl.append(-credit)
        rag.append(-torch.log(sum(p[d] * math.exp(likelihood[turn, d].item() / tau_l) for d in documents)))
    mean_rl = sum(rl) / max(len(rl), 1)
    return (mean_rl + gamma * sum(rag) / len(rag)) / (1 + gamma)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from(["likelihood", "posterior"]),
    clip=st.sampled_from([0.05, 0.2, 0.9]),
    gamma=st.sampled_from([0.0, 0.25, 4.0]),
)
def test_loss_and_gradient_equal_the_slow_reference(seed, form, clip, gamma):
    generator = torch.Generator().manual_seed(seed)
    turns, candidates = 5, 4

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(turns, candidates, generator=generator) < 0.7
    mask[:, 0] = True
    rl_mask = torch.rand(turns, generator=generator) < 0.7
    scores = normal(turns, candidates).tanh()
    old = retrieval_log_probs(scores + 0.2 * normal(turns, candidates), mask)
    likelihood, advantages = normal(turns, candidates) - 2, normal(turns)
    dirty = [value.where(mask, torch.nan).requires_grad_() for value in (scores, old, likelihood)]
    result = bridge_loss(
        *dirty,
        advantages.where(rl_mask, torch.nan),
        mask,
        rl_mask=rl_mask,
        credit_weights=form,
        clip=clip,
        gamma=gamma,
        tau_posterior=0.5,
        tau_likelihood=2.0,
    )
    clean = scores.clone().requires_grad_()
    expected = slow_loss(clean, old, likelihood, advantages, mask, rl_mask, form, clip, gamma, 0.5, 2.0)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    result.loss.backward()
    expected.backward()
    torch.testing.assert_close(dirty[0].grad, clean.grad, rtol=1e-9, atol=1e-12)
    assert dirty[1].grad is None and dirty[2].grad is None  # credit has no gradient
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_padded_candidates_change_nothing():
    generator = torch.Generator().manual_seed(1)
    scores, likelihood = torch.rand(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
    advantages, mask = torch.tensor([1.0, -1.0, 0.0]), everything(3, 4)
    old = retrieval_log_probs(scores, mask)
    plain = bridge_loss(scores, old, likelihood, advantages, mask)
    wide = [torch.cat([value, torch.full((3, 2), fill)], 1) for value, fill in ((scores, 5.0), (old, 0.0))]
    padded_mask = torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], 1)
    padded = bridge_loss(*wide, torch.cat([likelihood, torch.full((3, 2), 99.0)], 1), advantages, padded_mask)
    torch.testing.assert_close(padded.loss, plain.loss)
    assert padded.metrics == pytest.approx(plain.metrics)


def test_parts_of_a_batch_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(6, 3, generator=generator).requires_grad_()
    old = retrieval_log_probs(torch.rand(6, 3, generator=generator), everything(6, 3))
    likelihood, advantages = torch.randn(6, 3, generator=generator), torch.randn(6, generator=generator)
    rl_mask = torch.tensor([True, True, False, True, False, False])

    def part(rows, **counts):
        return bridge_loss(
            scores[rows], old[rows], likelihood[rows], advantages[rows], everything(6, 3)[rows], rl_mask=rl_mask[rows],
            **counts,
        ).loss  # fmt: skip

    whole = part(slice(None))
    parts = part(slice(0, 4), turn_count=6, rl_turn_count=3) + part(slice(4, 6), turn_count=6, rl_turn_count=3)
    torch.testing.assert_close(parts, whole)
    first, second = (torch.autograd.grad(loss, scores)[0] for loss in (whole, parts))
    torch.testing.assert_close(second, first)


def test_a_turn_left_out_of_rl_stays_in_the_rag_loss():
    scores = torch.tensor([[0.5, 0.1]], requires_grad=True)
    old = retrieval_log_probs(scores.detach(), everything(1, 2))
    likelihood = torch.tensor([[-1.0, -4.0]])
    result = bridge_loss(scores, old, likelihood, torch.tensor([1.0]), everything(1, 2), rl_mask=torch.tensor([False]))
    assert result.rl_loss.item() == 0
    result.loss.backward()
    assert scores.grad[0, 0] < 0 < scores.grad[0, 1]  # descent favours the document that explains the answer
    assert result.metrics["bridge/rl_turns"] == 0


def test_rag_separates_documents_where_the_advantage_is_zero():
    scores = torch.zeros(1, 2, requires_grad=True)
    old = retrieval_log_probs(scores.detach(), everything(1, 2))
    bridge_loss(scores, old, torch.tensor([[-1.0, -3.0]]), torch.zeros(1), everything(1, 2)).loss.backward()
    # ∂L_RAG/∂s = (p - posterior)/τ_r, posterior = .8808; weight γ/(1+γ) = .2
    assert scores.grad[0].tolist() == pytest.approx([0.2 * (0.5 - 0.8808) / 0.4, 0.2 * (0.8808 - 0.5) / 0.4], abs=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_values_stay_finite(sign):
    scores = torch.tensor([[80.0, -80.0]], requires_grad=True)
    old = torch.tensor([[-400.0, 0.0]])
    result = bridge_loss(
        scores, old, torch.tensor([[-1000.0, -2000.0]]), torch.tensor([sign]), everything(1, 2), tau_posterior=0.01
    )
    result.loss.backward()
    assert math.isfinite(result.loss.item())
    assert scores.grad.isfinite().all()
    assert result.rag_loss.item() == pytest.approx(1000.0)


def test_half_precision_scores_are_computed_in_full():
    scores = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    assert retrieval_log_probs(scores, everything(1, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau_retrieval": 0.0}, "bridge.tau_retrieval=0.0 must be a positive number"),
        ({"tau_posterior": -1.0}, "bridge.tau_posterior=-1.0"),
        ({"tau_likelihood": math.nan}, "bridge.tau_likelihood=nan"),
        ({"clip": 1.0}, r"bridge.clip=1.0 must lie in \(0, 1\)"),
        ({"gamma": -0.1}, "bridge.gamma=-0.1"),
        ({"credit_weights": "hit"}, "bridge.credit_weights='hit' is not one of 'likelihood', 'posterior'"),
        ({"candidate_mask": torch.tensor([[True, True], [False, False]])}, "retrieval turn 1 has no candidates"),
        ({"scores": torch.tensor([[0.1, math.nan], [0.1, 0.2]])}, "scores: turn 0 holds nan; leave the turn out"),
        ({"old_log_probs": torch.full((2, 2), -math.inf)}, "old_log_probs: turn 0 holds -inf"),
        ({"answer_log_likelihood": torch.full((2, 2), math.nan)}, "answer_log_likelihood: turn 0 holds nan"),
        ({"advantages": torch.tensor([0.0, math.inf])}, "advantages: turn 1 holds inf; leave the turn out"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = dict(
        scores=torch.zeros(2, 2),
        old_log_probs=torch.full((2, 2), math.log(0.5)),
        answer_log_likelihood=torch.zeros(2, 2),
        advantages=torch.zeros(2),
        candidate_mask=everything(2, 2),
    )
    with pytest.raises(ValueError, match=message):
        bridge_loss(**(arguments | changes))


def test_a_batch_without_retrieval_turns_costs_nothing():
    scores = torch.zeros(0, 3, requires_grad=True)
    result = bridge_loss(scores, torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0), everything(0, 3))
    assert result.loss.item() == 0
    result.loss.backward()
    assert result.metrics["bridge/turns"] == 0


def test_audit_metrics_by_hand():
    scores = torch.log(torch.tensor([[3.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]])) * 0.4
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    likelihood = torch.log(torch.tensor([[0.9, 0.1, 0.5], [0.25, 0.25, 0.5], [0.3, 0.1, 0.1]]))
    result = bridge_loss(
        scores,
        retrieval_log_probs(scores, mask),
        likelihood,
        torch.tensor([0.0, 1.0, 0.0]),
        mask,
        tau_posterior=1.0,
        hit_mask=torch.tensor([[False, True, True], [True, False, True], [False, True, True]]),
    )
    metrics = result.metrics
    assert metrics["bridge/zero_advantage_share"] == pytest.approx(2 / 3)
    assert metrics["bridge/credit_weight_max"] == pytest.approx((0.9 + 0.5 + 1) / 3)
    assert metrics["bridge/retrieval_prob_max"] == pytest.approx((0.75 + 0.5 + 1) / 3)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + 1.5 * math.log(2)
    assert metrics["bridge/retrieval_entropy"] == pytest.approx(entropy / 3)
    assert metrics["bridge/hit_in_candidates"] == pytest.approx(2 / 3)
    assert metrics["bridge/hit_credit_weight"] == pytest.approx((0.1 + 0.75) / 2)
    assert metrics["bridge/loss_rl"] == pytest.approx(result.rl_loss.item())
    assert metrics["bridge/loss_rag"] == pytest.approx(result.rag_loss.item())


def test_outcomes_standardise_as_verls_grpo():
    groups = torch.tensor([3, 8, 3, 8, 3, 3])
    outcome = standardised_outcome(torch.tensor([1.0, 5.0, 0.0, 7.0, 0.0, 0.0]), groups)
    root = 0.5**0.5
    assert outcome.tolist() == pytest.approx([1.5, -root, -0.5, root, -0.5, -0.5], abs=1e-5)


def test_equal_outcomes_give_exactly_zero():
    rewards = torch.full((3,), 0.1, dtype=torch.float64)  # (0.1 + 0.1 + 0.1)/3 is not 0.1
    assert standardised_outcome(rewards, torch.zeros(3, dtype=torch.int64)).tolist() == [0.0] * 3
    assert standardised_outcome(rewards, torch.arange(3)).tolist() == [0.0] * 3


def test_groups_of_one_are_standardised_over_the_batch():
    outcome = standardised_outcome(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.arange(4))
    assert outcome.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_padding_rows_do_not_count_in_outcomes():
    rewards, groups = torch.tensor([1.0, 0.0, math.nan]), torch.zeros(3, dtype=torch.int64)
    outcome = standardised_outcome(rewards, groups, row_mask=torch.tensor([True, True, False]))
    assert outcome.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0], abs=1e-5)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.2, 0.8, 1.0])), min_size=1), st.randoms())
@settings(deadline=None)
def test_outcomes_follow_uids_and_not_positions(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    groups, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
    torch.testing.assert_close(
        standardised_outcome(rewards[order], groups[order]), standardised_outcome(rewards, groups)[order]
    )
