"""Weights through Ray's object store, from two ranks of a trainer to two rollout workers."""

import asyncio

import pytest
import torch


@pytest.fixture(scope="module")
def ray_session():
    import ray

    own = not ray.is_initialized()
    if own:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            object_store_memory=100_000_000,
        )
    yield ray
    if own:
        ray.shutdown()


def start(trainers, rollouts):
    """What verl's CheckpointEngineManager does before a transfer."""
    from verl_bridge.integrations.verl.cpu.checkpoint_engine import RayStoreCheckpointEngine

    metadata = [engine.prepare() for engine in (*trainers, *rollouts)]
    topology = RayStoreCheckpointEngine.build_topology(len(trainers), len(rollouts), metadata)
    for engines, arguments in zip((trainers, rollouts), topology, strict=True):
        for rank, engine in enumerate(engines):
            engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})


def test_every_rollout_gets_every_weight_of_each_transfer(ray_session, monkeypatch):
    from verl.checkpoint_engine import CheckpointEngineRegistry

    from verl_bridge.integrations.verl.cpu import CHECKPOINT_ENGINE
    from verl_bridge.integrations.verl.cpu.checkpoint_engine import RayStoreCheckpointEngine

    monkeypatch.setattr(RayStoreCheckpointEngine, "_board", None)

    def make(**arguments):  # a weight has 24 bytes: buckets of two
        return CheckpointEngineRegistry.new(CHECKPOINT_ENGINE, bucket_size=48, **arguments)

    trainers, rollouts = [make(is_master=rank == 0) for rank in range(2)], [make(), make()]

    async def receive(engine):
        return [(name, weight) async for name, weight in engine.receive_weights(global_steps=1)]

    async def transfer(factor):
        start(trainers, rollouts)
        receiving = [asyncio.create_task(receive(engine)) for engine in rollouts]  # asked before anything is sent
        for engine in trainers:
            weights, walked = {name: factor * torch.arange(6.0) for name in "abcde"}, []
            metrics = await engine.send_weights(((walked.append(n), (n, w))[1] for n, w in weights.items()), 1)
            assert walked == list("abcde")  # gathering a sharded weight takes all ranks, also those that send nothing
            assert len(engine._sent) == (3 if engine.is_master else 0)
            assert metrics == ({"sync/weights_mb": pytest.approx(5 * 24 / 1e6)} if engine.is_master else {})
            for weight in weights.values():
                weight.zero_()  # training goes on
        for received in await asyncio.gather(*receiving):
            assert [name for name, _ in received] == list("abcde")
            assert all(torch.equal(weight, factor * torch.arange(6.0)) for _, weight in received)
        for engine in (*trainers, *rollouts):
            engine.finalize()
        assert await receive(rollouts[0]) == []  # nobody holds them any longer
        return RayStoreCheckpointEngine._board

    async def twice():
        return await transfer(1.0), await transfer(-3.0)

    first, second = asyncio.run(asyncio.wait_for(twice(), timeout=120))
    assert first is second


def test_a_reader_waits_for_its_own_transfer():
    from verl_bridge.integrations.verl.cpu.weight_board import WeightBoard

    async def conversation():
        board = WeightBoard()
        await board.post(1, ["old"])
        waiting = asyncio.create_task(board.read(2))
        await asyncio.sleep(0)
        assert not waiting.done() and await board.read(1) == ["old"]
        await board.post(2, ["new"])
        assert await waiting == ["new"]
        await board.clear(1)  # late: those of transfer 2 stay
        assert await board.read(2) == ["new"]
        with pytest.raises(RuntimeError, match="transfer 1 were asked for after those of 2"):
            await board.read(1)

    asyncio.run(asyncio.wait_for(conversation(), timeout=10))
