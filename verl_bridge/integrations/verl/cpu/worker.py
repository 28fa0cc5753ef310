"""verl's workers with the process group started first.

verl names the backend ``cpu:gloo,<device>:<backend>``, which on a CPU names the device twice and is refused; it starts
no group where there is one already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.config import TrainingWorkerConfig
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

    def __init__(self, config: TrainingWorkerConfig) -> None:
        init_process_group()
        super().__init__(config)


class CPUActorRolloutRefWorker(ActorRolloutRefWorker):
    """Actor, rollout adapter and reference policy: verl starts the group in ``init_model``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        init_process_group()
        super().init_model()


class CPUDetachActorWorker(DetachActorWorker):
    """The same for separate_async, which puts weights aside (``save_model_to_cpu``) and takes them up again."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        init_process_group()
        super().init_model()

    @property
    def copy_handler(self) -> Callable[[torch.nn.Module], Any]:
        """verl's for FSDP2, with tensors of their own.

        verl copies by moving shards to the CPU, which for shards that are there already gives the live weights: what
        was put aside would change with every update, and old log-probs would silently be the new policy's.
        """
        shards_of = super().copy_handler

        def copy(module: torch.nn.Module) -> Any:
            shards, spec = shards_of(module)
            return {name: (tensor.clone(), its_spec) for name, (tensor, its_spec) in shards.items()}, spec

        return copy
