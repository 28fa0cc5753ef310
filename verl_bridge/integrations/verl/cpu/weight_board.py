"""Where the weights on their way to the rollout servers are; a module of its own, so that its process stays small."""

from __future__ import annotations

import asyncio
from typing import Any


class WeightBoard:
    """The Ray actor that knows where the weights of the latest transfer are: references to buckets in Ray's store."""

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.transfer = 0
        self.buckets: list[Any] = []

    async def post(self, transfer: int, buckets: list[Any]) -> None:
        """Say where the weights of a transfer are."""
        async with self.changed:
            self.transfer, self.buckets = transfer, buckets
            self.changed.notify_all()

    async def read(self, transfer: int) -> list[Any]:
        """References to the buckets of a transfer, once they are posted."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.transfer >= transfer)
            if self.transfer != transfer:
                raise RuntimeError(f"the weights of transfer {transfer} were asked for after those of {self.transfer}")
            return self.buckets

    async def clear(self, transfer: int) -> None:
        """Let go of a transfer's weights, so that the store can free them."""
        if self.transfer == transfer:
            self.buckets = []
