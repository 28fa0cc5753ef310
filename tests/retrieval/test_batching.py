import asyncio
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.retrieval.batching import Batcher, Busy


class Work:
    """Answers every item with itself and the number of its batch; can be held at its start."""

    def __init__(self):
        self.batches, self.hold, self.entered = [], threading.Event(), threading.Event()
        self.hold.set()

    def __call__(self, items):
        self.entered.set()
        assert self.hold.wait(20)
        self.batches.append(items)
        return [(item, len(self.batches)) for item in items]


@pytest.fixture
def work():
    return Work()


async def entered(work):
    """Waits until the worker is in a batch."""
    await asyncio.get_running_loop().run_in_executor(None, work.entered.wait, 20)


def test_calls_gather_while_the_worker_is_busy_and_each_gets_its_own_answer(work):
    batcher = Batcher(work, max_batch=100)
    sizes = []
    batcher.on_batch = sizes.append

    async def run():
        work.hold.clear()
        first = batcher.submit("first", 1)
        await entered(work)
        others = [batcher.submit(i, 2) for i in range(20)]
        assert batcher.queued == 40
        work.hold.set()
        return await asyncio.gather(first, *others)

    answers = asyncio.run(run())
    assert answers == [("first", 1), *((i, 2) for i in range(20))]
    assert sizes == [1, 40] and batcher.queued == 0


def test_a_lone_call_waits_for_company_and_a_full_batch_does_not(work):
    async def seconds(batcher, calls):
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(batcher.submit(i, 1) for i in range(calls)))
        return loop.time() - started

    assert 0.05 <= asyncio.run(seconds(Batcher(work, max_wait=0.05), 1)) < 2
    # would wait an hour, but there is nothing to wait for
    assert asyncio.run(seconds(Batcher(work, max_wait=3600, max_batch=4), 8)) < 2
    assert [len(batch) for batch in work.batches] == [1, 4, 4]


def test_company_that_comes_while_a_lone_call_waits_joins_it(work):
    async def run():
        batcher = Batcher(work, max_wait=0.2)
        first = batcher.submit("a", 1)
        await asyncio.sleep(0)
        assert not work.entered.is_set()
        return await asyncio.gather(first, batcher.submit("b", 1))

    assert asyncio.run(run()) == [("a", 1), ("b", 1)]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), most=st.integers(1, 8))
def test_every_call_is_answered_once_in_order_and_no_batch_is_larger_than_allowed(sizes, most):
    work = Work()
    batcher = Batcher(work, max_batch=most, max_wait=0)

    async def run():
        return await asyncio.gather(*(batcher.submit((i, size), size) for i, size in enumerate(sizes)))

    answers = asyncio.run(run())
    assert [item for item, _ in answers] == list(enumerate(sizes))
    assert [item for batch in work.batches for item in batch] == list(enumerate(sizes))
    for batch in work.batches:
        assert len(batch) == 1 or sum(size for _, size in batch) <= most
    for batch, following in zip(work.batches, work.batches[1:], strict=False):  # none is smaller than it has to be
        if batch is not work.batches[0]:
            assert sum(size for _, size in batch) + following[0][1] > most


def test_a_full_queue_refuses_and_says_when_to_come_back(work):
    batcher = Batcher(work, max_queue=5)

    async def run():
        work.hold.clear()
        running = batcher.submit("running", 5)
        await entered(work)
        waiting = batcher.submit("waiting", 3)
        with pytest.raises(Busy, match=r"3 queries wait and 3 more exceed max_queue=5") as busy:
            batcher.submit("too much", 3)
        fits = batcher.submit("fits", 2)
        with pytest.raises(Busy):
            batcher.submit("one too many", 1)
        waiting.cancel()  # makes room at once, not only when its turn comes
        await asyncio.sleep(0)
        late = batcher.submit("late", 3)
        work.hold.set()
        return await asyncio.gather(running, fits, late), busy.value

    answers, busy = asyncio.run(run())
    assert answers == [("running", 1), ("fits", 2), ("late", 2)]
    assert busy.retry_after >= 1
    copy = pickle.loads(pickle.dumps(busy))
    assert (str(copy), copy.retry_after) == (str(busy), busy.retry_after)


def test_the_time_to_come_back_follows_from_how_long_queries_take(work):
    batcher = Batcher(work, max_queue=100)
    batcher._seconds_per_query = 0.25

    async def run():
        work.hold.clear()
        calls = [batcher.submit("running", 1)]
        await entered(work)
        calls.append(batcher.submit("waiting", 90))
        with pytest.raises(Busy) as busy:
            batcher.submit("too much", 11)
        work.hold.set()
        await asyncio.gather(*calls)
        return busy.value.retry_after

    assert asyncio.run(run()) == 23  # 90 × 0.25 s, rounded up


def test_a_call_whose_caller_went_away_is_never_worked_on(work):
    batcher = Batcher(work)

    async def ask(item):
        return await batcher.submit(item, 1)

    async def run():
        work.hold.clear()
        running = batcher.submit("running", 1)
        await entered(work)
        gone, stays = asyncio.create_task(ask("gone")), asyncio.create_task(ask("stays"))
        at_the_last_moment = batcher.submit("last moment", 1)
        await asyncio.sleep(0)
        assert batcher.queued == 3
        gone.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert batcher.queued == 2
        work.hold.set()
        running.add_done_callback(lambda _: None)
        at_the_last_moment.cancel()
        return await running, await stays

    assert asyncio.run(run()) == (("running", 1), ("stays", 2))
    assert work.batches == [["running"], ["stays"]] and batcher.queued == 0


def test_a_running_call_may_be_abandoned_too(work):
    batcher = Batcher(work)

    async def run():
        work.hold.clear()
        gone, stays = batcher.submit("gone", 1), batcher.submit("stays", 1)
        await entered(work)
        gone.cancel()
        work.hold.set()
        return await stays, await batcher.submit("next", 1)

    assert asyncio.run(run()) == (("stays", 1), ("next", 2))


def test_an_error_goes_to_the_callers_of_its_batch_alone():
    def work(items):
        if "bad" in items:
            raise ZeroDivisionError("bad batch")
        return items if "short" not in items else []

    batcher = Batcher(work, max_batch=2, max_wait=0.01)

    async def run():
        calls = [batcher.submit(item, 1) for item in ("a", "bad", "b", "c", "d", "short")]
        return await asyncio.gather(*calls, return_exceptions=True)

    a, bad, b, c, d, short = asyncio.run(run())
    assert isinstance(a, ZeroDivisionError) and isinstance(bad, ZeroDivisionError)
    assert (b, c) == ("b", "c")
    assert "gave 0 answers to 2 calls" in str(d) and isinstance(short, RuntimeError)


def test_what_runs_between_batches_is_seen_by_the_next_whole_batch(work):
    state = []

    def look(items):
        work(items)
        return [list(state)] * len(items)

    batcher = Batcher(look)

    async def run():
        work.hold.clear()
        before = batcher.submit("before", 1)
        await entered(work)
        waiting = [batcher.submit(i, 1) for i in range(5)]
        change = asyncio.create_task(batcher.run(state.append, "new"))
        await asyncio.sleep(0)
        work.hold.set()
        await change
        return await before, await asyncio.gather(*waiting)

    assert asyncio.run(run()) == ([], [["new"]] * 5)


def test_drain_answers_what_waits_and_refuses_what_comes(work):
    batcher = Batcher(work, max_batch=2, max_wait=3600)

    async def run():
        work.hold.clear()
        calls = [batcher.submit(i, 1) for i in range(5)]
        gone = batcher.submit("gone", 1)
        gone.cancel()
        await entered(work)
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        assert batcher.draining and not draining.done()
        with pytest.raises(Busy, match="shutting down"):
            batcher.submit("late", 1)
        work.hold.set()
        await draining
        assert all(call.done() for call in calls)
        await batcher.drain()  # again, with nothing to wait for
        return [(await call)[0] for call in calls]

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]
    assert [len(batch) for batch in work.batches] == [2, 2, 1]


def test_drain_ends_when_the_last_waiting_caller_leaves(work):
    batcher = Batcher(work, max_wait=3600)

    async def run():
        work.hold.clear()
        running = batcher.submit("running", 1)
        draining = asyncio.create_task(batcher.drain())
        await entered(work)
        running.cancel()
        work.hold.set()
        await asyncio.wait_for(draining, 20)

    asyncio.run(run())


def test_it_works_on_in_another_event_loop_when_the_first_ended_in_the_middle(work):
    batcher = Batcher(work)

    async def left_behind():
        work.hold.clear()
        batcher.submit("running", 1)
        await entered(work)
        batcher.submit("waiting", 1)

    asyncio.run(left_behind())
    work.hold.set()

    async def run():
        return await batcher.submit("fresh", 1)

    assert asyncio.run(run())[0] == "fresh"
    assert ["waiting"] not in work.batches and batcher.queued == 0


@pytest.mark.parametrize("bounds", [{"max_batch": 0}, {"max_queue": 0}, {"max_wait": -1}])
def test_bounds_without_room_for_a_query_are_refused(work, bounds):
    with pytest.raises(ValueError, match=f"{next(iter(bounds))}={next(iter(bounds.values()))}"):
        Batcher(work, **bounds)
