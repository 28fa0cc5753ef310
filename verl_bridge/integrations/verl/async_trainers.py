"""The methods over verl's asynchronous trainers.

Rollouts are begun ahead of the step that trains on them, and one rollout may see several adapters: each of its searches
records the version that served it, p_old is always that version's, and searches more than ``bridge.max_staleness``
versions behind teach nothing. When a new adapter is seen:

- colocate_async: generation is paused from sampling a batch to the end of the step, so rollouts under way go on with
  the new policy and the new adapter at once.
- separate_async: generation never pauses for the trainer. A step is ``parameter_sync_step`` local updates of policy
  and retriever; each adapter serves from then on, the policy's weights once per step.

What is logged for such a step verl makes from its local updates, by the names of the metrics (``MetricsAggregator``):
the mean, but the largest of ``*_max``, the last of ``bridge/lr`` and the sum of ``timing_s/*``. So
``bridge/adapter_version`` 1.5 is the mean of versions 1 and 2, and ``bridge/collapsed`` 0.5 says that one update of two
found a collapse.
"""

from __future__ import annotations

import logging
from typing import ClassVar

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, register_trainer

from verl_bridge.integrations.verl.mixin import SearchTrainerMixin
from verl_bridge.plugin import TRAINERS


@register_trainer(TRAINERS["colocate_async"])
class BridgeTrainerColocateAsync(SearchTrainerMixin, PPOTrainerColocateAsync):
    """``trainer.v1.trainer_mode=bridge_colocate_async``: trainer and rollout take turns, partial rollouts go on."""

    verl_mode: ClassVar[str] = "colocate_async"


@register_trainer(TRAINERS["separate_async"])
class BridgeTrainerSeparateAsync(SearchTrainerMixin, PPOTrainerSeparateAsync):
    """``trainer.v1.trainer_mode=bridge_separate_async``: rollout on devices of its own, while the trainer works."""

    verl_mode: ClassVar[str] = "separate_async"

    def _setup(self) -> None:
        if not self._enable_hybrid_replicas:
            # verl 0.9.1 then logs a line at level INFO with print's flush=, which raises TypeError.
            logging.getLogger(PPOTrainerSeparateAsync.__module__).setLevel(logging.WARNING)
        super()._setup()
