"""Run by verl-tool's own Python: every signature of its that we import, call, override or count on."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from contracts import host
from omegaconf import OmegaConf

from verl_bridge.config import load_settings
from verl_bridge.integrations import verl_tool
from verl_bridge.integrations.verl_tool.checks import base_estimator

RECIPE = Path(__file__).parents[4] / "recipes/verl_tool.sh"
PACKAGE = Path(verl_tool.__path__[0])
SHARED = sorted(PACKAGE.parent.glob("*.py"))

CALLS = [
    ("verl_tool.servers.tool_server:main", 0, ("tool_type", "host", "port")),
    ("verl_tool.servers.serve:main", 0, ("tool_type", "host", "port", "log_directory")),
    (
        "verl.trainer.ppo.ray_trainer:compute_advantage",
        1,
        ("adv_estimator", "gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo", "config"),
    ),
    ("verl.protocol:DataProto.from_dict", 1, ()),
    ("verl.protocol:pad_dataproto_to_divisor", 2, ()),
    ("verl.workers.fsdp_workers:ActorRolloutRefWorker.compute_log_prob", 2, ()),
    ("verl_tool.agent_loop.agent_loop:AsyncLLMServerManager.generate", 2, ("prompt_ids", "sampling_params")),
]
FIELDS = {
    "verl_tool.agent_loop.agent_loop:AgentLoopOutput": (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "response_logprobs",
        "extra_fields",
    ),
}
#: What of their code we count on without calling it.
SAYS = {
    # our launcher
    "verl_tool.servers.serve": ('"-m", "verl_tool.servers.tool_server"',),
    "verl_tool.servers.tools.base:get_tool_cls": ("if tool_type in ALL_TOOLS", "verl_tool.servers.tools.{tool_type}"),
    "verl_tool.servers.tool_server:AsyncToolManager._initialize_tools": (
        "tool_cls(num_workers=self.config.workers_per_tool)",
        "except Exception as e:",  # SystemExit gets through
    ),
    "verl_tool.servers.tool_server:AsyncToolManager._create_tool_processing_task": (
        "inspect.iscoroutinefunction(tool.aget_observations)",
    ),
    "verl_tool.servers.tool_server:AsyncToolManager._execute_tool_tasks": (
        '"error": f"Tool processing failed',
        '"tool_type"',
    ),
    # our loop
    "verl_tool.agent_loop.verltool_agent_loop:VerlToolAgentLoop.run": (
        "await self.server_manager.generate(",
        "running_prompt_ids.extend(gen_ids)",
        "obs_token_ids = self.tokenizer.encode(obs_text)",
        '"tool_interact_info": stats_dict.get("tool_interact_info", [])',
        '"traj_stop_reason": traj_stop_reason',
        "if do_action and not is_last_step:",
        '"max_turns_reached"',
        '"max_response_length_reached"',
        '"max_model_len_exceeded"',
        '"tool_signaled_done"',
    ),
    "verl_tool.agent_loop.verltool_agent_loop:VerlToolAgentLoop._aiohttp_request": ('"success": False',),
    # our trainer
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.fit": (
        "batch, is_metrics = self.compute_rollout_importance_weights_and_add_to_batch(batch)",
        "metrics.update(is_metrics)",
        'batch.batch["token_level_scores"] = reward_tensor',
        "adv_estimator=self.config.algorithm.adv_estimator",
    ),
    "verl_tool.trainer.main_ppo": ("trainer = RayPPOTrainer(", "trainer.init_workers()", "trainer.fit()"),
    # our reward manager
    "verl_tool.trainer.ppo.reward:load_reward_manager": (
        "tokenizer=tokenizer",
        "num_examine=num_examine",
        "compute_score=final_compute_score",
        "reward_fn_key=config.data.reward_fn_key",
    ),
}


@pytest.fixture(autouse=True)
def _hosts(monkeypatch):
    monkeypatch.setattr(host, "HOSTS", ("verl", "verl_tool"))


def test_names_and_calls():
    found = host.import_differences([*sorted(PACKAGE.glob("*.py")), *SHARED])
    assert [line for line in found if "host.main()" not in line] == []  # Hydra gives its main the config


def test_overrides():
    classes = host.our_classes("verl_bridge.integrations.verl_tool")
    assert {"BridgeSearchTool", "BridgeAgentLoop", "BridgeTrainer"} <= {cls.__name__ for cls in classes}
    assert host.override_differences(classes) == []


def test_calls_that_go_through_objects():
    assert host.call_differences(CALLS) == []
    assert host.field_differences(FIELDS) == []


def test_what_we_count_on():
    assert host.source_differences(SAYS) == []


@pytest.mark.parametrize("arm", ["bridge", "baseline"])
def test_the_recipe_composes_and_is_accepted(arm):
    run = subprocess.run(
        [RECIPE, arm, "--cfg", "job"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    made = OmegaConf.create(run.stdout[run.stdout.index("actor_rollout_ref:\n") :])
    settings = load_settings(made)
    assert base_estimator(made, settings) == "grpo"
    assert settings.bridge.enable is (arm == "bridge") and settings.gca.enable is False
    assert made.data.return_raw_chat is True and made.data.filter_overlong_prompts is True
    assert (made.actor_rollout_ref.agent.max_turns, made.actor_rollout_ref.agent.truncate_obs_side) == (4, "right")


def test_serve_uses_of_subprocess_what_ours_has():
    from verl_tool.servers import serve

    tree = ast.parse(inspect.getsource(serve))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "subprocess"
    }
    assert used == {"Popen", "TimeoutExpired"}


def test_the_stand_in_of_the_tool_s_base_is_faithful():
    """conftest.py's ``base``, by which the search tool is tested where verl-tool is not."""
    from verl_tool.servers.tools import base

    assert list(inspect.signature(base.BaseTool).parameters) == ["num_workers"]
    assert isinstance(base.ALL_TOOLS, list) and {"base", "finish", "search_retrieval"} <= set(base.ALL_TOOLS)
    assert isinstance(base.registered_tools, dict) and base.__package__ == "verl_tool.servers.tools"

    class Tool(base.BaseTool):
        tool_type = "of_this_test"

    assert base.register_tool(Tool) is Tool and base.registered_tools.pop("of_this_test") is Tool


def test_the_checkout_is_the_commit_that_is_named():
    import verl_tool as host_package

    folder = Path(host_package.__path__[0]).parent
    if (folder / ".git").exists():  # an archive of the commit has none
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == verl_tool.COMMIT
    assert (folder / "verl/verl/version/version").read_text().strip() == "0.7.0.dev"
