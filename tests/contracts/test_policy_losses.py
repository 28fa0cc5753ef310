"""What verl's policy losses make of GCA's advantages: residuals reach the gradient, and who left has none."""

from __future__ import annotations

import inspect
import os
import re

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")

from verl.trainer.ppo import core_algos
from verl.workers.config import FSDPActorConfig

from verl_bridge.algorithms.gca import grounded_advantages
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.integrations.checks import UNFIT_LOSSES

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ROWS, LENGTH = 6, 10


def case():
    """Log-probs before and after some updates, ratios on both sides of the clip; rows of different length."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    mask[1, 7:] = mask[4, 3:] = 0
    log_probs = -torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    old = log_probs + 0.15 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    old[5] = log_probs[5] + 0.5  # a whole rollout beyond the clip, which GSPO looks at
    advantages = torch.tensor([1.0, 1, -1, -1, 0.5, -0.5], dtype=torch.float64)[:, None] * mask
    return old, log_probs, advantages, mask


def gradient(loss, old, log_probs, advantages, mask, mode="token-mean"):
    """Of the loss with respect to each token's log-prob, ``(rows, length)``."""
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
    object.__setattr__(config, "global_batch_info", {})
    torch.manual_seed(1)  # clip_cov and kl_cov choose tokens at random
    log_probs = log_probs.clone().requires_grad_(True)
    core_algos.get_policy_loss_fn(loss)(
        old_log_prob=old,
        log_prob=log_probs,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
    )[0].backward()
    return log_probs.grad


def factors(loss):
    """The gradient with a residual over the one without, and 1 + δ, where the gradient is not 0."""
    old, log_probs, advantages, mask = case()
    delta = 0.1 * (2 * torch.rand(mask.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 1)
    plain = gradient(loss, old, log_probs, advantages, mask)
    grounded = gradient(loss, old, log_probs, advantages * (1 + delta), mask)
    assert torch.equal(plain != 0, grounded != 0)  # no token changes its clipping branch
    there = plain != 0
    return (grounded / plain)[there], (1 + delta)[there], there & mask.bool(), mask


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_tokens_gradient_is_scaled_by_exactly_one_plus_its_residual(loss):
    found, expected, there, mask = factors(loss)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert 0 < there.sum() < mask.sum()  # some are clipped, whose gradient stays 0


@pytest.mark.parametrize("loss", ["geo_mean", "kl_cov"])
def test_losses_that_average_or_branch_on_advantages_lose_the_residual(loss):
    found, expected, _, _ = factors(loss)
    assert loss in UNFIT_LOSSES and (found - expected).abs().max() > 1e-3


def test_all_aggregations_of_verls_are_tested():
    source = inspect.getsource(core_algos.agg_loss)
    branches = re.findall(r"loss_agg_mode (?:==|in) (.*):", source)
    assert {name for branch in branches for name in re.findall(r'"([^"]+)"', branch)} == set(MODES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_rollout_that_left_has_no_gradient_and_changes_nobody_elses(loss, mode):
    """Its tokens stay in the mask, and so in every denominator."""
    old, log_probs, advantages, mask = case()
    types = torch.full((ROWS,), int(RolloutType.C), dtype=torch.int8)
    types[1] = RolloutType.D_NOT_RETRIEVABLE
    grounded = grounded_advantages(
        advantages,
        mask,
        torch.ones(mask.shape, dtype=torch.int8),
        types,
        torch.zeros(ROWS, dtype=torch.int64),
        (advantages[:, 0] > 0).double(),
        group_relative=True,
    ).advantages
    others = torch.arange(ROWS) != 1
    assert torch.equal(grounded[others], advantages[others])  # type C has no residual
    plain, left = (gradient(loss, old, log_probs, each, mask, mode) for each in (advantages, grounded))
    assert plain[1].abs().max() > 0 and not left[1].any()
    assert torch.equal(left[others], plain[others])
    ratio = (log_probs - old).exp()
    for row in range(ROWS):
        one = torch.zeros(ROWS, 1, dtype=torch.float64)
        one[row] = 1
        before, after = (core_algos.agg_loss(-each * ratio * one, mask, mode) for each in (advantages, grounded))
        assert (after == 0 and before != 0) if row == 1 else torch.equal(after, before)
