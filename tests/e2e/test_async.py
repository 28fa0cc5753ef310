"""Whole runs of verl's asynchronous trainers on CPU with both methods: two steps each."""

from __future__ import annotations

import json

import pytest

from verl_bridge.trace import SearchTrace

MAX_STALENESS = 4


@pytest.fixture(scope="module")
def begin(start):
    """Starts a run of an asynchronous mode that looks at itself; its ``updates`` are the records of the probe."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.e2e.probe_async")

    def run(name, mode, *overrides):
        made = start(
            name,
            "bridge_gca",
            2,
            f"trainer.v1.trainer_mode=probe_{mode}",
            # Half a batch ahead: the second step trains on rollouts of both steps' policies.
            f"trainer.v1.{mode}.num_warmup_batches=0.5",
            "trainer.val_before_train=False",
            *overrides,
        )
        made.updates = [json.loads(line) for line in (made.folder / "probe.jsonl").read_text().splitlines()]
        return made

    yield run
    patch.undo()


@pytest.fixture(scope="module")
def colocate(begin):
    return begin("colocate", "colocate_async", "trainer.save_freq=1")


@pytest.fixture(scope="module")
def separate(begin):
    host, sync = "verl_bridge_host=cpu_separate_async", "trainer.v1.separate_async.parameter_sync_step=2"
    return begin("separate", "separate_async", host, sync)


@pytest.fixture(params=["colocate", "separate"])
def run(request):
    return request.getfixturevalue(request.param)


def test_every_update_has_its_rollouts_and_its_adapter(run):
    separate = run.updates[0]["step"] == run.updates[1]["step"]
    places = [(u["step"], u["local_step"]) for u in run.updates]
    assert places == ([(1, 0), (1, 1), (2, 0), (2, 1)] if separate else [(1, 0), (2, 0)])
    assert all(len(u["rows"]) == (8 if separate else 16) for u in run.updates)
    # the retriever learns in each before the policy does
    assert [u["newest"] for u in run.updates] == list(range(len(run.updates)))
    assert [u["adapter_now"] for u in run.updates] == list(range(1, len(run.updates) + 1))
    assert all(value.norm() > 0 for name, value in run.adapter().items() if "lora_B" in name)


def test_the_actor_receives_grounded_advantages(run):
    assert all(u["reference_differs"] < 1e-6 for u in run.updates)
    assert max(u["grounding_moves"] for u in run.updates) > 0.01


def test_turns_record_the_version_that_served_them(run):
    for u in run.updates:
        versions = [version for row in u["served_by"] for version in row]
        assert versions and max(versions) <= u["newest"]
        assert u["newest"] - min(versions) <= MAX_STALENESS
        assert all(row == sorted(row) for row in u["served_by"])  # later turns never see an older adapter
    assert {version for row in run.updates[0]["served_by"] for version in row} == {0}
    last = run.metrics[2]
    assert 0 <= last["bridge/staleness_mean"] <= last["bridge/staleness_max"] <= MAX_STALENESS
    assert last["bridge/turns_stale"] == 0 and last["search/failed_share"] == 0


def test_spans_stay_exact(run):
    assert all(u["spans_fit"] and u["sampled_tokens_are_in_turns"] for u in run.updates)


def test_old_log_probs_are_of_the_weights_that_rollouts_began_the_step_with(run):
    """In every local update alike: rollouts of those weights alone agree with them to rounding."""
    compared = set()
    for n, u in enumerate(run.updates):
        whole = [row for row in u["rows"] if row["weights"] == [u["step"] - 1] * 2]
        assert all(row["old_and_rollout"] < 1e-4 for row in whole)
        compared |= {u["local_step"]} if whole else set()
        # in a step's later updates the policy itself has moved on, and old log-probs have not
        moved = max(row["old_and_present"] for row in u["rows"])
        if u["local_step"] == 0:
            assert moved < 1e-6
        elif any(before["grounding_moves"] for before in run.updates[:n]):  # some advantage was not 0
            assert moved > 1e-3
    assert compared == {u["local_step"] for u in run.updates}


def test_rollouts_are_begun_ahead(run):
    """The second step trains on some of an earlier policy and on some of its own."""
    oldest = [row["weights"][0] for u in run.updates if u["step"] == 2 for row in u["rows"]]
    assert {0, 1} == set(oldest)


def test_traces_of_every_local_update_are_saved(run):
    files = sorted(path.stem for path in (run.folder / "rollouts").iterdir())
    if len(run.updates) == 2:
        assert files == ["step_000001", "step_000002"]
    else:
        assert files == ["step_000001_0", "step_000001_1", "step_000002_0", "step_000002_1"]
    for file, u in zip(files, run.updates, strict=True):
        lines = (run.folder / "rollouts" / f"{file}.jsonl").read_text().splitlines()
        traces = [SearchTrace.from_dict(json.loads(line)["trace"]) for line in lines]
        served = [[t.adapter_version for t in trace.searches if t.status == "ok"] for trace in traces]
        assert sorted(served) == sorted(u["served_by"])


def test_colocated_training_resumes_with_what_was_under_way(begin, colocate):
    checkpoint = colocate.folder / "checkpoints" / "global_step_1"
    assert (checkpoint / "retriever" / "adapter" / "adapter_model.safetensors").is_file()
    assert (checkpoint / "transfer_queue").exists()
    resume = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"
    resumed = begin("resumed", "colocate_async", *resume)
    (update,) = resumed.updates
    assert update["step"] == 2 and update["newest"] == 1 and update["adapter_now"] == 2
    assert update["restored_prompts"] == 2  # six were begun, four trained on
    assert update["reference_differs"] < 1e-6 and update["spans_fit"]
    # rollouts that were finished keep the version that served them; those begun again are served by the saved adapter
    assert {version for row in update["served_by"] for version in row} <= {0, 1}
    assert max(version for row in update["served_by"] for version in row) == 1
