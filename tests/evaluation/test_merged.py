"""The merged table, measured on files."""

from __future__ import annotations

import json

import pytest
import yaml

from verl_bridge.algorithms.gca import RoutingTable
from verl_bridge.algorithms.grounding import RolloutType, Segment
from verl_bridge.evaluation.merged import segment_tokens, write_merged_table

A, B1, B2, C, D, *_ = RolloutType
V, R, S = Segment.VSEARCH, Segment.RSEARCH, Segment.ANS
HIT = "\n\n<information>Doc 1(Title: Peru) Lima</information>\n\n"
MISS = HIT.replace("Lima", "Quito")


def search(query):
    return f"<search>{query}</search>"


def row(response, question="q", golds=("Lima",), **more):
    return {"question": question, "golden_answers": golds, "response": response, **more}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RIGHT = search("ab") + HIT + search("cde") + MISS + "<answer>Lima</answer>"  # A: 2 useful, 3 later, 4 of the answer
WRONG = search("fghi") + MISS + search("j") + HIT + "<answer>Quito</answer>"  # B1: 4 + 1 useful
UNSUPPORTED = search("kl") + MISS + "<answer>Lima</answer>"  # D: 2 later


def test_characters_stand_for_tokens_and_tags_do_not_count(tmp_path):
    rows = (row(RIGHT, "1"), row(WRONG, "2"), row(UNSUPPORTED, "3"), row(search("mn") + MISS, "4"))
    counts = segment_tokens([write(tmp_path / "r.jsonl", *rows)])
    assert counts[:, [V, R, S]].tolist() == [[2, 3, 4], [5, 0, 5], [0, 0, 0], [0, 2, 0], [0, 2, 4], [0] * 3, [0] * 3]
    assert counts[:, Segment.NONE].sum() == 0


def test_rollouts_without_a_residual_are_left_out(tmp_path):
    alone, equal, varied = row(RIGHT, "alone"), [row(RIGHT, "equal")] * 2, [row(RIGHT, "varied"), row(WRONG, "varied")]
    verdict = row(search("ab") + HIT.replace("Lima", "yes") + "<answer>yes</answer>", "verdict", ("yes",))
    counts = segment_tokens([write(tmp_path / "r.jsonl", alone, *equal, *varied, verdict)])
    assert counts[A, [V, R]].tolist() == [4, 6] and counts[B1, [V, R]].tolist() == [5, 0]
    # groups are a file's own, and a recorded reward decides
    files = [write(tmp_path / f"{i}.jsonl", row(RIGHT, "equal"), row(RIGHT, "equal", em=i)) for i in (0, 1)]
    assert segment_tokens(files)[A, [V, R]].tolist() == [4, 6]


def test_many_rollouts_are_laid_out_in_parts(tmp_path):
    rows = [row(RIGHT, f"q{i}") for i in range(300)]
    assert segment_tokens([write(tmp_path / "r.jsonl", *rows)])[A, [V, R]].tolist() == [600, 900]


def test_the_file_is_yaml_for_the_settings(tmp_path):
    path, out = write(tmp_path / "r.jsonl", row(RIGHT, "1"), row(WRONG, "2")), tmp_path / "new" / "table.yaml"
    table, unseen = write_merged_table([path], out)
    # A: 2·0.5 − 3·0.5 < 0
    assert table.a == (-0.5, -0.5, 0.5) and table.b1 == (0.5, 0.5, -1.0) and unseen == ["B2"]
    settings = yaml.safe_load(out.read_text())["verl_bridge"]["gca"]
    assert settings["merged_search"] is True
    rows = {name: (row["VSEARCH"], row["RSEARCH"], row["ANS"]) for name, row in settings["routing"].items()}
    assert RoutingTable(*(rows[name] for name in ("A", "B1", "B2", "C", "D")), merged=True) == table
    marked = [line.split(":")[0].strip() for line in out.read_text().splitlines() if "no search tokens" in line]
    assert marked == ["B2"]


def test_a_failure_leaves_no_file_and_never_overwrites_what_it_reads(tmp_path):
    path, out = write(tmp_path / "r.jsonl", row(RIGHT), {"question": "q"}), tmp_path / "table.yaml"
    with pytest.raises(ValueError, match="line 2"):
        write_merged_table([path], out)
    assert not out.exists()
    with pytest.raises(ValueError, match="is one of the rollouts files"):
        write_merged_table([path], path)
