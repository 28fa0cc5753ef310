"""verl's GRPO, as the benchmarks compare with it."""

import pytest
import torch

from verl_bridge.algorithms.bridge import standardised_outcome
from verl_bridge.evaluation.bench_credit import synthetic_rollouts
from verl_bridge.integrations.verl.reference_advantage import grpo_advantages


def test_verls_estimator_standardises_over_the_group():
    # scores 1, 0, 0, 0: (1 - 1/4)/0.5 and -1/4/0.5
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]])
    advantages = grpo_advantages(rewards, mask, ["x"] * 4)
    assert advantages[0].tolist() == pytest.approx([1.5, 1.5], rel=1e-5)
    assert advantages[1:].tolist() == [pytest.approx([-0.5 * m for m in row], rel=1e-5) for row in mask[1:].tolist()]
    batch = synthetic_rollouts(40, 100)
    expected = standardised_outcome(batch.rewards, batch.group_index)[:, None] * batch.response_mask
    given = grpo_advantages(batch.token_level_rewards, batch.response_mask, batch.uids)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
