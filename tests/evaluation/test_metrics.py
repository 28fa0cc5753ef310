"""Figures of saved rollouts: by hand, and of real ones that were scored elsewhere."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from verl_bridge.evaluation.metrics import Figures, evaluate
from verl_bridge.qa.signals import Signals

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "search_r1_rollouts"
HIT = "\n\n<information>Doc 1(Title: Peru) Lima</information>\n\n"
MISS = HIT.replace("Lima", "Quito")
SEARCH, RIGHT, WRONG = "<search>q</search>", "<answer>Lima</answer>", "<answer>Cusco</answer>"


def write(path, *responses, em=None, golds=("Lima",)):
    rows = [
        {"id": f"r{i}", "question": f"q{i}", "golden_answers": golds, "response": r} for i, r in enumerate(responses)
    ]
    for row, value in zip(rows, em or [], strict=False):
        row["em"] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_figure_by_hand(tmp_path):
    path = write(
        tmp_path / "r.jsonl",
        SEARCH + HIT + RIGHT,  # A
        SEARCH + MISS + SEARCH + HIT + RIGHT,  # A
        SEARCH + HIT + WRONG,  # B1
        SEARCH + HIT + SEARCH,  # B2
        SEARCH + MISS + WRONG,  # C
        WRONG,  # C
        "I do not know",  # C
        RIGHT,  # D
    )
    figures = evaluate([path]).to_dict()
    assert {key: figures[key] for key in ("n", "types", "yes_no", "em_compared", "disagreements")} == {
        "n": 8,
        "types": {"A": 2, "B1": 1, "B2": 1, "C": 3, "D": 1},
        "yes_no": 0,
        "em_compared": 0,
        "disagreements": [],
    }
    shares = ("em", "tool_hit", "supcor", "grounded_share", "hitacc", "hit_but_wrong", "searches")
    assert [figures[key] for key in shares] == pytest.approx([3 / 8, 4 / 8, 2 / 8, 2 / 3, 2 / 4, 2 / 8, 7 / 8])
    assert figures["files"] == {str(path): {key: figures[key] for key in Figures().to_dict()}}


def test_a_recorded_em_that_is_not_ours_is_named(tmp_path):
    path = write(tmp_path / "r.jsonl", RIGHT, WRONG, RIGHT, em=[1, 1.0, 0])
    result = evaluate([path])
    assert result.disagreements == [f"{path}: r1", f"{path}: r2"]
    assert result.total.compared == 3


def test_files_are_kept_apart_and_together(tmp_path):
    one, two = write(tmp_path / "one.jsonl", RIGHT), write(tmp_path / "two.jsonl", SEARCH + HIT + WRONG, WRONG)
    result = evaluate([one, two])
    assert [figures.n for figures in (result.total, *result.files.values())] == [3, 1, 2]
    lines = result.table().splitlines()
    assert lines[0].split() == ["one.jsonl", "two.jsonl", "all"]
    assert (
        next(line for line in lines if line.startswith("type B1")).split()
        == "type B1 0 (0.0%) 1 (50.0%) 1 (33.3%)".split()
    )
    with pytest.raises(ValueError, match="is given twice"):
        evaluate([one, one])


def test_spellings_are_a_matter_of_the_mode(tmp_path):
    path = write(tmp_path / "r.jsonl", SEARCH + HIT.replace("Lima", "Émile") + WRONG, golds=("Emile",))
    assert [evaluate([path], unicode=mode).total.types["B1"] for mode in (False, True)] == [0, 1]


def test_yes_no_questions_are_counted():
    figures = Figures()
    figures.add(Signals(False, -1, True, True, True), 2, False)
    assert (figures.yes_no, figures.types["D"], figures.to_dict()["searches"]) == (1, 1, 2.0)


def test_memory_does_not_grow_with_the_file(tmp_path):
    long = "x" * 200_000
    small, large = (write(tmp_path / f"{n}.jsonl", *[long + RIGHT] * n) for n in (3, 60))
    peaks = []
    for path in (small, small, large):  # once to warm up
        tracemalloc.start()
        evaluate([path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1] < 5e6


@pytest.mark.skipif(not REAL.is_dir(), reason="the rollouts of ../shared/data/search_r1_rollouts are not here")
@pytest.mark.parametrize(
    ("name", "unicode", "types", "hits", "right", "searches"),
    [
        ("nq_base", False, {"A": 376, "B1": 267, "B2": 0, "C": 343, "D": 14}, 643, 390, 999),
        ("nq_base", True, {"A": 378, "B1": 271, "B2": 0, "C": 339, "D": 12}, 649, 390, 999),
        ("bamboogle_base", False, {"A": 10, "B1": 10, "B2": 0, "C": 104, "D": 1}, 20, 11, 125),
        ("bamboogle_base", True, {"A": 10, "B1": 11, "B2": 0, "C": 103, "D": 1}, 21, 11, 125),
    ],
)
def test_real_rollouts(name, unicode, types, hits, right, searches):
    """Search-R1's checkpoint on NQ and Bamboogle: our EM is the recorded one on all 1,125 rows."""
    result = evaluate([REAL / f"{name}.jsonl.gz"], unicode=unicode)
    figures = result.to_dict()
    n = 1000 if name == "nq_base" else 125
    assert result.disagreements == [] and (figures["n"], figures["em_compared"]) == (n, n)
    assert figures["types"] == types
    assert [figures[key] for key in ("em", "tool_hit", "searches")] == [right / n, hits / n, searches / n]
    assert figures["supcor"] == types["A"] / n
    assert figures["grounded_share"] == types["A"] / right and figures["hitacc"] == types["A"] / hits
