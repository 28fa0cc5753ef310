"""Weights from the trainer to standalone rollout servers through Ray's object store: checkpoint engine ``ray_cpu``.

The trainer's first rank puts the weights into the store in buckets and tells one small actor, the board, where they
are; every rollout worker asks the board and reads them. verl's other engines need a GPU or a network card.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, ClassVar

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from verl_bridge.integrations.verl.cpu import CHECKPOINT_ENGINE
from verl_bridge.integrations.verl.cpu.weight_board import WeightBoard


@CheckpointEngineRegistry.register(CHECKPOINT_ENGINE)
class RayStoreCheckpointEngine(CheckpointEngine):
    """One end of the transfer: in a worker of the trainer, or beside a rollout server.

    Args:
        bucket_size: bytes after which a bucket is put into the store.
        is_master: whether this rank of the trainer sends; the others only take part in gathering shards.
    """

    _board: ClassVar[Any] = None  # in the driver: one actor for the whole run, for starting one takes seconds
    _transfers: ClassVar[int] = 0

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.board: Any = None
        self.transfer = 0
        self._sent: list[ray.ObjectRef] = []  # the store keeps an object while its owner, this process, refers to it

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Called in the driver before each transfer: everybody gets the board and the transfer's number."""
        if cls._board is None:
            cls._board = ray.remote(WeightBoard).options(num_cpus=0).remote()
        cls._transfers += 1

        def to_all(ranks: int) -> dict[str, list[Any]]:
            return {"board": [cls._board] * ranks, "transfer": [cls._transfers] * ranks}

        return to_all(actor_wg_world_size), to_all(rollout_world_size)

    def init_process_group(self, board: Any, transfer: int) -> None:
        self.board, self.transfer = board, transfer

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Put every weight into the store; on other ranks than the first, only walk through them.

        Returns:
            ``sync/weights_mb``, the megabytes sent, for verl's metrics.
        """
        bucket: dict[str, torch.Tensor] = {}
        size = total = 0
        for name, weight in weights:  # every rank has to: a sharded weight is gathered as it is asked for
            if not self.is_master:
                continue
            bucket[name] = weight.detach().to("cpu")
            size, total = size + weight.nbytes, total + weight.nbytes
            if size >= self.bucket_size:
                self._sent.append(ray.put(bucket))  # copies, so training may go on changing the live ones
                bucket, size = {}, 0
        if not self.is_master:
            return {}
        if bucket:
            self._sent.append(ray.put(bucket))
        await self.board.post.remote(self.transfer, self._sent)
        return {"sync/weights_mb": total / 1e6}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every weight by name, a bucket in memory at a time, once the trainer has sent them."""
        for bucket in await self.board.read.remote(self.transfer):
            for name, weight in (await bucket).items():
                yield name, weight

    def finalize(self) -> None:
        """Let go of the weights; called when every rollout has them."""
        if self._sent:
            self.board.clear.remote(self.transfer)
        self._sent = []
