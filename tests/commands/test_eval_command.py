"""``verl-bridge eval``: what it prints and its exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import yaml

from verl_bridge.commands import eval as command

RIGHT = "<search>q</search>\n\n<information>Doc 1(Title: Peru) Lima</information>\n\n<answer>Lima</answer>"


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    options = parser.parse_args(["eval", *map(str, arguments)])
    return options.run(options)


def write(path, **more):
    path.write_text(json.dumps({"id": "x", "question": "q", "golden_answers": ["Lima"], "response": RIGHT, **more}))
    return path


def test_json_is_the_last_line_and_has_the_agreed_keys(tmp_path, capsys):
    assert run("--rollouts", write(tmp_path / "r.jsonl", em=1), "--json") == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = {"n": 1, "em": 1.0, "tool_hit": 1.0, "supcor": 1.0, "grounded_share": 1.0, "hitacc": 1.0}
    assert {key: figures[key] for key in expected} == expected
    assert figures["types"] == {"A": 1, "B1": 0, "B2": 0, "C": 0, "D": 0} and figures["searches"] == 1.0


def test_a_disagreement_is_listed_and_fails(tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", em=0)
    assert run("--rollouts", path) == 1
    printed = capsys.readouterr()
    assert f"recorded em disagrees: {path}: x" in printed.err
    assert "tool_hit" in printed.out


def test_the_merged_table_is_written_beside_the_figures(tmp_path, capsys):
    out = tmp_path / "table.yaml"
    assert run("--rollouts", write(tmp_path / "r.jsonl"), "--merged-table", out, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["n"] == 1
    assert "no search tokens of type B1: its entry is 0" in printed.err
    assert yaml.safe_load(out.read_text())["verl_bridge"]["gca"]["routing"]["A"]["VSEARCH"] == 0.5


def test_help_explains_the_figures_and_the_exit_code(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "grounded_share, hitacc and hit_but_wrong" in said and "the exit code is 1" in said and "--json" in said


def test_figures_need_no_framework(tmp_path):
    code = (
        "import argparse, sys\n"
        "from verl_bridge.commands import eval as command\n"
        "parser = argparse.ArgumentParser(); command.add(parser.add_subparsers())\n"
        f"options = parser.parse_args(['eval', '--rollouts', {str(write(tmp_path / 'r.jsonl'))!r}])\n"
        "options.run(options)\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'verl', 'ray') if name in sys.modules])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
