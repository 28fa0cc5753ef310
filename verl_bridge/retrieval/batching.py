"""Requests of many callers gathered into batches for one worker thread; knows nothing of models or hosts.

While the worker is busy, calls gather. While it is idle, the oldest call waits for others, but never longer than
``max_wait``, and not at all where callers come one by one. Everything that touches the model runs on that one thread
in turn, so whatever runs between two batches (a new adapter, an update) is seen by all of the next batch and by none
of the one before.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class Busy(Exception):
    """The queue is full, or the service drains; nothing was done.

    Args:
        reason: what to tell the caller.
        retry_after: whole seconds after which another try makes sense.
    """

    def __init__(self, reason: str, retry_after: int = 1) -> None:
        super().__init__(reason, retry_after)  # both, so that it survives pickling on its way through Ray
        self.reason, self.retry_after = reason, retry_after

    def __str__(self) -> str:
        return self.reason


class _Call(NamedTuple):
    item: Any
    size: int
    arrived: float


class Batcher:
    """Gathers calls into batches; works in whatever event loop it is called from, one at a time.

    Args:
        work: answers a list of items with a list of as many answers, on the worker thread. An exception goes to all
            callers of that batch.
        max_batch: most queries in a batch; a single larger call is a batch of its own, so that one answer is from one
            state of the model.
        max_wait: seconds the oldest call waits for others while the worker is idle.
        max_queue: most queries that wait; a call beyond that is refused.
        initializer: runs first on the worker thread.

    Raises:
        ValueError: a bound that leaves no room for a query, or a negative wait.
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[Any]],
        *,
        max_batch: int = 128,
        max_wait: float = 0.002,
        max_queue: int = 8192,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        if max_batch < 1 or max_queue < 1 or max_wait < 0:
            raise ValueError(
                f"max_batch={max_batch}, max_queue={max_queue}, max_wait={max_wait} s cannot serve; "
                "use at least 1, 1 and 0"
            )
        self.max_batch, self.max_wait, self.max_queue = max_batch, max_wait, max_queue
        self.queued = 0  # queries that wait; those in the running batch no longer count
        self.draining = False
        self.on_batch: Callable[[int], None] = lambda queries: None  # told the size of every batch
        self._work = work
        self._worker = ThreadPoolExecutor(1, "retriever", initializer=initializer)
        self._seconds_per_query = 0.0  # moving average, for retry_after
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reset()

    def _reset(self) -> None:
        self._waiting: OrderedDict[asyncio.Future, _Call] = OrderedDict()
        self.queued = 0
        self._busy = False
        self._one_by_one = False  # the last batch was one call, and nobody else waited
        self._timer: asyncio.TimerHandle | None = None
        self._idle: list[asyncio.Future] = []  # of those who wait in drain

    def submit(self, item: Any, size: int) -> asyncio.Future:
        """Queues a call; its answer is the future's result. Cancelling the future takes the call out of the queue.

        Args:
            item: handed to ``work``.
            size: how many queries it holds.

        Raises:
            Busy: the queue is full, or :meth:`drain` was called.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a loop that ended took its callers with it
            self._loop = loop
            self._reset()
        if self.draining:
            raise Busy("the service is shutting down; ask another one, or this one once it is back", 5)
        if self.queued + size > self.max_queue:
            raise Busy(
                f"{self.queued} queries wait and {size} more exceed max_queue={self.max_queue}; try again later",
                max(1, math.ceil(self.queued * self._seconds_per_query)),
            )
        answer = loop.create_future()
        answer.add_done_callback(self._left)
        self._waiting[answer] = _Call(item, size, loop.time())
        self.queued += size
        self._next()
        return answer

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function on the worker thread and waits for it, for what comes before there is an event loop."""
        return self._worker.submit(function).result()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on the worker thread, after the batch that is there now and before the next."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def drain(self) -> None:
        """Refuses new calls from now on and returns when all that wait are answered."""
        self.draining = True
        if self._waiting or self._busy:
            done = asyncio.get_running_loop().create_future()
            self._idle.append(done)
            self._next(at_once=True)
            await done

    def _left(self, answer: asyncio.Future) -> None:
        call = self._waiting.pop(answer, None)  # only a cancelled call is still there when its future is done
        if call is not None:
            self.queued -= call.size
            self._settle()

    def _next(self, at_once: bool = False) -> None:
        """Starts a batch if it is time, else makes sure to be called again when it is."""
        if self._busy or not self._waiting:
            return
        oldest = next(iter(self._waiting.values()))
        remaining = oldest.arrived + self.max_wait - self._loop.time()
        if at_once or self.draining or self._one_by_one or self.queued >= self.max_batch or remaining <= 0:
            self._start()
        elif self._timer is None:
            self._timer = self._loop.call_later(remaining, self._waited)

    def _waited(self) -> None:
        self._timer = None
        self._next(at_once=True)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, size = [], 0
        while self._waiting:
            answer, call = next(iter(self._waiting.items()))
            if batch and size + call.size > self.max_batch:
                break
            self._waiting.popitem(last=False)
            self.queued -= call.size
            if not answer.done():  # else cancelled a moment ago
                batch.append((answer, call))
                size += call.size
        if not batch:
            self._settle()
            return
        self._busy, self._one_by_one = True, len(batch) == 1 and not self._waiting
        self.on_batch(size)
        loop, started = self._loop, self._loop.time()

        def finish(done: asyncio.Future) -> None:
            self._seconds_per_query += 0.2 * ((loop.time() - started) / max(size, 1) - self._seconds_per_query)
            self._finish([answer for answer, _ in batch], done)

        loop.run_in_executor(self._worker, self._work, [call.item for _, call in batch]).add_done_callback(finish)

    def _finish(self, callers: list[asyncio.Future], done: asyncio.Future) -> None:
        self._busy = False
        try:
            answers = done.result()
            if len(answers) != len(callers):
                raise RuntimeError(f"the batch's work gave {len(answers)} answers to {len(callers)} calls")
        except Exception as error:
            answers = [error] * len(callers)
        for caller, answer in zip(callers, answers, strict=True):
            if caller.done():  # went away
                continue
            if isinstance(answer, Exception):
                caller.set_exception(answer)
            else:
                caller.set_result(answer)
        self._next()
        self._settle()

    def _settle(self) -> None:
        if not self._busy and not self._waiting:
            for done in self._idle:
                if not done.done():
                    done.set_result(None)
            self._idle.clear()
