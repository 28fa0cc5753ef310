"""Settings that verl-tool and the methods cannot both work with: each is refused by key, value and fix."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl_bridge.config import VerlBridgeConfig, load_settings
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.verl_tool import AGENT_LOOP, ESTIMATOR, REWARD_MANAGER
from verl_bridge.integrations.verl_tool.checks import Preflight, base_estimator, check_tool_server
from verl_bridge.integrations.verl_tool.main_ppo import ARMS, arm


@pytest.fixture
def stop_tokens(tmp_path):
    path = tmp_path / "stop"
    path.write_text("</search>,</answer>")
    return path


@pytest.fixture
def config(stop_tokens):
    """The parts of verl-tool's config that are looked at, at its defaults, with our arm over them."""

    def make(name="bridge_gca", **changes):
        agent = {"enable_agent": True, "tool_server_url": "http://h:5/get_observation", "truncate_obs_side": "left"}
        host = {
            "algorithm": {"adv_estimator": "grpo"},
            "critic": {"enable": None},
            "data": {"return_raw_chat": False},
            "reward_model": {"reward_manager": "naive"},
            "actor_rollout_ref": {
                "agent": {**agent, "action_stop_tokens": str(stop_tokens)},
                "rollout": {"mode": "async", "agent": {"default_agent_loop": "verltool_agent"}},
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
            },
        }
        files = {"url": "http://r:8000", "corpus": "c.jsonl", "index": "i"}
        made = OmegaConf.merge(host, arm(name) if name else {}, {"verl_bridge": {"retriever": files}} if name else {})
        for key, value in changes.items():
            OmegaConf.update(made, key, value, force_add=True)
        return made

    return make


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_complete(config, name):
    made = config(name)
    settings = load_settings(made)
    assert base_estimator(made, settings) == "grpo"
    assert (settings.gca.enable, settings.bridge.enable) == ("gca" in name, "bridge" in name)
    assert settings.gca.salience == "uniform"
    assert set(made.verl_bridge) == set(VerlBridgeConfig().to_dict())  # so that every key can be overridden


@pytest.mark.parametrize(
    ("asked", "named", "base"), [("gca", None, "grpo"), ("gae", None, "gae"), ("grpo", "rloo", "rloo")]
)
def test_the_estimator_that_gca_builds_on(config, asked, named, base):
    made = config(**{"algorithm.adv_estimator": asked, "verl_bridge.gca.base_estimator": named})
    assert base_estimator(made, load_settings(made)) == base


AGENT, BRIDGE, RETRIEVER = "actor_rollout_ref.agent", "verl_bridge.bridge", "verl_bridge.retriever"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{AGENT}.truncate_obs_side": "left"}, "truncate_obs_side=left keeps the end of an observation"),
        ({f"{AGENT}.truncate_obs_side": "middle"}, "truncate_obs_side=middle"),
        (
            {"reward_model.reward_manager": "search_r1_qa_em"},
            f"'Beijing' scores 1.0 without any answer): set it to {REWARD_MANAGER}",
        ),
        ({f"{AGENT}.retokenization": True}, "retokenization=true"),
        ({f"{AGENT}.enable_agent": False}, "enable_agent=false"),
        ({f"{AGENT}.mask_observations": False}, "mask_observations=false trains the policy to write the passages"),
        ({"data.return_raw_chat": False}, "data.return_raw_chat=false keeps the prompt from our agent loop"),
        ({f"{AGENT}.tool_server_url": None}, "tool_server_url is not set: start `python -m verl_bridge"),
        ({f"{AGENT}.action_stop_tokens": None}, "action_stop_tokens=None is not a file"),
        ({"actor_rollout_ref.rollout.mode": "sync"}, "rollout.mode=sync uses no agent loop"),
        (
            {"actor_rollout_ref.rollout.agent.default_agent_loop": "verltool_agent"},
            "default_agent_loop=verltool_agent writes no search traces: add +verl_bridge=bridge_gca",
        ),
        ({"algorithm.adv_estimator": "remax"}, "the estimator remax needs more"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean"}, "loss_mode=geo_mean"),
        ({"verl_bridge.gca.salience": "margin_entropy"}, "verl_bridge.gca.salience=uniform"),
        ({"verl_bridge.gca.yes_no": "drop"}, "yes_no=gate"),
        ({f"{BRIDGE}.schedule": "joint"}, "verl_bridge.bridge.schedule=joint needs verl's own trainer"),
        ({f"{BRIDGE}.estimator": "two_state"}, "estimator=two_state needs verl's own trainer"),
        ({f"{BRIDGE}.micro_batch_tokens": 64}, "micro_batch_tokens=64"),
        ({f"{RETRIEVER}.url": None}, "verl_bridge.bridge.enable=true without verl_bridge.retriever.url"),
        ({f"{RETRIEVER}.index": None}, "verl_bridge.retriever.index is not set"),
        ({f"{RETRIEVER}.query_input": "question_query"}, "query_input=question_query"),
        ({"verl_bridge.agent.max_turns": 2}, "set actor_rollout_ref.agent.max_turns"),
    ],
)
def test_refusals(config, changes, words):
    made = config(**changes)
    with pytest.raises(ConfigError) as refusal:
        base_estimator(made, load_settings(made))
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm.adv_estimator": "grop"}, "algorithm.adv_estimator='grop' is not an advantage estimator of verl's"),
        (
            {"algorithm.adv_estimator": ESTIMATOR},
            f"algorithm.adv_estimator='{ESTIMATOR}' is not an advantage estimator",
        ),
        (
            {"algorithm.adv_estimator": "gae", "critic.enable": False},
            "adv_estimator=gae and critic.enable=False, by which verl-tool makes no critic",
        ),
        ({"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True}, "use_pf_ppo=true draws the batch anew"),
    ],
)
def test_advantages_that_cannot_be_computed_are_refused_in_every_arm(config, name, changes, words):
    made = config(name, **changes)
    with pytest.raises(ConfigError) as refusal:
        base_estimator(made, load_settings(made))
    assert words in str(refusal.value)


@pytest.mark.parametrize("asked", ["grpo", "gca"])
def test_gca_on_gae_needs_the_critic_that_only_verl_tools_own_name_makes(config, asked):
    changes = {"algorithm.adv_estimator": asked, "verl_bridge.gca.base_estimator": "gae"}
    made = config(**changes)
    with pytest.raises(ConfigError, match=f"gae with algorithm.adv_estimator={asked} and critic.enable=None"):
        base_estimator(made, load_settings(made))
    for mended in ({"critic.enable": True}, {"algorithm.adv_estimator": "gae"}):
        made = config(**{**changes, **mended})
        assert base_estimator(made, load_settings(made)) == "gae"


def test_an_unknown_base_estimator_is_named_by_its_own_key(config):
    made = config(**{"verl_bridge.gca.base_estimator": "grop"})
    with pytest.raises(ConfigError, match=r"verl_bridge\.gca\.base_estimator='grop' is not .*choose one of .*grpo"):
        base_estimator(made, load_settings(made))


def test_without_an_arm_the_key_is_named(config):
    made = config(None)
    with pytest.raises(ConfigError, match=r"add \+verl_bridge=bridge_gca"):
        base_estimator(made, load_settings(made))


def test_gca_alone_needs_no_retriever_of_its_own(config):
    made = config("gca", **{f"{RETRIEVER}.url": None, f"{RETRIEVER}.index": None})
    assert base_estimator(made, load_settings(made)) == "grpo"
    OmegaConf.update(made, "verl_bridge.gca.oracle_query", True)
    with pytest.raises(ConfigError, match=r"oracle_query=true without verl_bridge\.retriever\.url"):
        base_estimator(made, load_settings(made))


def test_stop_tokens_that_let_the_model_talk_on(config, stop_tokens):
    stop_tokens.write_text("</python>,</answer>")
    made = config()
    with pytest.raises(ConfigError, match=r"needs </search> and </answer>"):
        base_estimator(made, load_settings(made))


def test_the_callback_stops_the_run_with_a_line(config, capsys):
    Preflight().on_job_start(config())
    with pytest.raises(SystemExit) as end:
        Preflight().on_job_start(config(**{f"{AGENT}.truncate_obs_side": "left"}))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("verl_bridge: actor_rollout_ref.agent.truncate_obs_side=left")


def test_hydra_composes_an_arm_by_its_name(tmp_path):
    """In a process of its own: where verl 0.9 is loaded, its plugin's arms bear the same names."""
    (tmp_path / "recipe.yaml").write_text("reward_model: {reward_manager: naive}\nactor_rollout_ref: {agent: {n: 1}}\n")
    code = (
        "import sys, hydra, omegaconf; from verl_bridge.integrations.verl_tool.main_ppo import add_config_group\n"
        "add_config_group()\n"
        f"with hydra.initialize_config_dir({str(tmp_path)!r}, version_base=None):\n"
        "    made = hydra.compose('recipe', overrides=['+verl_bridge=gca', 'verl_bridge.gca.rho=0.1'])\n"
        "print(omegaconf.OmegaConf.to_yaml(made))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = OmegaConf.create(done.stdout)
    assert made.verl_bridge.gca.enable is True and made.verl_bridge.gca.rho == 0.1
    assert made.reward_model.reward_manager == REWARD_MANAGER
    assert made.actor_rollout_ref.agent == {"n": 1, "truncate_obs_side": "right"} and made.data == {
        "return_raw_chat": True
    }
    named = made.actor_rollout_ref.rollout.agent
    (entry,) = OmegaConf.load(named.agent_loop_config_path)
    assert entry.name == named.default_agent_loop == AGENT_LOOP
    assert "hydra" not in made  # the callback is Hydra's own


def test_nothing_heavy_is_imported_before_it_is_needed():
    """register.py is imported by every process of verl-tool's, settings.py by every tool server."""
    code = (
        "import sys, verl_bridge.integrations.verl_tool.register, verl_bridge.integrations.verl_tool.settings, "
        "verl_bridge.integrations.verl_tool.serve, verl_bridge.integrations.verl_tool.main_ppo\n"
        "print([n for n in ('torch', 'verl', 'verl_tool', 'ray', 'hydra', 'fastapi', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_tool_server_that_is_down_is_named():
    with pytest.raises(ConfigError, match="gives no observation"):
        check_tool_server("http://127.0.0.1:1/get_observation", shown=3)
