"""verl's workers with the process group started first.

verl names the backend ``cpu:gloo,<device>:<backend>``, which on a CPU names the device twice and is refused; it starts
no group where there is one already.
"""

from __future__ import annotations

import os

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


def init_process_group() -> None:
    """Start the gloo group of this worker's ranks from the environment verl gave it, unless one is running."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "cpu:gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


class CPUTrainingWorker(TrainingWorker):
    """A critic's worker: verl starts the group in its constructor."""

    def __init__(self, config):
        init_process_group()
        super().__init__(config)


class CPUActorRolloutRefWorker(ActorRolloutRefWorker):
    """Actor, rollout adapter and reference policy: verl starts the group in ``init_model``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        init_process_group()
        super().init_model()
