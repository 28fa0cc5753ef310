"""The estimators on problems solved by hand, and their solver."""

import pytest
import torch

from verl_bridge.algorithms.estimators import ESTIMATORS, hypergradient, minimise, policy_gradient, policy_loss

THETA = torch.tensor([0.7, -1.3], dtype=torch.float64)


def upper(theta, eta):
    """F = ½‖η - 1‖² + θ·η, so that ∇_ηF = η - 1 + θ and ∇_θF = η."""
    return 0.5 * (eta - 1).square().sum() + theta @ eta


def lower(theta, eta):
    """G = ½‖η - 2θ‖²: η* = 2θ, and η_γ = (1 - θ + 2γθ)/(1 + γ)."""
    return 0.5 * (eta - 2 * theta).square().sum()


def solutions(gamma):
    return (1 - THETA + 2 * gamma * THETA) / (1 + gamma), 2 * THETA


def test_the_exact_gradient_of_a_quadratic():
    """F(θ, 2θ) = ½‖2θ - 1‖² + 2‖θ‖²: gradient 2(2θ - 1) + 4θ = 8θ - 2, of which ∇_θF = 2θ is direct."""
    exact, implicit = hypergradient(upper, lower, THETA, solutions(1.0)[1])
    torch.testing.assert_close(exact, 8 * THETA - 2, rtol=0, atol=1e-14)
    torch.testing.assert_close(implicit, 6 * THETA - 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("gamma", [0.25, 1.0, 8.0])
def test_the_estimators_of_a_quadratic(gamma):
    """∇_θG = -2(η - 2θ) is 0 at η*; η_γ - 2θ = (1 - 3θ)/(1 + γ)."""
    penalised, lowest = solutions(gamma)
    expected = {
        "bridge": penalised,
        "drop": 2 * THETA,
        "two_state": penalised - 2 * gamma * (1 - 3 * THETA) / (1 + gamma),
    }
    for name in ESTIMATORS:
        found = policy_gradient(name, upper, lower, THETA, penalised, lowest, gamma)
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-13)


def test_bridge_needs_no_second_state_and_drop_no_penalised_one():
    nan = torch.full_like(THETA, torch.nan)
    penalised, lowest = solutions(1.0)
    assert policy_gradient("bridge", upper, lower, THETA, penalised, nan, 1.0).isfinite().all()
    assert policy_gradient("drop", upper, lower, THETA, nan, lowest, 1.0).isfinite().all()
    assert policy_gradient("two_state", upper, lower, THETA, penalised, nan, 1.0).isnan().any()


def test_no_gradient_reaches_the_retriever():
    eta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    theta = THETA.clone().requires_grad_()
    for name in ESTIMATORS:
        loss = policy_loss(name, upper, lower, theta, eta, eta, 1.0)
        assert torch.autograd.grad(loss, eta, allow_unused=True) == (None,)


@pytest.mark.parametrize("gamma", [0.0, -1.0, float("nan"), float("inf")])
def test_gamma_must_be_positive(gamma):
    with pytest.raises(ValueError, match=r"gamma=.* must be a positive number"):
        policy_loss("bridge", upper, lower, THETA, THETA, THETA, gamma)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="estimator='both' is not one of 'bridge', 'two_state', 'drop'"):
        policy_loss("both", upper, lower, THETA, THETA, THETA, 1.0)


def test_the_hypergradient_refuses_a_flat_lower_problem():
    with pytest.raises(ValueError, match="not strictly convex"):
        hypergradient(upper, lambda theta, eta: (eta.sum() - theta.sum()) ** 2, THETA, THETA)


def test_newton_solves_a_quadratic_in_a_step_and_finds_the_valley_from_a_hill():
    matrix = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    found = minimise(lambda x: 0.5 * x @ matrix @ x - x.sum(), torch.zeros(2, dtype=torch.float64), max_steps=2)
    torch.testing.assert_close(matrix @ found, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)

    # (x² - 1)²: negative curvature between the inflections; plain Newton from 0.1 would climb to 0
    for start, valley in ((0.1, 1.0), (-0.1, -1.0), (30.0, 1.0)):
        found = minimise(lambda x: ((x**2 - 1) ** 2).sum(), torch.tensor([start], dtype=torch.float64))
        assert abs(float(found) - valley) < 1e-12


def test_newton_says_when_there_is_no_minimum():
    with pytest.raises(RuntimeError, match="not a minimum: the least curvature"):
        minimise(lambda x: -x.square().sum(), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="stopped at a gradient of norm"):
        minimise(lambda x: x.sum(), torch.zeros(1, dtype=torch.float64), max_steps=20)
