"""examples/search_r1: at most ten lines from a Search-R1 script to one that starts on its own dataset and index."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl_bridge import cli
from verl_bridge.config import load_settings
from verl_bridge.config.search_r1 import REPLACED
from verl_bridge.integrations.verl.dry_run import compose_run, examine

FOLDER = Path(__file__).parents[2] / "examples/search_r1"


def arguments(script, folder):
    """What the script hands to verl, with its data and assets in the folder ``here``."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    run = subprocess.run(
        [FOLDER / script, "data.seed=1"],
        env={**os.environ, "PYTHON": str(python), "DATA_DIR": "here", "ASSETS": "here"},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *found = run.stdout.removesuffix("\0").split("\0")[1:]
    assert module == "verl.trainer.main_ppo" and found[-1] == "data.seed=1"
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder ``here`` with files in Search-R1's forms: its columns, its corpus, a bare FAISS index."""
    (tmp_path / "here").mkdir()
    for split, names in (("train", ["Oblomov", "Emma"]), ("test", ["Dubliners"])):
        rows = [
            {
                "id": f"{split}_{number}",
                "question": f"who wrote {name}?",
                "golden_answers": ["an author"],
                "data_source": "nq",
                "prompt": [
                    {
                        "role": "user",
                        "content": "Reason inside <think> and </think>. Search by <search> query </search>, answer "
                        f"by <answer> and </answer>, like <answer> Beijing </answer>. Question: who wrote {name}?\n",
                    }
                ],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": ["an author"]}},
                "extra_info": {"split": split, "index": number},
            }
            for number, name in enumerate(names)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"here/{split}.parquet")
    passages = [{"id": str(number), "contents": f'"Title {number}"\nText.'} for number in range(3)]
    (tmp_path / "here/wiki-18.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    index = faiss.IndexFlatIP(8)
    index.add(np.eye(3, 8, dtype="float32"))
    faiss.write_index(index, str(tmp_path / "here/e5_Flat.index"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "here"


def test_at_most_ten_lines_change():
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.sh", "after.sh"))
    changes = difflib.SequenceMatcher(None, before[2:], after[2:], autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal")
    assert changed == 9, "the README says nine"


def test_before_has_every_key_that_is_gone_and_after_none(tmp_path):
    before, after = (arguments(script, tmp_path) for script in ("before.sh", "after.sh"))
    old, new = ({argument.split("=")[0] for argument in found} for found in (before, after))
    assert set(REPLACED) <= old and not set(REPLACED) & new
    changed = {argument.split("=")[0] for argument in set(before) - set(after)}
    assert (len(changed), len(old - new)) == (17, 15), "the README says so"
    assert changed & new == {"data.max_prompt_length", "data.max_response_length"}
    kept = {"data.max_response_length", "actor_rollout_ref.rollout.log_prob_micro_batch_size"}
    assert kept <= old & new


def test_after_starts_on_search_r1s_files(here):
    config = compose_run(arguments("after.sh", here))
    found = examine(config)
    assert found.missing == []
    settings = load_settings(config)
    assert settings.gca.enable and settings.bridge.enable and settings.retriever.shown == 3
    assert config.actor_rollout_ref.rollout.n == 5 and config.data.train_batch_size == 512
    assert config.data.max_response_length == 5 * 500 + 4 * 500
    assert config.reward.custom_reward_function.reward_kwargs.format_weight == 0


def test_the_dataset_passes(here, capsys):
    assert cli.main(["data", "check", "here/train.parquet", "here/test.parquet"]) == 0
    assert capsys.readouterr().out.count("nothing wrong") == 2


def test_the_guides_table_is_what_a_dry_run_says():
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    table = dict(row.strip("| ").split(" | ") for row in rows)
    assert {key.strip("`"): says for key, says in table.items()} == REPLACED
