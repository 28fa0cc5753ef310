"""GCA over the advantages of every estimator verl has, against the token-by-token reference."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

os.environ.setdefault("VERL_PLATFORM", "cpu")

from verl.trainer.ppo import core_algos

from tests.e2e.reference import reference_advantages
from tests.traces import masks, trace_of
from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.config.schema import GCAConfig
from verl_bridge.integrations.checks import GROUP_RELATIVE

ESTIMATORS = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)


@pytest.fixture(scope="module")
def batch():
    """Five prompts of four rollouts: every type, a prompt without evidence, all right, all wrong, one right."""
    traces = [
        trace_of("miss", "hit", "miss", answer="Lima"),  # A
        trace_of("hit", answer="Quito"),  # B1
        trace_of("hit", "bad"),  # B2
        trace_of("failed", "miss", answer="Lima"),  # D, retrievable
        trace_of("miss", answer="Lima"),  # D, not retrievable
        *[trace_of("miss", answer="Quito"), trace_of("bad"), trace_of("failed", answer="Quito")],  # C
        *[trace_of("hit", answer="Lima"), trace_of("miss", answer="Lima"), trace_of("hit", "hit", answer="Lima")],
        trace_of(answer="Lima"),
        *[trace_of("hit", answer="Quito"), trace_of("hit"), trace_of("miss"), trace_of("miss", answer="Quito")],
        *[trace_of("hit", answer="Lima"), trace_of("hit", "bad"), trace_of("miss"), trace_of("miss", answer="Quito")],
    ]
    mask, groups = masks(traces), torch.arange(5).repeat_interleave(4)
    rewards = torch.tensor([float(trace.answer == "Lima") for trace in traces])
    return traces, mask, groups, rewards


def test_all_estimators_of_verls_are_tested():
    assert {str(name) for name in core_algos.ADV_ESTIMATOR_REGISTRY} == {*ESTIMATORS, "gca"}
    assert set(ESTIMATORS) - GROUP_RELATIVE == {"gae", "reinforce_plus_plus", "remax"}


def base_advantages(name, mask, groups, rewards):
    """verl's own advantages, the reward on the last sampled token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.zeros(mask.shape)
    last = (mask * torch.arange(mask.shape[1])).argmax(dim=1)
    tokens[torch.arange(len(mask)), last] = rewards
    values, sums = (torch.rand(mask.shape, generator=generator) for _ in range(2))
    common = {"token_level_rewards": tokens, "response_mask": mask}
    index = {"index": np.array([str(group) for group in groups.tolist()], dtype=object)}
    token_baseline = {**index, "old_log_probs": -values, "sum_pi_squared": sums}
    more = {
        "gae": {"values": values, "gamma": torch.tensor(1.0), "lam": torch.tensor(0.95)},
        "remax": {"reward_baselines": torch.full((len(mask),), 0.3)},
        "reinforce_plus_plus": {"config": OmegaConf.create({"gamma": 1.0})},
        "optimal_token_baseline": token_baseline,
        "tir_optimal_token_baseline": token_baseline,
        "grpo_passk": {**index, "config": OmegaConf.create({"norm_adv_by_std_in_grpo": True})},
    }
    return core_algos.get_adv_estimator_fn(name)(**common, **more.get(name, index))[0]


@pytest.mark.parametrize("salience", ["uniform", "margin_entropy"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_grounded_advantages_equal_the_reference(batch, name, salience):
    traces, mask, groups, rewards = batch
    base, group_relative = base_advantages(name, mask, groups, rewards), name in GROUP_RELATIVE
    signals = credit.batch_signals(traces, groups)
    assert set(signals.types.tolist()) == set(RolloutType) - {RolloutType.D_UNDETERMINED}
    statistics = {}
    if salience == "margin_entropy":
        generator = torch.Generator().manual_seed(1)
        statistics = {
            "margin": 3 * torch.randn(mask.shape, generator=generator),
            "top_entropy": torch.rand(mask.shape, generator=generator),
        }
    settings = GCAConfig(enable=True, salience=salience)
    common = {"group_relative": group_relative, "settings": settings}
    result = credit.ground(traces, signals, base, mask, groups, rewards, **common, **statistics)
    reference = reference_advantages(traces, base, mask, groups.tolist(), rewards, group_relative, **statistics)
    sampled = mask.bool()
    torch.testing.assert_close(result.advantages[sampled], reference[sampled], rtol=0, atol=1e-6)
    assert torch.equal(result.advantages[~sampled], base[~sampled])
    stays = torch.arange(20) != 4  # row 4 leaves the loss
    assert torch.equal(result.advantages[stays].sign(), base[stays].sign())
    assert not result.advantages[4][sampled[4]].any() and base[4][sampled[4]].any()
    assert 0 < (result.advantages - base)[16].abs().max() <= 0.1 * base[16].abs().max() + 1e-6
    if group_relative:  # all right, all wrong: as they were
        assert torch.equal(result.advantages[8:16], base[8:16])
