"""Gradients of both of BRIDGE's losses in float64: derived by hand, and by finite differences."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_bridge.algorithms.bridge import answer_posterior, bridge_loss, document_weights, retrieval_log_probs

TAU = 0.4


def random_turns(seed, turns=4, candidates=5):
    """Scores, log p_old near their log p, likelihoods, advantages and a mask, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(turns, candidates, generator=generator) < 0.8
    mask[:, :2] = True
    scores = normal(turns, candidates).tanh()
    old = retrieval_log_probs(scores + 0.1 * normal(turns, candidates), mask, TAU)
    return scores, old, normal(turns, candidates) - 2, normal(turns), mask


def gradients(scores, *rest, **changes):
    """Of L_RL and of L_RAG in the scores."""
    scores = scores.clone().requires_grad_()
    result = bridge_loss(scores, *rest, **changes)
    (rl,) = torch.autograd.grad(result.rl_loss, scores, retain_graph=True)
    (rag,) = torch.autograd.grad(result.rag_loss, scores, retain_graph=True)
    (loss,) = torch.autograd.grad(result.loss, scores)
    return rl, rag, loss


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), form=st.sampled_from(["likelihood", "posterior"]))
def test_both_gradients_equal_the_derivations(seed, form):
    """∂L_RAG/∂s_e = (p_e - post_e)/(τ_r·T). ∂L_RL/∂s_e = -A/(τ_r·T)·(w_e·r_e·on_e - p_e·Σ_d w_d·r_d·on_d), on_d telling
    where the unclipped branch is the smaller one."""
    scores, old, likelihood, advantages, mask = random_turns(seed)
    rl, rag, loss = gradients(scores, old, likelihood, advantages, mask, tau_likelihood=1.7, credit_weights=form)
    p = retrieval_log_probs(scores, mask, TAU).exp()
    posterior = answer_posterior(retrieval_log_probs(scores, mask, TAU), likelihood, mask, 1.7)
    torch.testing.assert_close(rag, (p - posterior) / TAU / 4, rtol=1e-9, atol=1e-12)
    weight = document_weights(likelihood, old, mask, form=form)
    ratio = torch.where(mask, p / old.exp(), 0.0)
    advantage = advantages.unsqueeze(-1)
    on = torch.where(advantage > 0, ratio < 1.2, ratio > 0.8)
    pull = weight * ratio * on
    expected = -advantage / TAU / 4 * (pull - p * pull.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(rl, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss, 0.8 * rl + 0.2 * rag, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    weights=st.sampled_from([(1.0, 0.25), (0.0, 1.0), (1.0, 0.0), (2.0, 3.0), (0.0, 0.5)]),
)
def test_the_loss_has_the_slope_of_finite_differences(seed, weights):
    rl_weight, gamma = weights
    scores, old, likelihood, advantages, mask = random_turns(seed, turns=2, candidates=3)

    def loss(scores):
        return bridge_loss(scores, old, likelihood, advantages, mask, rl_weight=rl_weight, gamma=gamma).loss

    _, _, slope = gradients(scores, old, likelihood, advantages, mask, rl_weight=rl_weight, gamma=gamma)
    ratio = torch.where(mask, (retrieval_log_probs(scores, mask, TAU) - old).exp(), 1.0)
    step = 1e-6
    # at the kink of the clip there is no slope to compare with
    assume(min((ratio - 0.8).abs().min(), (ratio - 1.2).abs().min()) > 1e-4)
    for turn in range(2):
        for d in range(3):
            shift = torch.zeros_like(scores)
            shift[turn, d] = step
            numeric = (loss(scores + shift) - loss(scores - shift)) / (2 * step)
            assert slope[turn, d].item() == pytest.approx(numeric.item(), abs=1e-7)


def test_weights_of_the_two_parts():
    scores, old, likelihood, advantages, mask = random_turns(3)
    arguments = (scores, old, likelihood, advantages, mask)
    both = bridge_loss(*arguments)
    rl, rag = both.rl_loss.item(), both.rag_loss.item()
    assert bridge_loss(*arguments, rl_weight=0.0, gamma=7.0).loss.item() == pytest.approx(rag, rel=1e-12)
    assert bridge_loss(*arguments, gamma=0.0).loss.item() == pytest.approx(rl, rel=1e-12)
    assert bridge_loss(*arguments, rl_weight=2.0, gamma=6.0).loss.item() == pytest.approx(0.25 * rl + 0.75 * rag)
    for rl_weight, gamma in ((-0.1, 1.0), (0.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="rl_weight="):
            bridge_loss(*arguments, rl_weight=rl_weight, gamma=gamma)


def test_zero_advantages_leave_the_rag_gradient_alone():
    scores, old, likelihood, advantages, mask = random_turns(5)
    rl, rag, loss = gradients(scores, old, likelihood, torch.zeros_like(advantages), mask)
    assert rl.abs().max() == 0 and rag.abs().max() > 1e-3
    torch.testing.assert_close(loss, 0.2 * rag)


def test_one_candidate_teaches_nothing():
    scores = torch.tensor([[0.3]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = gradients(scores, torch.zeros_like(scores), scores - 2, torch.ones(1, dtype=torch.float64), mask)
    assert all(gradient.abs().max() == 0 for gradient in result)


def test_duplicate_candidates_share_what_one_would_get():
    """A document that is listed twice: p, credit and posterior of the two add up to that of one with twice the mass."""
    scores = torch.tensor([[0.5, 0.5, 0.1]], dtype=torch.float64)
    likelihood = torch.tensor([[-1.0, -1.0, -3.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = retrieval_log_probs(scores, mask, TAU)
    advantage = torch.tensor([1.5], dtype=torch.float64)
    rl, rag, _ = gradients(scores, old, likelihood, advantage, mask)
    assert rl[0, 0] == rl[0, 1] and rag[0, 0] == rag[0, 1]
    # by hand for the pair and the other one, p = (2a, b)/(2a + b)
    a, b = math.exp(0.5 / TAU), math.exp(0.1 / TAU)
    p = 2 * a / (2 * a + b)
    posterior = 2 * a * math.exp(-1) / (2 * a * math.exp(-1) + b * math.exp(-3))
    weight = 2 * math.exp(-2) / (2 * math.exp(-2) + math.exp(-6))
    assert (rag[0, 0] + rag[0, 1]).item() == pytest.approx((p - posterior) / TAU)
    assert (rl[0, 0] + rl[0, 1]).item() == pytest.approx(-1.5 * (weight - p) / TAU)
    assert rl.sum().abs() < 1e-15 and rag.sum().abs() < 1e-15  # a turn's gradients always cancel


def test_tied_scores_and_likelihoods_pull_nowhere():
    scores = torch.full((1, 4), 0.25, dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    likelihood = torch.full((1, 4), -2.0, dtype=torch.float64)
    old = retrieval_log_probs(scores, mask, TAU)
    result = gradients(scores, old, likelihood, torch.ones(1, dtype=torch.float64), mask)
    assert all(gradient.abs().max() < 1e-15 for gradient in result)


def test_equal_likelihoods_give_the_rag_loss_no_gradient_wherever_the_scores_are():
    scores, old, _, advantages, mask = random_turns(9)
    _, rag, _ = gradients(scores, old, torch.full_like(scores, -4.0), advantages, mask)
    assert rag.abs().max() < 1e-15


def test_the_posterior_by_hand_and_as_the_slope_of_the_rag_loss():
    log_probs = torch.log(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    likelihood = torch.log(torch.tensor([[0.1, 0.4, 9.0]], dtype=torch.float64))
    mask = torch.tensor([[True, True, False]])
    shares = answer_posterior(log_probs, likelihood, mask)[0].tolist()
    assert shares == pytest.approx([0.05 / 0.17, 0.12 / 0.17, 0.0])
    warm = answer_posterior(log_probs, likelihood, mask, tau_likelihood=2.0)[0, 0].item()
    assert warm == pytest.approx(0.5 * 0.1**0.5 / (0.5 * 0.1**0.5 + 0.3 * 0.4**0.5))
    # -∂ log Σ p·exp(ℓ/τ) / ∂ℓ = -post/τ: what the policy's gradient of G hangs on
    scores, _, likelihood, _, mask = random_turns(11)
    log_probs = retrieval_log_probs(scores, mask, TAU)
    likelihood = likelihood.requires_grad_()
    terms = torch.logsumexp(log_probs + (likelihood / 1.3).masked_fill(~mask, 0.0), dim=-1)
    (slope,) = torch.autograd.grad(-terms.sum(), likelihood)
    posterior = answer_posterior(log_probs, likelihood, mask, 1.3)
    assert not posterior.requires_grad
    torch.testing.assert_close(slope, -posterior / 1.3, rtol=1e-10, atol=1e-12)


def test_a_posterior_of_bad_input_is_refused():
    ones = torch.ones(1, 2, dtype=torch.bool)
    good = torch.zeros(1, 2)
    for arguments, message in (
        ((good, good, ones, 0.0), r"bridge\.tau_likelihood=0\.0"),
        ((good, good, ~ones), "retrieval turn 0 has no candidates"),
        ((good - math.inf, good, ones), "log_probs: turn 0 holds -inf"),
        ((good, good * math.nan, ones), "answer_log_likelihood: turn 0 holds nan"),
    ):
        with pytest.raises(ValueError, match=message):
            answer_posterior(*arguments)
