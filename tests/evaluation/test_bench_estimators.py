"""The toy whose exact gradient is known: checked by differences, by brute force and by the code that trains."""

from xml.etree import ElementTree

import pytest
import torch

from verl_bridge.algorithms.bridge import bridge_loss
from verl_bridge.algorithms.estimators import hypergradient, minimise, policy_gradient
from verl_bridge.evaluation.bench_estimators import (
    GAMMAS,
    TAU_RETRIEVAL,
    curvature_bound,
    make_toy,
    measure_estimators,
    measure_toy,
    plot,
    solve_lower,
    solve_penalised,
)

SEEDS = (0, 3)


@pytest.fixture(scope="module")
def report():
    return measure_estimators(gammas=GAMMAS, seeds=4, disagreements=(0.0, 1.0))


def random_points(toy, count=3, scale=3.0):
    generator = torch.Generator().manual_seed(9)
    size = (count, len(toy.base()))
    return scale * torch.randn(size, generator=generator, dtype=torch.float64)


def differences(function, point, step=1e-4):
    """Central finite differences along every axis."""
    axes = step * torch.eye(len(point), dtype=point.dtype)
    return torch.stack([(function(point + axis) - function(point - axis)) / (2 * step) for axis in axes])


def test_the_objectives_are_what_enumeration_says():
    toy = make_toy(5, disagreement=0.3)
    eta = random_points(toy, 1, 0.5)[0]
    matrix = torch.eye(4, dtype=torch.float64) + TAU_RETRIEVAL * eta.view(4, 4)
    weights = toy.theta.view(4, 6)
    reward = evidence = 0.0
    for q in range(4):
        scores = [float(toy.query_vectors[q] @ matrix @ e) / TAU_RETRIEVAL for e in toy.document_vectors]
        retrieval = torch.tensor(scores, dtype=torch.float64).exp()
        retrieval = retrieval / retrieval.sum()
        likelihood = 0.0
        for d in range(6):
            answers = (toy.readings[q, d] + weights @ toy.features[q, d]).exp()
            answers = answers / answers.sum()
            likelihood += float(retrieval[d] * answers[toy.gold[q]])
            reward += sum(float(retrieval[d] * answers[a] * toy.rewards[q, a]) for a in range(4)) / 4
        evidence += torch.tensor(likelihood).log().item() / 4
    assert float(toy.upper(toy.theta, eta)) == pytest.approx(-reward, abs=1e-12)
    assert float(toy.rag(toy.theta, eta)) == pytest.approx(-evidence, abs=1e-6)
    assert float(toy.lower(toy.theta, eta) - toy.rag(toy.theta, eta)) == pytest.approx(
        toy.ridge / 2 * float(eta @ eta), abs=1e-12
    )
    assert torch.equal(toy.rewards.sum(dim=-1), torch.ones(4, dtype=torch.float64))
    assert torch.equal(toy.rewards.gather(1, toy.gold[:, None]), torch.full((4, 1), 0.7, dtype=torch.float64))
    assert bool((toy.readings.gather(2, toy.gold[:, None, None].expand(4, 6, 1)) > 0).any(dim=1).all())


def test_the_losses_that_train_are_those_of_the_toy():
    """L_RAG is the toy's. L_RL with posterior weights, τ_p = 1 and A the expected reward has F's gradient in η."""
    toy = make_toy(2)
    eta = random_points(toy, 1, 0.3)[0].requires_grad_()
    log_probs = toy.retrieval(eta)
    likelihood = toy.likelihood(toy.theta)
    for question in range(4):
        row = slice(question, question + 1)
        expected = (log_probs[row].exp() * likelihood[row].exp()).sum().detach()
        loss = bridge_loss(
            scores=log_probs[row] * TAU_RETRIEVAL,
            old_log_probs=log_probs[row],
            answer_log_likelihood=likelihood[row],
            advantages=expected[None],
            candidate_mask=torch.ones(1, 6, dtype=torch.bool),
            tau_retrieval=TAU_RETRIEVAL,
            tau_posterior=1.0,
            gamma=0.0,
            credit_weights="posterior",
        )
        reward = -(log_probs[row].exp() * likelihood[row].exp()).sum()
        ours, theirs = (torch.autograd.grad(value, eta, retain_graph=True)[0] for value in (reward, loss.loss))
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)
        rag = -torch.logsumexp(log_probs[row] + likelihood[row], dim=-1).sum()
        assert float(loss.rag_loss) == pytest.approx(float(rag.detach()), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_the_objectives_agree_with_differences(seed):
    toy = make_toy(seed, disagreement=0.5)
    eta = random_points(toy, 1, 0.5)[0]
    for objective in (toy.upper, toy.lower):
        in_theta, in_eta = torch.func.grad(objective, argnums=(0, 1))(toy.theta, eta)
        torch.testing.assert_close(
            differences(lambda t, f=objective: f(t, eta), toy.theta), in_theta, rtol=0, atol=1e-8
        )
        torch.testing.assert_close(differences(lambda e, f=objective: f(toy.theta, e), eta), in_eta, rtol=0, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lower_problem_is_strongly_convex_and_its_solution_unique(seed):
    toy = make_toy(seed)
    bound = curvature_bound(toy.query_vectors, toy.document_vectors)
    assert toy.ridge == pytest.approx(1.1 * bound)
    for eta in random_points(toy):
        least = torch.linalg.eigvalsh(torch.func.hessian(toy.rag, argnums=1)(toy.theta, eta))[0]
        assert float(least) >= -bound
    lowest = solve_lower(toy, toy.theta)
    assert float(torch.func.grad(toy.lower, argnums=1)(toy.theta, lowest).norm()) < 1e-12
    for start in random_points(toy):
        found = minimise(lambda eta: toy.lower(toy.theta, eta), start)
        torch.testing.assert_close(found, lowest, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_exact_gradient_agrees_with_differences_through_the_solved_problem(seed):
    toy = make_toy(seed)
    exact, implicit = hypergradient(toy.upper, toy.lower, toy.theta, solve_lower(toy, toy.theta))
    solved = differences(lambda theta: toy.upper(theta, solve_lower(toy, theta)), toy.theta)
    assert float((solved - exact).norm() / exact.norm()) < 1e-6
    assert float((solved - (exact - implicit)).norm() / exact.norm()) > 1e-2  # the check sees the part through η*


@pytest.mark.parametrize("gamma", [0.25, 8.0])
def test_two_state_is_the_gradient_of_the_penalised_problem(gamma):
    """min_η (F + γG) - γ·min_η G, each minimum solved again at every θ."""
    toy = make_toy(1)
    lowest = solve_lower(toy, toy.theta)
    penalised = solve_penalised(toy, toy.theta, gamma, lowest)

    def value(theta):
        low, high = solve_lower(toy, theta), solve_penalised(toy, theta, gamma, penalised)
        return toy.upper(theta, high) + gamma * (toy.lower(theta, high) - toy.lower(theta, low))

    found = policy_gradient("two_state", toy.upper, toy.lower, toy.theta, penalised, lowest, gamma)
    torch.testing.assert_close(differences(value, toy.theta), found, rtol=0, atol=1e-8)


def test_the_penalised_solution_minimises_the_sum():
    toy = make_toy(4)
    for gamma in (0.05, 1.0, 256.0):
        found = solve_penalised(toy, toy.theta, gamma, solve_lower(toy, toy.theta))
        in_eta = torch.func.grad(lambda eta, g=gamma: toy.upper(toy.theta, eta) + g * toy.lower(toy.theta, eta))(found)
        assert float(in_eta.norm()) < 1e-12 * (1 + gamma)


def test_two_states_error_falls_like_one_over_gamma(report):
    for figures in (report, *report["other_rewards"]):
        least, greatest = figures["two_state_slope"]
        assert -1.15 < least <= greatest < -0.85
        assert figures["relative_error"]["two_state"][-1] < 1e-3
        assert figures["finite_difference_error"] < 1e-6


def test_bridge_becomes_drop_and_keeps_the_error_of_what_both_leave_out(report):
    errors = report["relative_error"]
    assert errors["bridge"][-1] == pytest.approx(errors["drop"][-1], rel=0.01)
    assert errors["drop"] == pytest.approx([report["left_out_share"]] * len(GAMMAS), rel=1e-9)
    assert report["left_out_share"] > 0.05  # not small here: what is compared differs

    # the distance of the two falls like 1/γ too
    gradients = measure_toy(make_toy(0), (64.0, 128.0, 256.0))["gradients"]
    gaps = (gradients["bridge"] - gradients["drop"]).norm(dim=-1)
    assert (gaps[:-1] / gaps[1:]).tolist() == pytest.approx([2.0, 2.0], rel=0.05)


def test_where_the_papers_claim_holds_and_where_not(report):
    """Measured against two_state it holds for every γ when reward and likelihood agree; against the exact gradient not
    at small γ, and not when the reward is for another answer."""
    assert report["against_two_state"]["bridge_nearer_than_drop"] == [1.0] * len(GAMMAS)
    cosine = report["against_two_state"]["cosine"]
    assert all(bridge > drop for bridge, drop in zip(cosine["bridge"], cosine["drop"], strict=True))
    nearer = dict(zip(GAMMAS, report["bridge_nearer_than_drop"], strict=True))
    assert all(nearer[gamma] == 1.0 for gamma in GAMMAS if gamma >= 1)
    assert nearer[0.05] == nearer[0.1] == 0.0
    assert max(report["other_rewards"][0]["bridge_nearer_than_drop"]) <= 0.5


def test_the_report_holds_means_and_spreads_of_its_seeds(report):
    alone = [measure_toy(make_toy(seed), (0.25, 1.0, 4.0, 16.0)) for seed in (0, 1)]
    small = measure_estimators(gammas=(0.25, 1, 4, 16), seeds=2, disagreements=(0.0,))
    exact = [toy["exact"] for toy in alone]
    errors = [float((t["gradients"]["bridge"][1] - e).norm() / e.norm()) for t, e in zip(alone, exact, strict=True)]
    assert small["relative_error"]["bridge"][1] == pytest.approx(sum(errors) / 2)
    assert small["relative_error_spread"]["bridge"][1] == pytest.approx(abs(errors[0] - errors[1]) / 2**0.5)
    cosines = [
        float(t["gradients"]["drop"][0] @ e / t["gradients"]["drop"][0].norm() / e.norm())
        for t, e in zip(alone, exact, strict=True)
    ]
    assert small["cosine"]["drop"][0] == pytest.approx(sum(cosines) / 2)
    assert small == measure_estimators(gammas=(0.25, 1, 4, 16), seeds=2, disagreements=(0.0,))
    assert small != measure_estimators(gammas=(0.25, 1, 4, 16), seeds=2, disagreements=(0.0,), first_seed=7)
    assert small["other_rewards"] == [] and report["other_rewards"][0]["disagreement"] == 1.0


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"ridge=1.0 be above 1"):
        make_toy(0, ridge=1.0)
    with pytest.raises(ValueError, match=r"disagreement=1.5 must lie in"):
        make_toy(0, disagreement=1.5)
    for gammas in ((1, 2, 3), (0, 1, 2, 3), (1, 2, 2, 3)):
        with pytest.raises(ValueError, match="must be four or more positive numbers, rising"):
            measure_estimators(gammas=gammas)
    with pytest.raises(ValueError, match="seeds=1 must be 2 or more"):
        measure_estimators(seeds=1)


def test_the_plot_draws_every_curve_where_its_numbers_are(report, tmp_path):
    path = tmp_path / "new" / "estimators.svg"
    plot(report, path)
    lines = [e for e in ElementTree.parse(path).getroot() if e.tag.endswith("polyline")]
    assert len(lines) == 2 * (3 + 3 + 2 + 2)  # rewards × (cosine and error to exact; to two_state)
    # the first panel's curves: a larger cosine is drawn higher, and γ runs from the left edge to the right one
    points = [tuple(map(float, p.split(","))) for p in lines[0].get("points").split()]
    bridge = report["cosine"]["bridge"]
    assert [x for x, _ in points] == sorted(x for x, _ in points) and len(points) == len(GAMMAS)
    assert (points[0][0], points[-1][0]) == (60.0, 290.0)
    assert (points[0][1] > points[-1][1]) == (bridge[0] < bridge[-1])
    with pytest.raises(ValueError, match=r"give a name that ends in .svg"):
        plot(report, tmp_path / "estimators.png")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
