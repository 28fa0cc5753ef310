"""What verl_bridge registers with verl. verl imports this module when it is imported itself, in every process.

Loaded through the entry point ``verl.plugins`` or ``VERL_USE_EXTERNAL_MODULES=verl_bridge.plugin``. Nothing heavy is
imported here: each registration waits until the module that holds verl's registry has been imported, so workers that
never need the trainer never pay for it, and an error in one of ours surfaces in that import instead of being hidden.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from types import ModuleType
from typing import Any, NoReturn

from wrapt import register_post_import_hook

from verl_bridge.config.schema import GCA_ESTIMATOR as ESTIMATOR

AGENT_LOOP, GROUP = "verl_bridge_search", "verl_bridge"
#: For function-calling models: verl's ``tool_agent`` loop with traces.
TOOL_AGENT_LOOP = "verl_bridge_tool_agent"
#: Our trainer over each of verl's modes: values of ``trainer.v1.trainer_mode``.
TRAINERS = {
    "sync": "bridge_sync",
    "colocate_async": "bridge_colocate_async",
    "separate_async": "bridge_separate_async",
}
TRAINER = TRAINERS["sync"]
SUPPORTED_VERL = "0.9"


def register() -> None:
    """Register everything, or raise ImportError on a verl this version was not written for."""
    check_verl_version(getattr(sys.modules.get("verl"), "__version__", None) or metadata.version("verl"))
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from verl_bridge.integrations.verl import cpu

        cpu.register()
    register_post_import_hook(_register_config_group, "hydra.core.plugins")
    register_post_import_hook(_register_estimator, "verl.trainer.ppo.core_algos")
    register_post_import_hook(_register_agent_loop, "verl.experimental.agent_loop.agent_loop")
    register_post_import_hook(_register_trainer, "verl.trainer.ppo.v1")
    register_post_import_hook(_register_engine, "verl.workers.engine.fsdp.transformer_impl")


def check_verl_version(version: str) -> None:
    """Raise ImportError unless ``version`` is of the series this package hooks into."""
    if not re.match(rf"{re.escape(SUPPORTED_VERL)}\.\d", version):
        raise ImportError(
            f"verl=={version} is installed, verl_bridge works with verl {SUPPORTED_VERL}.x: pip install 'verl==0.9.1'"
        )


def _register_config_group(plugins: ModuleType) -> None:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class VerlBridgeSearchPath(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("verl_bridge", "pkg://verl_bridge.config")

    plugins.Plugins.instance().register(VerlBridgeSearchPath)


def _register_trainer(v1: ModuleType) -> None:
    # They register themselves as bridge_sync, bridge_colocate_async and bridge_separate_async.
    import verl_bridge.integrations.verl.async_trainers
    import verl_bridge.integrations.verl.trainer  # noqa: F401


def _register_agent_loop(agent_loop: ModuleType) -> None:
    # They register themselves as verl_bridge_search and verl_bridge_tool_agent.
    import verl_bridge.integrations.verl.agent_loop
    import verl_bridge.integrations.verl.tool_loop  # noqa: F401


def _register_estimator(core_algos: ModuleType) -> None:
    core_algos.register_adv_est(ESTIMATOR)(needs_our_trainer)


def _register_engine(transformer_impl: ModuleType) -> None:
    from verl_bridge.integrations.verl.engine import SalienceFSDPEngine

    # An entry with a vendor goes before verl's own; device cpu has an engine of its own.
    register = transformer_impl.EngineRegistry.register
    register("language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=["nvidia", "amd"])(SalienceFSDPEngine)


def needs_our_trainer(*args: Any, **kwargs: Any) -> NoReturn:
    """The estimator ``gca``: only a name, for verl hands an estimator no trace; our trainer replaces it beforehand."""
    others = ", ".join(name for name in TRAINERS.values() if name != TRAINER)
    raise RuntimeError(
        f"algorithm.adv_estimator={ESTIMATOR} needs verl_bridge's trainer: set trainer.v1.trainer_mode={TRAINER} "
        f"(or {others}), or add +{GROUP}=gca to the command line"
    )


def _names_us(argv: list[str]) -> bool:
    named = re.compile(rf"[+~]*{GROUP}[=.@]|.*=({'|'.join(TRAINERS.values())})$")
    return any(named.match(argument) for argument in argv)


try:
    register()
except Exception as error:
    # verl hides what an entry point raises; a run that asked for us must not train on without the methods.
    print(f"verl_bridge is NOT registered with verl: {error}", file=sys.stderr)
    if _names_us(sys.argv[1:]):
        raise SystemExit(2) from error
    raise
