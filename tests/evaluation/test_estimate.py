"""The formula of memory and time, by hand, and how far it is from the two figures of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl_bridge.evaluation.estimate import (
    MFU,
    PAPER_BRIDGE_HOURS,
    PAPER_VT_SEARCH_HOURS,
    POLICIES,
    PolicySize,
    Work,
    estimate,
    fitted_mfu,
    policy_size,
    table,
)

SMALL = PolicySize(parameters=1e9, active=1e9, layers=10, hidden=1000, kv_width=100, vocabulary=10_000)
WORK = Work(
    rollouts=1000, steps=36, kl=True, micro_batch=1000, sequences=100, memory_share=0.1,
    searches=1, prompt=100, turn=50, observation=200, document=60, unique=0.25,
)  # fmt: skip


def test_memory_by_hand():
    """P = 1e9 on 4 GPUs: state 4 GB; two layers 0.4; activations 0.02 + 0.034; logits 0.1 GB."""
    found = estimate(SMALL, WORK, gpus=4)
    assert found.peak == pytest.approx(4e9 + 8e9)  # while it serves, with a tenth of 80 GB
    assert found.host == 4e9  # the reference's weights
    assert estimate(SMALL, replace(WORK, memory_share=0), gpus=4).peak == pytest.approx(4e9 + 0.4e9 + 0.054e9 + 0.1e9)
    offloaded = estimate(SMALL, replace(WORK, offload=True), gpus=4)
    assert (offloaded.peak, offloaded.host) == (pytest.approx(8e9), 20e9)
    never = estimate(SMALL, replace(WORK, offload_policy=True, memory_share=0, kl=False), gpus=4)
    assert (never.peak, never.host) == (pytest.approx(0.554e9), 16e9)


def test_time_by_hand():
    """400 tokens a rollout: 14·1e9·1000·400 = 5.6e15 floats; 100 sampled tokens each.

    Keys and values: 2·10·100·2·400 = 1.6e6 bytes a sequence; 100 sequences and the weights are 2.16e9 bytes a token.
    """
    found = estimate(SMALL, WORK, gpus=4, mfu=0.5)
    compute = 5.6e15 / (4 * 312e12 * 0.5)
    rate = 100 / (2.16e9 / 1.2e12)
    assert found.step == pytest.approx(compute + 1000 * 100 / (4 * rate))
    assert found.hours == pytest.approx(found.step / 100)  # 36 steps
    without = estimate(SMALL, replace(WORK, kl=False), gpus=4, mfu=0.5)
    assert found.step - without.step == pytest.approx(compute * 2 / 14)


@pytest.mark.parametrize(("prefix", "tokens"), [(False, 1000 * 8 * 160 * 0.25), (True, 1000 * 8 * (160 + 150))])
def test_scoring_by_hand(prefix, tokens):
    """Eight candidates for each of 1,000 searches; after the prefix half of the 300 tokens come too."""
    plain = estimate(SMALL, WORK, gpus=1, mfu=0.5)
    found = estimate(SMALL, replace(WORK, candidates=8, prefix=prefix), gpus=1, mfu=0.5)
    assert found.step - plain.step == pytest.approx(2e9 * tokens / (312e12 * 0.5))
    assert found.peak == plain.peak


def test_the_paper_is_as_far_off_as_the_module_says():
    assert pytest.approx(fitted_mfu(), rel=0.01) == MFU
    policy, mfu = POLICIES["Qwen2.5-3B"], fitted_mfu()
    assert estimate(policy, Work(512 * 16), gpus=4, mfu=mfu).hours == pytest.approx(PAPER_VT_SEARCH_HOURS)
    question, prefix = (
        estimate(policy, Work(512 * 8, candidates=10, prefix=prefix), gpus=4).hours for prefix in (False, True)
    )
    assert question / PAPER_BRIDGE_HOURS - 1 == pytest.approx(-0.30, abs=0.01)
    assert prefix / PAPER_BRIDGE_HOURS - 1 == pytest.approx(0.51, abs=0.01)


def test_policies_by_name():
    assert policy_size("Qwen/Qwen2.5-3B") == policy_size("/models/Qwen2.5-3B-Instruct/") == POLICIES["Qwen2.5-3B"]
    assert policy_size("Qwen/Qwen3-30B-A3B-Instruct-2507").active == 3.3e9
    assert policy_size("someone/Qwen2.5-3B-tuned") is None


def test_what_does_not_fit_says_so():
    found = estimate(POLICIES["Qwen3-30B-A3B"], Work(2560), gpus=4)
    assert not found.fits and "more than it has" in found.sentence()
    assert "too much" in table([("x", POLICIES["Qwen3-30B-A3B"], Work(2560))], gpus=4)
    assert estimate(POLICIES["Qwen2.5-3B"], Work(4096), gpus=4).fits
