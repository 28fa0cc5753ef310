"""A retriever's process may die at any moment; here it is an object that is made anew over the same keeper."""

import asyncio
import hashlib
from concurrent.futures import Future
from functools import partial

import pytest
import ray
import torch

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval import actor
from verl_bridge.retrieval.actor import RetrieverActor
from verl_bridge.retrieval.keeper import Keeper

QUERIES = ["money of Hollin", "money of Borsk"]


class Handle:
    """A keeper's Ray handle: every method is done at once, fails as that of a dead actor, or is never done."""

    def __init__(self, keeper):
        self.dead, self.hangs, self.kept = False, False, 0
        for name in ("keep", "current", "last_update"):
            setattr(self, name, self._method(getattr(keeper, name)))

    def _method(self, function):
        def remote(*arguments):
            answer = Future()
            if self.dead:
                answer.set_exception(ray.exceptions.ActorDiedError())
            elif not self.hangs:
                self.kept += len(arguments) > 0
                answer.set_result(function(*arguments))
            return Reference(answer)

        handle = type("Method", (), {"remote": staticmethod(remote)})
        return handle


class Reference:
    def __init__(self, answer):
        self._answer = answer

    def future(self):
        return self._answer


@pytest.fixture
def keeper(monkeypatch):
    handle = Handle(Keeper())
    monkeypatch.setattr(ray, "get_actor", {"k": handle}.__getitem__)
    return handle


@pytest.fixture
def make(keeper, places_file, places_index_folder, minilm):
    torch.set_num_threads(1)
    files = {"corpus": str(places_file), "index": str(places_index_folder), "encoder": minilm, "top_k": 4}

    def make(learns=True, kind=RetrieverUpdater):
        updater = partial(kind, lr=1e-2, max_staleness=1) if learns else None
        return RetrieverActor(keeper="k", updater=updater, **files)

    return make


def batch(answers, versions):
    ids = [answer["ids"] for answer in answers]
    return RetrieverBatch(QUERIES, ids, [[-6.0, -6.0, -6.0, -1.0]] * 2, [1.0] * 2, [True] * 2, versions)


def search(retriever):
    return asyncio.run(retriever.search(QUERIES))


def test_a_new_process_goes_on_from_what_was_acknowledged(make, tmp_path):
    first = make()
    start = search(first)
    again = make()
    assert search(again) == start and start[0]["adapter_version"] == 0  # nothing was acknowledged yet
    one = asyncio.run(first.update(batch(start, [0, 0]), "one"))
    learnt = search(first)
    second = make()
    assert search(second) == learnt and learnt[0]["adapter_version"] == 1
    assert asyncio.run(second.known_versions()) == [0, 1]  # what turns may have been served by as well
    assert asyncio.run(second.update(batch(start, [0, 0]), "one")) == one  # done already
    assert search(second) == learnt
    states = []
    for retriever in (first, second):
        asyncio.run(retriever.update(batch(learnt, [1, 1]), "two"))
        states.append(retriever._updater.state_bytes())
    assert states[0] == states[1]  # the one that died and the one that did not

    asyncio.run(second.save(str(tmp_path / "two")))
    asyncio.run(second.update(batch(search(second), [2, 2]), "three"))
    asyncio.run(second.load(str(tmp_path / "two")))
    third = make()
    assert third._updater.state_bytes() == states[1]
    assert asyncio.run(third.update(batch(start, [1, 1]), "two"))["version"] == 3  # after a load nothing counts as done


@pytest.mark.parametrize("kind", [RetrieverUpdater, TwoStateUpdater])
def test_one_that_is_killed_in_a_step_restores_served_versions_and_both_states(make, keeper, kind):
    """The step had moved adapter, moments and counters, and kept nothing."""

    def learn(retriever, name, versions):
        return asyncio.run(retriever.update(batch(start, versions), name))

    first = make(kind=kind)
    start = search(first)
    learn(first, "one", [0, 0])
    learn(first, "two", [1, 0])  # one turn of the version before
    acknowledged, kept = first._updater.state_bytes(), keeper.kept
    first._updater.update(batch(start, [2, 1]))
    assert first._updater.state_bytes() != acknowledged and keeper.kept == kept

    second = make(kind=kind)
    assert hashlib.sha256(second._updater.state_bytes()).digest() == hashlib.sha256(acknowledged).digest()
    assert asyncio.run(second.known_versions()) == [1, 2]
    state = second._updater.state()
    parts = {"adapter", "initial", "served/1"} | ({"lower"} if kind is TwoStateUpdater else set())
    assert parts <= state.adapters.keys()
    if kind is TwoStateUpdater:  # a state of its own, with moments of its own
        assert any(not torch.equal(value, state.adapters["adapter"][n]) for n, value in state.adapters["lower"].items())
        assert state.moments["lower_optimizer"]
    again = learn(second, "three", [2, 1])
    assert again["version"] == 3 and second._updater.state_bytes() == first._updater.state_bytes()


@pytest.mark.parametrize("how", ["dead", "hangs"])
def test_what_is_searched_was_kept_before(make, keeper, monkeypatch, how):
    monkeypatch.setattr(actor, "KEEPER_TIMEOUT", 0.05)
    retriever = make()
    before = search(retriever)
    setattr(keeper, how, True)
    lost = r"the keeper of the retriever's state is lost or hangs.*resume"
    with pytest.raises(RuntimeError, match=f"^{lost}"):
        asyncio.run(retriever.update(batch(before, [0, 0]), "one"))
    with pytest.raises(RuntimeError, match=rf"^adapter version 1 is not searched with: {lost}"):
        search(retriever)
    with pytest.raises(RuntimeError, match="keeper"):  # better none than a stale one
        make()
    setattr(keeper, how, False)
    assert search(make()) == before  # as if the update had not begun


def test_nothing_is_searched_either_when_the_state_cannot_be_written(make, monkeypatch):
    retriever = make()
    before = search(retriever)
    monkeypatch.setattr(retriever._updater, "state_bytes", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(retriever.update(batch(before, [0, 0]), "one"))
    with pytest.raises(RuntimeError, match="version 1 is not searched with: division by zero"):
        search(retriever)


def test_an_update_that_fails_in_the_learner_leaves_what_is_served(make, keeper, monkeypatch):
    retriever = make()
    before, kept = search(retriever), keeper.kept
    with pytest.raises(ValueError, match="turn 0 was served by adapter version 5"):
        asyncio.run(retriever.update(batch(before, [5, 5]), "one"))
    assert search(retriever) == before and keeper.kept == kept


def test_one_that_only_serves_comes_back_with_what_was_published(make, keeper):
    learner, server = make(), make(learns=False)
    asyncio.run(learner.update(batch(search(learner), [0, 0]), "one"))
    version, adapter = asyncio.run(learner.adapter_bytes())
    keeper.keep.remote(0, None)  # each has a keeper of its own; here they share one
    kept = keeper.kept
    asyncio.run(server.publish(adapter, version))
    assert keeper.kept == kept + 1
    again = make(learns=False)
    assert search(again) == search(server) and search(server)[0]["adapter_version"] == 1
    asyncio.run(again.publish(adapter, version))  # the same again, after an answer that was lost
    with pytest.raises(ValueError, match="damaged"):
        asyncio.run(again.publish(adapter[:-9], 2))
    assert search(make(learns=False)) == search(server)


def test_a_keeper_holds_one_state_whole():
    keeper = Keeper()
    assert keeper.current() == (0, None) and keeper.last_update() is None
    keeper.keep(3, b"three", ("name", {"version": 3}))
    assert keeper.current() == (3, b"three") and keeper.last_update() == ("name", {"version": 3})
    keeper.keep(2, b"two")
    assert keeper.current() == (2, b"two") and keeper.last_update() is None
