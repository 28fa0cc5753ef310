"""recipes/bridge_gca_qwen2.5-3b: its own script composes it against the installed verl, at the papers' numbers."""

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import verl  # noqa: F401  its import loads our plugin, which adds the config group
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_bridge.config import load_settings
from verl_bridge.retrieval.families import FAMILIES

RECIPE = Path(__file__).parents[2] / "recipes/bridge_gca_qwen2.5-3b"


@cache
def composed(name, *overrides):
    """The recipe over the installed verl, as Hydra puts it together for main_ppo."""
    with initialize_config_dir(str(RECIPE), version_base=None):
        return compose(name, ["hydra.searchpath=[pkg://verl.trainer.config]", *overrides])


def test_the_script_trains_on_that_config(monkeypatch):
    """run.sh, on verl's own entry point: the same config, whichever folder it is called from."""
    monkeypatch.setenv("PYTHON", sys.executable)
    run = subprocess.run([RECIPE / "run.sh", "--cfg", "job"], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0, run.stderr
    printed = OmegaConf.create(run.stdout[run.stdout.index("model_engine:") :])
    assert printed == composed("bridge_gca")


def test_policy_settings(monkeypatch):
    monkeypatch.setenv("DATA_DIR", "/data")
    config = composed("bridge_gca")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.algorithm.adv_estimator == "grpo" and config.critic.enable is False
    assert (config.data.train_batch_size, rollout.n, config.trainer.total_training_steps) == (512, 8, 250)
    assert actor.optim.lr == 1e-6
    assert (actor.use_kl_loss, actor.kl_loss_coef, config.algorithm.use_kl_in_reward) == (True, 0.005, False)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-3B"
    assert config.data.train_files == "/data/train.parquet"
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == 4


def test_method_settings(monkeypatch):
    monkeypatch.setenv("INDEX", "/data/index")
    settings = load_settings(composed("bridge_gca"))
    gca, bridge, retriever = settings.gca, settings.bridge, settings.retriever
    assert gca.enable and bridge.enable
    assert (gca.rho, gca.kappa, gca.c_max) == (0.2, 0.1, 0.5)
    assert (bridge.gamma, bridge.lr, bridge.tau_retrieval, bridge.tau_posterior) == (0.25, 1e-5, 0.4, 0.5)
    assert retriever.encoder == "intfloat/e5-base-v2" and retriever.index == "/data/index"
    family = FAMILIES[retriever.family]
    assert (family.query_prefix, family.passage_prefix) == ("query: ", "passage: ")
    assert (retriever.query_prefix, retriever.passage_prefix) == (None, None)  # the family's
    assert (retriever.shown, retriever.top_k, retriever.lora_rank) == (3, 10, 16)
    assert settings.agent.max_turns == 5


def test_one_key_apart():
    """Against plain GRPO: our section, the loop and reward it needs, the trainer's mode and the run's name."""

    def flat(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    plain = dict(flat(OmegaConf.to_container(composed("grpo"))))
    ours = dict(flat(OmegaConf.to_container(composed("bridge_gca"))))
    assert not any("verl_bridge." in key for key in plain)
    assert {key for key in ours if not key.startswith("verl_bridge.") and plain[key] != ours[key]} == {
        "trainer.v1.trainer_mode",
        "trainer.experiment_name",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "reward.custom_reward_function.path",
    }
    assert ours["trainer.v1.trainer_mode"] == "bridge_sync"


@pytest.mark.parametrize("name", ["grpo", "bridge_gca"])
def test_verl_accepts_it(name):
    """verl's own check, as main_ppo runs it."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = composed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert need_critic(config) is False  # set, not guessed from the estimator's name
    assert need_reference_policy(config) is True  # the KL loss
    validate_config(config, use_reference_policy=True, use_critic=False)


def test_our_trainer_accepts_it():
    from verl_bridge.integrations.verl.checks import prepare_config

    config = composed("bridge_gca").copy()
    assert prepare_config(config, load_settings(config), "sync") == "grpo"


def test_another_arm_is_one_override():
    settings = load_settings(composed("bridge_gca", "verl_bridge=baseline"))
    assert not settings.gca.enable and not settings.bridge.enable
    assert settings.retriever.encoder == "intfloat/e5-base-v2"


def test_plain_recipe_fits_the_batch_of_five_turns():
    config = composed("grpo")
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    # five turns of reasoning and four observations of 500 tokens have room
    assert config.data.max_response_length >= 4 * 500 + 5 * 500
