"""What verl-tool's processes load by ``VERL_USE_EXTERNAL_MODULES``: our reward manager, once verl's registry is there.

verl imports this module while it is imported itself, in every process, so nothing heavy is imported here.
"""

from __future__ import annotations

from types import ModuleType

from wrapt import register_post_import_hook


def _register_reward_manager(registry: ModuleType) -> None:
    import verl_bridge.integrations.verl_tool.reward  # noqa: F401  registers itself


register_post_import_hook(_register_reward_manager, "verl.workers.reward_manager.registry")
