"""verl on a machine without an accelerator: platform, engines, workers and a rollout server for device ``cpu``.

Nothing of verl is changed. :func:`register` puts entries into verl's own registries, each when the module holding the
registry is imported, so a process pays only for what it uses. Ray workers inherit ``VERL_PLATFORM=cpu`` and repeat it.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

ROLLOUT = "hf_cpu"
CHECKPOINT_ENGINE = "ray_cpu"
THREADS_VARIABLE = "VERL_BRIDGE_CPU_THREADS"


def register() -> None:
    """Register the platform now; everything else once the verl registry it belongs to exists."""
    from verl.plugin.platform import PlatformRegistry

    from verl_bridge.integrations.verl.cpu.platform import PlatformCPU

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    register_post_import_hook(_register_engines, "verl.workers.engine.fsdp.transformer_impl")
    register_post_import_hook(_register_rollout_adapter, "verl.workers.rollout.base")
    register_post_import_hook(_register_rollout_replica, "verl.workers.rollout.replica")
    register_post_import_hook(_register_checkpoint_engine, "verl.checkpoint_engine")


def threads() -> int:
    """Threads of one compute process: ``VERL_BRIDGE_CPU_THREADS``, by default every core this process may use.

    Rollout and training alternate, so each may have them all; OMP_WAIT_POLICY=PASSIVE keeps the idle side quiet.
    """
    value = os.environ.get(THREADS_VARIABLE, "")
    if not value:
        return len(os.sched_getaffinity(0))
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{THREADS_VARIABLE}={value!r}: give a positive number of threads, or unset it")
    return int(value)


def prepare_thread() -> None:
    """Set up the calling thread for computing: thread count, and denormals as zero (they are slow on a CPU)."""
    import torch

    torch.set_num_threads(threads())
    torch.set_flush_denormal(True)


def cpu_worker_classes(verl_mode: str) -> dict[str, type]:
    """The worker class for each role by its name in ``verl.trainer.ppo.utils.Role``, under one of verl's trainers."""
    from verl_bridge.integrations.verl.cpu import worker

    # separate_async computes old log-probs with weights it has put aside.
    actor = worker.CPUDetachActorWorker if verl_mode == "separate_async" else worker.CPUActorRolloutRefWorker
    actor_roles = ("Actor", "ActorRollout", "ActorRolloutRef", "RefPolicy")
    return {**dict.fromkeys(actor_roles, actor), "Critic": worker.CPUTrainingWorker}


def swap_cpu_workers(trainer: Any) -> None:
    """Replace the worker classes of a V1 trainer by ours; call after its ``_init_resource_pool_mgr``.

    The rollout servers are started here too, unless the rollout is another one: they load their imports while the
    workers load theirs, and the replicas find them by name.

    Raises:
        ValueError: the trainer holds a role that has no CPU worker.
    """
    import ray

    classes = cpu_worker_classes(trainer.trainer_mode)
    for role in trainer.role_worker_mapping:
        if role.name not in classes:
            raise ValueError(f"role {role.name!r} has no worker for device cpu; there are {sorted(classes)}")
        trainer.role_worker_mapping[role] = ray.remote(classes[role.name])
    settings = trainer.config.actor_rollout_ref
    if settings.rollout.name == ROLLOUT:
        from verl_bridge.integrations.verl.cpu.rollout import start_server

        # An actor lives as long as someone holds it.
        trainer.cpu_rollout_servers = [
            start_server(settings.rollout, settings.model, rank) for rank in range(rollout_replicas(trainer))
        ]


def rollout_replicas(trainer: Any) -> int:
    """How many replicas a V1 trainer will have, ranked from 0: one per rank of its own, then the standalone ones."""
    config = trainer.config
    rollout = config.actor_rollout_ref.rollout
    replicas = 0
    if getattr(trainer, "_enable_hybrid_replicas", True):
        replicas += config.trainer.nnodes * config.trainer.n_gpus_per_node
    if trainer.trainer_mode == "separate_async":
        replicas += rollout.nnodes * rollout.n_gpus_per_node
    return replicas


def _register_engines(transformer_impl: ModuleType) -> None:
    from verl_bridge.integrations.verl.cpu.engine import CPULanguageModelEngine, CPUValueModelEngine

    registry = transformer_impl.EngineRegistry
    for model_type, engine in (("language_model", CPULanguageModelEngine), ("value_model", CPUValueModelEngine)):
        registry.register(model_type=model_type, backend="fsdp2", device="cpu")(engine)


def _register_rollout_adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "verl_bridge.integrations.verl.cpu.rollout.CPURollout"


def _register_rollout_replica(replica: ModuleType) -> None:
    def load() -> type:
        from verl_bridge.integrations.verl.cpu.rollout import CPURolloutReplica

        return CPURolloutReplica

    replica.RolloutReplicaRegistry.register(ROLLOUT, load)


def _register_checkpoint_engine(checkpoint_engine: ModuleType) -> None:
    import verl_bridge.integrations.verl.cpu.checkpoint_engine  # noqa: F401  registers itself as ray_cpu
