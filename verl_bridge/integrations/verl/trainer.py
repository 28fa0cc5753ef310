"""verl's synchronous trainer with the methods; the asynchronous ones are in ``async_trainers``."""

from __future__ import annotations

from typing import ClassVar

from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from verl_bridge.integrations.verl.mixin import SearchTrainerMixin
from verl_bridge.plugin import TRAINER


@register_trainer(TRAINER)
class BridgeTrainerSync(SearchTrainerMixin, PPOTrainerSync):
    """``trainer.v1.trainer_mode=bridge_sync``: verl's synchronous trainer with the methods."""

    verl_mode: ClassVar[str] = "sync"
