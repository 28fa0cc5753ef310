"""Weights put aside by separate_async's worker, in this process: verl's own methods over our engine."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def engine(host_config, process_group):
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine import EngineRegistry

    config = host_config().actor_rollout_ref
    actor = omega_conf_to_dataclass(config.actor)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=omega_conf_to_dataclass(config.model),
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    engine.initialize()
    return engine


def worker_over(engine, cls):
    worker = cls.__new__(cls)
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    worker._strategy_handlers = None
    worker.actor = SimpleNamespace(engine=engine)
    return worker


def weights(engine):
    return {name: p.detach().full_tensor().clone() for name, p in engine.module.named_parameters()}


def put_aside_and_back(engine, cls):
    """Whether weights put aside come back after an update, and those of the update after that."""
    worker, before = worker_over(engine, cls), weights(engine)
    worker.save_model_to_cpu(0)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.5)
    updated = weights(engine)
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    first = weights(engine)
    worker.restore_model_from_cpu(1)
    worker.clear_cpu_model(1)
    second = weights(engine)
    assert list(worker.cpu_saved_models) == [0]
    return (
        all(torch.equal(first[name], value) for name, value in before.items()),
        all(torch.equal(second[name], value) for name, value in updated.items()),
    )


def test_weights_put_aside_stay_as_they_were(engine):
    from verl_bridge.integrations.verl.cpu.worker import CPUDetachActorWorker

    assert put_aside_and_back(engine, CPUDetachActorWorker) == (True, True)


def test_verls_own_copy_would_follow_the_live_weights(engine):
    """Why there is a copy handler of ours: once this fails, verl copies and it can go."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    assert put_aside_and_back(engine, DetachActorWorker)[0] is False
