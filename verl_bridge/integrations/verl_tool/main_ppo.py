"""verl-tool's training with our trainer: ``python -m verl_bridge.integrations.verl_tool.main_ppo``.

Takes verl-tool's own arguments, and one more: ``+verl_bridge=baseline|gca|bridge|bridge_gca``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations.verl_tool import AGENT_LOOP, REWARD_MANAGER

MODULES = "VERL_USE_EXTERNAL_MODULES"
REGISTER = "verl_bridge.integrations.verl_tool.register"
ARMS = {"baseline": (), "gca": ("gca",), "bridge": ("bridge",), "bridge_gca": ("gca", "bridge")}


def arm(name: str) -> dict[str, Any]:
    """The config of ``+verl_bridge=NAME``: every setting at its default, and what verl-tool has to be told."""
    methods = {method: {"enable": True} for method in ARMS[name]}
    methods["gca"] = {**methods.get("gca", {}), "salience": "uniform"}  # there are no token statistics here
    return {
        "hydra": {"callbacks": {"verl_bridge": {"_target_": "verl_bridge.integrations.verl_tool.checks.Preflight"}}},
        "data": {"return_raw_chat": True},  # Search-R1's files have the question in the prompt only
        "actor_rollout_ref": {
            "agent": {"truncate_obs_side": "right"},
            "rollout": {
                "agent": {
                    "default_agent_loop": AGENT_LOOP,
                    "agent_loop_config_path": str(Path(__file__).with_name("agent_loop.yaml")),
                }
            },
        },
        "reward_model": {"reward_manager": REWARD_MANAGER},
        # for the workers of a cluster that runs already; those of a new one inherit it
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {MODULES: os.environ.get(MODULES, REGISTER)}}}},
        "verl_bridge": VerlBridgeConfig.from_mapping(methods).to_dict(),
    }


def add_config_group() -> None:
    """Makes ``+verl_bridge=NAME`` known to Hydra."""
    from hydra.core.config_store import ConfigStore

    for name in ARMS:
        ConfigStore.instance().store(group="verl_bridge", name=name, node=arm(name), package="_global_")


def main() -> None:
    """Runs ``verl_tool.trainer.main_ppo`` with our trainer in the place of its own."""
    modules = [name for name in os.environ.get(MODULES, "").split(",") if name and name != REGISTER]
    os.environ[MODULES] = ",".join([*modules, REGISTER])
    add_config_group()
    from verl_tool.trainer import main_ppo as host

    from verl_bridge.integrations.verl_tool.trainer import BridgeTrainer

    host.RayPPOTrainer = BridgeTrainer
    host.main()


if __name__ == "__main__":
    main()
