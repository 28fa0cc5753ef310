"""`+verl_bridge=ARM` on unmodified verl: found through the plugin, composes, and changes nothing when it is absent."""

import os
import subprocess
import sys

import pytest
import verl  # noqa: F401  its import loads our plugin, which adds the config group
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, MissingConfigException

from verl_bridge.config import load_settings

ROLLOUT = "actor_rollout_ref.rollout.name=vllm"


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [ROLLOUT, *overrides])


@pytest.mark.parametrize(
    ("arm", "gca", "bridge"),
    [("baseline", False, False), ("gca", True, False), ("bridge", False, True), ("bridge_gca", True, True)],
)
def test_arms(arm, gca, bridge):
    config = composed(f"+verl_bridge={arm}")
    settings = load_settings(config)
    assert (settings.gca.enable, settings.bridge.enable) == (gca, bridge)
    assert config.trainer.use_v1 is True
    assert config.trainer.v1.trainer_mode == "bridge_sync"
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "verl_bridge_search"
    assert config.reward.custom_reward_function.path == "pkg://verl_bridge.qa.reward"


def test_the_reward_path_is_one_verl_can_load():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    from verl_bridge.qa.reward import compute_score

    assert get_custom_reward_fn(composed("+verl_bridge=gca")).args[0] is compute_score


def test_settings_are_set_without_a_plus():
    config = composed("+verl_bridge=bridge_gca", "verl_bridge.gca.rho=0.1", "verl_bridge.gca.routing.A.ANS=0.25")
    settings = load_settings(config)
    assert settings.gca.rho == 0.1 and settings.gca.routing["A"]["ANS"] == 0.25


def test_the_arm_changes_only_its_own_keys():
    """Everything else is the recipe's: the estimator, the critic, the batch."""
    from omegaconf import OmegaConf

    def flat(node, prefix=""):
        for key, value in node.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    recipe = [
        "algorithm.adv_estimator=rloo",
        "data.train_batch_size=96",
        "trainer.v1.sampler.max_off_policy_threshold=2",
    ]
    plain, ours = (
        dict(flat(OmegaConf.to_container(composed(*recipe, *arm)))) for arm in ((), ("+verl_bridge=baseline",))
    )
    changed = {key for key in ours if not key.startswith("verl_bridge.") and ours[key] != plain.get(key, ...)}
    assert changed == {
        "trainer.v1.trainer_mode",
        "actor_rollout_ref.rollout.agent.default_agent_loop",
        "reward.custom_reward_function.path",
    }
    assert plain.keys() == {key for key in ours if not key.startswith("verl_bridge.")}


def test_unknown_arm_and_unknown_setting_are_refused():
    with pytest.raises(MissingConfigException, match="bridge_gca"):
        composed("+verl_bridge=bridge_and_gca")
    with pytest.raises(ConfigCompositionException, match=r"verl_bridge\.gca\.roh"):
        composed("+verl_bridge=gca", "verl_bridge.gca.roh=0.1")


def test_verls_own_command_line(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", ROLLOUT, "+verl_bridge=bridge_gca", "--cfg", "job"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    config = yaml.safe_load(run.stdout[run.stdout.index("model_engine:") :])
    assert config["verl_bridge"]["gca"]["enable"] is True
    assert config["trainer"]["v1"]["trainer_mode"] == "bridge_sync"


def test_without_the_plugin_the_settings_say_so(tmp_path):
    """The trap: Hydra then takes the key for a string. Whoever reads the settings refuses it."""
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    code = f"""
import verl
from hydra import compose, initialize_config_module
from verl_bridge.config import load_settings
with initialize_config_module("verl.trainer.config", version_base=None):
    load_settings(compose("ppo_trainer", [{ROLLOUT!r}, "+verl_bridge=bridge_gca"]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode != 0
    assert "verl_bridge='bridge_gca' is not a group of settings" in run.stderr
