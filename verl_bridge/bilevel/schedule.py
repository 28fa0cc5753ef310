"""Who learns in which step: the schedules of BRIDGE [paper: names, ours: definitions], decided only by numbers.

===========  ============================================  =====================
schedule     who learns in a step                          what the retriever follows
===========  ============================================  =====================
bridge       retriever, then policy                        L_RL and L_RAG
frozen       policy                                        nothing, none is trained
rag_then_rl  retriever alone for S steps, then the policy  L_RAG
rl_then_rag  policy alone for S steps, then the retriever  L_RAG
joint        policy, then retriever                        L_RL
===========  ============================================  =====================

A phase depends on the global step and the length of the first phase alone. With ``schedule_steps`` that is fixed, so a
resumed run goes on in the right phase; half of the run's steps, the default, changes when a run is resumed with more.
While the policy is frozen verl makes no update of it: its learning rate stays where it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_bridge.config.schema import BridgeConfig, ConfigError

PHASED = ("rag_then_rl", "rl_then_rag")


@dataclass(frozen=True)
class Learners:
    """Who learns in a step; ``policy_first``: the retriever learns after the policy's update."""

    policy: bool
    retriever: bool
    policy_first: bool = False


def learners(schedule: str, step: int, *, first_phase: int) -> Learners:
    """Who learns in ``step`` (from 1).

    Args:
        schedule: ``bridge``, ``frozen``, ``rag_then_rl``, ``rl_then_rag`` or ``joint``.
        step: verl's global step.
        first_phase: steps of the first phase of a schedule with two.
    """
    if schedule in PHASED:
        retriever = (step <= first_phase) == (schedule == "rag_then_rl")
        return Learners(policy=not retriever, retriever=retriever)
    return Learners(policy=True, retriever=schedule != "frozen", policy_first=schedule == "joint")


def retriever_objective(schedule: str, estimator: str) -> str | None:
    """What the retriever follows: ``penalised``, ``rag`` or ``rl``; None where it is frozen from start to end.

    The estimator ``drop`` [ours] is schedule ``bridge`` with a retriever that follows only the RAG loss.
    """
    if schedule == "bridge":
        return "rag" if estimator == "drop" else "penalised"
    return {"frozen": None, "joint": "rl"}.get(schedule, "rag")


def first_phase_steps(schedule: str, schedule_steps: int | None, total_steps: int) -> int:
    """Steps of the first phase: ``schedule_steps``, or half of the run's; 0 for schedules of one phase.

    Raises:
        ConfigError: the first phase would be the whole run.
    """
    if schedule not in PHASED:
        return 0
    steps = schedule_steps or max(1, total_steps // 2)
    if steps >= total_steps:
        raise ConfigError(
            f"verl_bridge.bridge.schedule_steps={schedule_steps}, a first phase of {steps} steps, leaves none for the "
            f"second phase of schedule={schedule} with trainer.total_training_steps={total_steps}: "
            f"{'lower it, or ' if steps > 1 else ''}raise trainer.total_training_steps"
        )
    return steps


def update_is_due(step: int, *, local_step: int, batches_per_step: int, interval: int) -> bool:
    """Whether the retriever learns from this policy batch, one in ``interval``.

    Args:
        step: verl's global step, from 1.
        local_step: the batch within it, from 0.
        batches_per_step: policy batches of a global step; more than one only in verl's separate_async mode.
        interval: policy batches between updates.
    """
    return ((step - 1) * batches_per_step + local_step + 1) % interval == 0


def count_updates(
    schedule: str, *, total_steps: int, first_phase: int, batches_per_step: int = 1, interval: int = 1
) -> int:
    """Retriever updates of the whole run, for the learning rate's course. Arguments as above."""
    start, end = {"rag_then_rl": (0, first_phase), "rl_then_rag": (first_phase, total_steps), "frozen": (0, 0)}.get(
        schedule, (0, total_steps)
    )
    return end * batches_per_step // interval - start * batches_per_step // interval


def check_course(bridge: BridgeConfig, *, updates: int, total_steps: int) -> None:
    """Whether the learning rate's course fits the updates of the run; a constant one fits any number, none as well.

    Raises:
        ConfigError: names the keys and what would fit. Also for a schedule of two phases without any update: nobody
            would learn in the retriever's.
    """
    if updates == 0 and bridge.schedule in PHASED:
        raise ConfigError(
            f"verl_bridge.bridge.interval={bridge.interval} leaves no retriever update, so nobody would learn in the "
            f"retriever's phase of schedule={bridge.schedule} with schedule_steps={bridge.schedule_steps} and "
            f"trainer.total_training_steps={total_steps}: lower the interval, or make that phase longer"
        )
    if bridge.lr_schedule == "constant":
        return
    if updates == 0:
        raise ConfigError(
            f"verl_bridge.bridge.lr_schedule={bridge.lr_schedule} ends with the last retriever update, but "
            f"verl_bridge.bridge.interval={bridge.interval}, schedule={bridge.schedule} and "
            f"schedule_steps={bridge.schedule_steps} leave none in trainer.total_training_steps={total_steps}: lower "
            "the interval, raise the steps, or set lr_schedule=constant"
        )
    if bridge.lr_warmup > updates:
        raise ConfigError(
            f"verl_bridge.bridge.lr_warmup={bridge.lr_warmup} is more than the {updates} retriever updates of "
            f"trainer.total_training_steps={total_steps}: lower it, raise the steps, or set lr_schedule=constant"
        )
