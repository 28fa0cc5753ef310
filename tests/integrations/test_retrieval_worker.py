"""Who learns, where, and what the trainer is told when that fails."""

import pytest
from standins import FILES, opened, settings

from verl_bridge.integrations import retrieval
from verl_bridge.retrieval.actor import RetrieverLost


def test_an_actor_alone_serves_what_it_learns(started):
    chosen = settings(family="e5", query_prefix="q: ", restarts=2, device="cuda", num_gpus=0.25)
    made = retrieval.TrainerRetrieval(chosen, seed=7, updater="updater", num_gpus=1.0, device="cuda:9")
    ((name, given),) = started.actors.items()
    assert (name, given["updater"], given["timeout"], given["threads"]) == ("verl_bridge_retriever", "updater", 300, 1)
    assert (given["restarts"], given["device"], given["num_gpus"]) == (2, "cuda", 0.25)
    files = {key: given[key] for key in (*FILES, "family", "query_prefix", "passage_prefix", "lora_rank", "seed")}
    assert files == {**FILES, "family": "e5", "query_prefix": "q: ", "passage_prefix": None, "lora_rank": 16} | {
        "seed": 7
    }
    assert not made.publishes and not started.served and started.actor.waited
    made.check_served([0, 0])
    result = made.update("batch")
    assert (result.version, result.metrics) == (1, {"bridge/loss": 0.5})
    made.check_served([1])
    with pytest.raises(RuntimeError, match="by adapter version 0, but 1"):  # in synchronous training
        made.check_served([1, 0])
    assert "publish" not in [method for method, *_ in started.actor.asked]
    made.stop()


def test_a_learner_of_its_own_publishes_to_the_actor_that_serves(started):
    chosen = settings(actor_name="r", device="cuda", num_gpus=0.5, restarts=1)
    made = retrieval.TrainerRetrieval(chosen, seed=1, updater="u", worker="own", num_gpus=0.2, num_cpus=3.0)
    server, learner = started.actors["r"], started.actors["r_learner"]
    assert (server["updater"], server["device"], server["num_gpus"]) == (None, "cuda", 0.5)
    assert (learner["updater"], learner["device"], learner["num_gpus"], learner["num_cpus"]) == ("u", "cuda", 0.2, 3.0)
    assert not learner["searchable"] and server.get("searchable", True) and opened(server) == opened(learner)
    assert server["restarts"] == learner["restarts"] == 1
    serving, learning = started.handles["r"], started.handles["r_learner"]
    assert made.publishes and serving.waited and learning.waited
    assert serving.asked == [("publish", b"adapter 0", 0, True)]
    result = made.update("batch")
    assert serving.asked[-1] == ("publish", b"adapter 1", 1, False) and result.version == serving.version == 1
    assert result.metrics["bridge/loss"] == 0.5 and result.metrics["bridge/publish_seconds"] >= 0
    made.check_served([1])
    assert made.known_versions() == {0, 1} and made.documents(["x"]) == [{"id": "x"}]
    made.load("checkpoint")
    assert serving.asked[-1] == ("publish", b"adapter 7", 7, True)
    made.save("there")
    made.save_adapter("here")
    assert learning.asked[-2:] == [("save", "there"), ("save_adapter", "here")]
    serving.fails = RetrieverLost("it died")
    with pytest.raises(RuntimeError, match=r"version 8 is not served by all of the actor 'r': it died; the run stops"):
        made.update("batch")


def test_a_worker_s_own_device_and_every_update_s_own_name(started):
    made = retrieval.TrainerRetrieval(settings(), seed=1, updater="u", worker="own", device="cuda:1")
    assert started.actor is started.handles["verl_bridge_retriever_learner"]
    assert [given["device"] for given in started.actors.values()] == ["cpu", "cuda:1"]
    made.update("batch")
    made.update("batch")
    names = [call[2] for call in started.actor.asked if call[0] == "update"]
    assert len(set(names)) == 2 and all(names)


def test_older_versions_are_normal_only_where_that_is_said(started):
    made = retrieval.TrainerRetrieval(settings(), seed=0, updater="u")
    made.update("batch")
    made.update("batch")
    made.check_served([0, 1, 2], older=True)
    with pytest.raises(RuntimeError, match="by adapter version 3, but 2"):  # nobody has learnt that one
        made.check_served([0, 3], older=True)
    with pytest.raises(RuntimeError, match="by adapter version 0, 1, but 2"):
        made.check_served([0, 1, 2])


def test_a_lost_worker_and_a_failing_disk_are_told_with_the_last_good_version(started):
    made = retrieval.TrainerRetrieval(settings(), seed=0, updater="u")
    made.update("batch")
    started.actor.fails = RetrieverLost("the retriever 'r' died in 'update'")
    for work in (lambda: made.update("batch"), lambda: made.save("x"), lambda: made.load("x")):
        with pytest.raises(RuntimeError, match=r"died in 'update'; adapter version 1 is the last good one: resume"):
            work()
    started.actor.fails = OSError(28, "No space left on device")
    for work in (made.save, made.save_adapter):
        with pytest.raises(RuntimeError, match=r"^/runs/step_4 was not written: .*No space left.*resume from the last"):
            work("/runs/step_4")
    for refused in (ValueError("it is damaged"), KeyError("it is damaged")):  # what is refused explains itself
        started.actor.fails = refused
        for work in (made.load, made.update):
            with pytest.raises(type(refused), match=r"^'?it is damaged'?$"):
                work("x")


def test_an_update_that_fails_says_from_where_to_resume(started):
    made = retrieval.TrainerRetrieval(settings(), seed=0, updater="u")
    made.update("batch")

    def failing():
        started.actor.fails = MemoryError("tried to allocate 2 GiB")
        with pytest.raises(RuntimeError) as error:
            made.update("batch")
        started.actor.fails = None
        return str(error.value)

    reason = "the retriever's update failed: MemoryError: tried to allocate 2 GiB; adapter version"
    assert failing() == f"{reason} 1 is the last good one: resume from the last checkpoint"
    made.save("/runs/global_step_4/retriever")
    assert failing() == f"{reason} 1 is the last good one: resume from /runs/global_step_4/retriever"
    started.actor.fails = OSError("disk")
    with pytest.raises(RuntimeError, match=r"/runs/global_step_5/retriever was not .*resume from /runs/global_step_4"):
        made.save("/runs/global_step_5/retriever")
    started.actor.fails = RetrieverLost("it died")
    with pytest.raises(RetrieverLost, match=r"it died; adapter version 1 .*from /runs/global_step_4/retriever$"):
        made.update("batch")
    started.actor.fails = None
    made.load("/runs/global_step_2/retriever")
    assert failing() == f"{reason} 7 is the last good one: resume from /runs/global_step_2/retriever"
