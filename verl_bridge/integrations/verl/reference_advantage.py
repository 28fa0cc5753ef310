"""verl's own GRPO estimator, to measure and to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage


def grpo_advantages(token_level_rewards: Tensor, response_mask: Tensor, uids: Sequence[str]) -> Tensor:
    """Advantages ``(batch, response)`` as verl's trainer gets them with ``adv_estimator: grpo``.

    Args:
        token_level_rewards: the outcome reward at some token of each rollout, ``(batch, response)``.
        response_mask: 1 on sampled tokens, ``(batch, response)``.
        uids: rollouts of one prompt share one.
    """
    index = np.array(uids, dtype=object)
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)[0]
