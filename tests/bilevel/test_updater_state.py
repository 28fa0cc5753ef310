"""Saving and resuming: a resumed run is the uninterrupted one, and nothing half-read or half-written is ever used."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from tests.bilevel.places import PLACES, batch_of, differing
from verl_bridge.bilevel.state import LearnerState
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.bilevel.updater import RetrieverUpdater

SETTINGS = {
    "lr": 1e-3,
    "minibatch_size": 3,
    "epochs": 2,
    "max_staleness": 1,
    "seed": 5,
}  # minibatches use the generator
SCHEDULE = {"lr_schedule": "cosine", "lr_warmup": 1, "total_updates": 6, "weight_decay": 0.01}
KINDS = {
    "one state": (RetrieverUpdater, {}),
    "bfloat16": (RetrieverUpdater, {"compute_dtype": "bfloat16"}),
    "two states": (TwoStateUpdater, {}),
}


def run_updates(updater, first, count):
    return [
        updater.update(batch_of(PLACES[step : step + 4], version=updater.encoder.adapter_version))
        for step in range(first, first + count)
    ]


@pytest.mark.parametrize("through", ["folder", "bytes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(fresh, tmp_path, kind, through):
    updater, extra = KINDS[kind]
    settings = {**SETTINGS, **SCHEDULE, **extra}
    whole = fresh(updater, **settings)
    run_updates(whole, 0, 1)
    if through == "folder":
        whole.save(tmp_path / "checkpoint")
        whole.save(tmp_path / "checkpoint")
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    else:
        data = whole.state_bytes()
    results = run_updates(whole, 1, 2)
    expected = whole.state()

    resumed = fresh(updater, **{**settings, "seed": 99})
    run_updates(resumed, 8, 1)  # what it did before must leave no trace
    if through == "folder":
        resumed.load(tmp_path / "checkpoint")
    else:
        resumed.load_state_bytes(data)
    assert resumed.encoder.adapter_version == 1 and resumed.known_versions() == [0, 1]
    again = run_updates(resumed, 1, 2)
    assert differing(resumed.state(), expected) == []
    assert [r.metrics["bridge/lr"] for r in again] == [r.metrics["bridge/lr"] for r in results]
    assert [r.evidence_shift for r in again] == [r.evidence_shift for r in results]
    assert expected.numbers["updates"] == 3 and expected.numbers["steps"] == 3 * 2 * 2
    assert expected.numbers["adapter_version"] == 3


def test_a_synchronous_run_drops_the_versions_that_an_asynchronous_one_kept(fresh):
    asynchronous = fresh(lr=1e-3, max_staleness=3)
    run_updates(asynchronous, 0, 4)
    data = asynchronous.state_bytes()
    assert asynchronous.known_versions() == [1, 2, 3, 4]
    for max_staleness, kept in ((0, []), (2, [3, 4])):  # resumed with less than before
        resumed = fresh(lr=1e-3, max_staleness=max_staleness)
        resumed.load_state_bytes(data)
        run_updates(resumed, 4, 1)
        assert sorted(resumed.served) == kept and resumed.known_versions() == [*kept, 5]
        assert [name for name in resumed.state().adapters if name.startswith("served/")] == [
            f"served/{version}" for version in kept
        ]


def test_the_adapter_alone_is_not_enough_to_resume(fresh, tmp_path):
    whole = fresh(**SETTINGS)
    run_updates(whole, 0, 2)
    whole.save(tmp_path / "checkpoint")
    run_updates(whole, 2, 1)
    expected = whole.state().adapters["adapter"]
    partial = fresh(**SETTINGS)
    partial.encoder.load_adapter(tmp_path / "checkpoint" / "adapter", 2)
    run_updates(partial, 2, 1)
    difference = max((v - expected[n]).abs().max().item() for n, v in partial.encoder.adapter_state().items())
    assert difference > 1e-4


def changed(tensors, **changes):
    return save({**tensors, **changes})


def broken(data):
    """Every way in which bytes do not fit, by name."""
    tensors = load(data)
    names = list(tensors)
    moment = next(n for n in names if n.startswith("optimizer/exp_avg/"))
    adapter = next(n for n in names if n.startswith("adapter/"))
    numbers = json.loads(bytes(tensors["numbers"].tolist()))

    unnumbered = {n.replace("initial/", "served/x/"): v.clone() for n, v in tensors.items() if n.startswith("initial/")}

    def with_numbers(value):
        return changed(tensors, numbers=torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8))

    return {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "a flipped header": data[:8] + b"\xff" + data[9:],
        "no numbers": save({n: v for n, v in tensors.items() if n != "numbers"}),
        "no JSON": changed(tensors, numbers=torch.zeros(4, dtype=torch.uint8)),
        "no object": with_numbers([1]),
        "no counter": with_numbers({k: v for k, v in numbers.items() if k != "updates"}),
        "negative counter": with_numbers({**numbers, "steps": -1}),
        "fraction": with_numbers({**numbers, "adapter_version": 1.5}),
        "a share above one": with_numbers({**numbers, "first_top1_share": 3.0}),
        "no documents": with_numbers({**numbers, "first_top1_documents": 0}),
        "stranger": changed(tensors, other=torch.zeros(1)),
        "adapter without a parameter": save({n: v for n, v in tensors.items() if n != adapter}),
        "adapter of another shape": changed(tensors, **{adapter: torch.zeros(3, 3)}),
        "adapter not finite": changed(tensors, **{adapter: tensors[adapter] * float("nan")}),
        "moments without a parameter": save({n: v for n, v in tensors.items() if n != moment}),
        "moments of another shape": changed(tensors, **{moment: torch.zeros(2)}),
        "generator cut": changed(tensors, rng=tensors["rng"][:100]),
        "generator of another type": changed(tensors, rng=torch.zeros(5056)),
        "version without number": changed(tensors, **unnumbered),
    }


def test_bytes_that_do_not_fit_are_refused_and_change_nothing(fresh):
    updater = fresh(**SETTINGS)
    run_updates(updater, 0, 1)
    before, data = updater.state(), updater.state_bytes()
    says = {
        "stranger": "it holds a tensor 'other', which is not part of an updater's state",
        "adapter not finite": ".* in 'adapter' does not hold finite floating-point numbers",
        "adapter of another shape": "its adapter state 'adapter' .* use the encoder and lora_rank it was saved with",
    }
    for name, bad in broken(data).items():
        with pytest.raises(ValueError, match=f"this retriever state cannot be used: {says.get(name, '')}"):
            updater.load_state_bytes(bad)
            pytest.fail(name)
        assert differing(updater.state(), before) == [], name
    updater.load_state_bytes(data)
    assert differing(updater.state(), before) == []


def test_one_and_two_states_do_not_take_each_others_checkpoints(fresh, tmp_path):
    one = fresh(lr=1e-3)
    run_updates(one, 0, 1)
    one.save(tmp_path / "one")
    two = fresh(TwoStateUpdater, lr=1e-3)
    with pytest.raises(ValueError, match=r"checkpoint to continue from at .*one.*verl_bridge\.bridge\.estimator"):
        two.load(tmp_path / "one")
    assert two.encoder.adapter_version == 0 and two.counters["updates"] == 0
    data = two.state_bytes()
    with pytest.raises(ValueError, match=r"verl_bridge\.bridge\.estimator"):
        fresh(lr=1e-3).load_state_bytes(data)


def test_damaged_folders_are_refused_and_change_nothing(fresh, tmp_path):
    updater = fresh(lr=1e-3)
    run_updates(updater, 0, 1)
    updater.save(tmp_path / "good")
    with pytest.raises(ValueError, match=r"updater\.json is missing"):
        updater.load(tmp_path / "nothing")
    before = updater.state()
    files = ("updater.json", "updater.safetensors", "adapter/adapter_model.safetensors")
    for number, name in enumerate(files):
        folder = tmp_path / f"bad{number}"
        updater.save(folder)
        (folder / name).write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])
        with pytest.raises(ValueError, match=f"no retriever checkpoint to continue from at {folder}: "):
            updater.load(folder)
        assert differing(updater.state(), before) == []
    updater.load(tmp_path / "good")
    assert differing(updater.state(), before) == []


def test_a_folder_holds_the_state_that_is_saved_whatever_the_encoder_became(fresh, tmp_path):
    updater = fresh(lr=1e-3)
    run_updates(updater, 0, 1)
    earlier = updater.state()
    run_updates(updater, 1, 1)
    earlier.save(tmp_path / "earlier", updater.encoder)
    read = LearnerState.load(tmp_path / "earlier", updater.encoder)
    assert differing(read, earlier) == []
    assert len(differing(read, updater.state())) > 10


@contextmanager
def room_for(size):
    """The system refuses to write a file beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_full_disk_leaves_the_checkpoint_before_whole(fresh, tmp_path):
    """A real fault: the system refuses to write on, at the first file and at the last one."""
    updater, folder = fresh(lr=1e-3), tmp_path / "retriever"
    run_updates(updater, 0, 1)
    updater.save(folder)
    good, saved = contents(folder), updater.state()
    run_updates(updater, 1, 1)
    largest = max(map(len, good.values()))
    assert len(good[Path("updater.safetensors")]) == largest
    for limit in (100, largest - 1):
        with room_for(limit), pytest.raises(OSError, match=f"checkpoint {folder} could not be written.*make room"):
            updater.save(folder)
        assert contents(folder) == good and [p.name for p in tmp_path.iterdir()] == ["retriever"]
        with room_for(limit), pytest.raises(OSError, match="could not be written"):
            updater.save(tmp_path / "new")
        assert [p.name for p in tmp_path.iterdir()] == ["retriever"]
    now = updater.state()
    updater.load(folder)
    assert differing(updater.state(), saved) == []
    updater.set_state(now)
    updater.save(folder)
    updater.load(folder)
    assert differing(updater.state(), now) == []
