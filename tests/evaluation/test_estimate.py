"""The formula of memory and time, by hand, and how far it is from the two figures of the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from verl_bridge.config import VerlBridgeConfig
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


def test_a_policy_that_learns_by_lora():
    """The base's weights alone, 4 GB in all: 1 GB on each of 4 GPUs; the reference is the base; 2 of 14 passes less."""
    found = estimate(SMALL, replace(WORK, lora=True), gpus=4, mfu=0.5)
    assert (found.peak, found.host) == (pytest.approx(1e9 + 8e9), 0)
    offloaded = estimate(SMALL, replace(WORK, lora=True, offload=True), gpus=4)
    assert (offloaded.peak, offloaded.host) == (pytest.approx(8e9), 4e9)
    whole = estimate(SMALL, WORK, gpus=4, mfu=0.5)
    assert whole.step - found.step == pytest.approx(2 / 14 * 5.6e15 / (4 * 312e12 * 0.5))


def test_scoring_in_one_step_of_four_costs_a_quarter():
    plain, every, fourth = (
        estimate(SMALL, replace(WORK, candidates=candidates, interval=interval), gpus=1).step
        for candidates, interval in ((0, 1), (8, 1), (8, 4))
    )
    assert every - plain == pytest.approx(4 * (fourth - plain)) and fourth > plain


ACTOR = {
    "strategy": "fsdp2",
    "use_kl_loss": True,
    "use_dynamic_bsz": True,
    "ppo_max_token_len_per_gpu": 16_384,
    "ppo_micro_batch_size_per_gpu": None,
    "fsdp_config": {"param_offload": False, "optimizer_offload": False, "offload_policy": False},
}


def of_config(bridge=None, lora_rank=0, **actor):
    """The work of a run with 512 questions, 8 rollouts each, on verl's keys that the formula reads."""
    config = {
        "data": {"train_batch_size": 512, "max_prompt_length": 1024, "max_response_length": 6144},
        "algorithm": {"use_kl_in_reward": False},
        "trainer": {"total_training_steps": 250},
        "actor_rollout_ref": {
            "model": {"lora_rank": lora_rank},
            "actor": {**ACTOR, **actor},
            "rollout": {"n": 8, "max_num_seqs": 256, "gpu_memory_utilization": 0.5},
        },
    }
    settings = None
    if bridge is not None:
        paths = {"corpus": "c", "index": "i", "encoder": "e"}
        settings = VerlBridgeConfig.from_mapping({"retriever": paths, "bridge": {"enable": True, **bridge}})
    return Work.of_config(OmegaConf.create(config), settings)


def test_a_run_as_verl_has_it():
    assert of_config() == Work(4096)
    assert of_config({}) == Work(4096, candidates=10)
    assert of_config({"interval": 4, "likelihood_context": "prefix"}) == Work(
        4096, candidates=10, interval=4, prefix=True
    )
    assert of_config(lora_rank=8) == Work(4096, lora=True)


def test_micro_batches_of_a_fixed_number_of_rows():
    """32 rows of 1,024 + 6,144 tokens: 229,376 tokens, whatever limit a dynamic batch would have.

    Qwen2.5-3B on 4 GPUs: state 12.36 GB, two layers 0.34, activations (2·36 + 34)·2048·229,376 bytes = 49.8, logits
    10·151,936·229,376 bytes = 348.5 GB.
    """
    work = of_config(use_dynamic_bsz=False, ppo_micro_batch_size_per_gpu=32)
    assert work.micro_batch == 229_376
    found = estimate(POLICIES["Qwen2.5-3B"], work, gpus=4)
    assert found.peak == pytest.approx(12.36e9 + 0.34e9 + 49.8e9 + 348.5e9, rel=1e-3) and not found.fits


def test_a_retriever_that_never_learns_is_not_scored_for():
    frozen = of_config({"schedule": "frozen", "interval": 4, "likelihood_context": "prefix"})
    assert (frozen.candidates, frozen.interval) == (0, 1)
    size = POLICIES["Qwen2.5-3B"]
    assert estimate(size, frozen, gpus=4) == estimate(size, of_config(), gpus=4)


def test_the_cpu_offload_policy_is_of_fsdp2():
    offloaded = {**ACTOR["fsdp_config"], "offload_policy": True}
    assert of_config(fsdp_config=offloaded).offload_policy
    assert not of_config(strategy="fsdp", fsdp_config=offloaded).offload_policy


def test_other_engines_have_no_estimate():
    with pytest.raises(ValueError, match=r"of FSDP, and actor_rollout_ref.actor.strategy=megatron"):
        of_config(strategy="megatron")


def test_policies_by_name():
    assert policy_size("Qwen/Qwen2.5-3B") == policy_size("/models/Qwen2.5-3B-Instruct/") == POLICIES["Qwen2.5-3B"]
    assert policy_size("Qwen/Qwen3-30B-A3B-Instruct-2507").active == 3.3e9
    assert policy_size("someone/Qwen2.5-3B-tuned") is None


def test_what_does_not_fit_says_so():
    found = estimate(POLICIES["Qwen3-30B-A3B"], Work(2560), gpus=4)
    assert not found.fits and "more than it has" in found.sentence()
    assert "too much" in table([("x", POLICIES["Qwen3-30B-A3B"], Work(2560))], gpus=4)
    assert estimate(POLICIES["Qwen2.5-3B"], Work(4096), gpus=4).fits
