"""The cost of an update: figures that belong together, by hand and from two real processes."""

import pytest

from tests.evaluation.bridge_world import SEED, build_part
from verl_bridge.embedded.policy import POLICY_DIR
from verl_bridge.evaluation.bench_bridge import measure_bridge, summarise
from verl_bridge.evaluation.bench_update import UpdateCost

MIB = 2**20


def cost(**seconds):
    return UpdateCost(seconds, {part: value / 2 for part, value in seconds.items()}, {})


def test_the_report_by_hand():
    timed = {
        "bridge": [
            cost(plan=1.0, likelihood=1.0, retriever=2.0, policy=4.0),
            cost(plan=0.0, likelihood=2.0, retriever=2.0, policy=6.0),
            cost(plan=50.0, likelihood=1.0, retriever=2.0, policy=4.0),  # something else ran
        ],
        "two_state": [
            cost(plan=1.0, likelihood=1.0, retriever=4.0, correction=6.0, policy=4.0),
            cost(plan=1.0, likelihood=1.0, retriever=4.0, correction=10.0, policy=4.0),
            cost(plan=1.0, likelihood=1.0, retriever=4.0, correction=8.0, policy=4.0),
        ],
    }
    peaks = {
        "bridge": {"plan": 0, "likelihood": 10 * MIB, "retriever": 20 * MIB, "policy": 30 * MIB},
        "two_state": {
            "plan": 0,
            "likelihood": 10 * MIB,
            "retriever": 25 * MIB,
            "correction": 50 * MIB,
            "policy": 60 * MIB,
        },
    }
    report = summarise(timed, peaks, {"bridge": 100 * MIB, "two_state": 110 * MIB})
    assert report["bridge_seconds"] == 10 and report["two_state_seconds"] == 18
    assert report["time_ratio"] == 10 / 18 == report["cpu_time_ratio"]
    assert report["bridge_retriever_seconds"] == 4 and report["two_state_retriever_seconds"] == 14
    assert report["retriever_time_ratio"] == 4 / 14 == report["retriever_cpu_time_ratio"]
    assert report["memory_ratio"] == 0.5 and report["retriever_memory_ratio"] == 0.4
    assert report["bridge_peak_mb"] == 30 and report["two_state_peak_mb"] == 60
    assert report["bridge_retriever_peak_mb"] == 20 and report["two_state_retriever_peak_mb"] == 50
    assert report["bridge_process_peak_mb"] == 130 and report["two_state_process_peak_mb"] == 170
    assert report["two_state_part_peaks_mb"]["correction"] == 50
    # medians of the parts: 1, 1, 2, 4
    assert report["bridge_time_shares"] == {"plan": 1 / 8, "likelihood": 1 / 8, "retriever": 1 / 4, "policy": 1 / 2}
    assert report["two_state_time_shares"]["correction"] == 8 / 18
    assert report["paper"] == {"time_ratio": 0.442, "memory_ratio": 0.503}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    corpus, index = build_part(tmp_path_factory.mktemp("part"))
    lines = []
    report = measure_bridge(
        corpus=corpus,
        index=index,
        policy=str(POLICY_DIR),
        rollouts=16,
        micro_batch_tokens=1024,
        repeats=1,
        seed=SEED,
        say=lines.append,
    )
    return report, lines


def test_both_arms_run_in_turn_and_the_warm_up_does_not_count(measured):
    report, lines = measured
    arms = ["two_state", "bridge", "bridge", "two_state", "two_state", "bridge"]
    assert [line.partition(":")[0] for line in lines] == arms
    counted = ["nothing", "nothing", "time", "time", "memory", "memory"]
    assert [line.split(", ")[1] for line in lines] == [f"{name} counts" for name in counted]
    seconds = {line.partition(":")[0]: float(line.split()[1]) for line in lines[2:4]}
    assert report["bridge_seconds"] == pytest.approx(seconds["bridge"], abs=0.006)
    assert report["two_state_seconds"] == pytest.approx(seconds["two_state"], abs=0.006)


def test_the_figures_belong_together(measured):
    report, _ = measured
    for name in ("", "retriever_"):
        for figure, unit in (("time", "seconds"), ("memory", "peak_mb")):
            ours, theirs = report[f"bridge_{name}{unit}"], report[f"two_state_{name}{unit}"]
            assert ours > 0 and report[f"{name}{figure}_ratio"] == ours / theirs
    assert list(report["two_state_time_shares"]) == ["plan", "likelihood", "retriever", "correction", "policy"]
    assert list(report["bridge_time_shares"]) == ["plan", "likelihood", "retriever", "policy"]
    for arm in ("bridge", "two_state"):
        shares = report[f"{arm}_time_shares"]
        assert sum(shares.values()) == pytest.approx(1)
        own = report[f"{arm}_retriever_seconds"] / report[f"{arm}_seconds"]
        assert own == pytest.approx(1 - shares["policy"], abs=1e-6)
        assert report[f"{arm}_peak_mb"] == max(report[f"{arm}_part_peaks_mb"].values())
        # the encoder and the policy are in the process's memory beside the peak
        assert report[f"{arm}_process_peak_mb"] - report[f"{arm}_peak_mb"] > 100
    # a second state and a pass with gradient can only cost more
    assert report["retriever_cpu_time_ratio"] < 0.8
    assert report["retriever_memory_ratio"] < 1
    assert 1 / 8 < report["token_ratio"] < 1
    assert 0 < report["tokens_scored"] and report["rollouts"] == 16 and report["threads"] == 1
    assert report["policy_parameters"] == 1_214_464
