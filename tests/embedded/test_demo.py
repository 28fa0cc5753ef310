"""The demo around the training: arguments, files, figures. The training itself: tests/e2e."""

from __future__ import annotations

import gzip
import json

import pytest

from verl_bridge.embedded import assets, demo

QUESTION = {"id": "1", "question": "capital?", "golden_answers": ["Lima"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arm": "gcb"}, "--arm 'gcb': choose one of baseline, gca, bridge, bridge_gca"),
        ({"steps": 0}, "--steps 0"),
        ({"corpus": "c.jsonl"}, "--corpus without --questions"),
        ({"questions": "q.jsonl"}, "--questions without --corpus"),
    ],
)
def test_bad_arguments_are_one_message(arguments, message):
    with pytest.raises(demo.DemoError, match=message):
        demo.run(**arguments)


def test_results_are_never_overwritten(tmp_path):
    with pytest.raises(demo.DemoError, match="exists already"):
        demo.run(out=tmp_path)


def test_the_default_folder_gets_a_number_when_taken(tmp_path):
    names = []
    for _ in range(3):
        folder = demo._free_folder(tmp_path, "demo")
        folder.mkdir()
        names.append(folder.name)
    assert names == ["demo", "demo-2", "demo-3"]
    (tmp_path / ".demo-4.running").mkdir()  # another run's, under way or failed: its log stays
    assert demo._free_folder(tmp_path, "demo").name == "demo-5"
    with pytest.raises(demo.DemoError, match=r"\.demo-4\.running is there.*train.log"):
        demo.run(out=tmp_path / "demo-4")


def test_the_progress_line_warns_of_a_policy_that_never_searches(tmp_path):
    step = {"timing_s/step": 2.0, "critic/score/mean": 0.1, "grounding/tool_hit": 0.0, "grounding/grounded_share": 0.0}
    path = metrics_file(tmp_path, (1, step | {"search/toolless_share": 0.95}))
    lines = []
    assert demo._report(path, 0, 3, 0.0, lines.append) == 1
    assert "step   1/3" in lines[0] and "4 s left" in lines[0]
    assert lines[1].startswith("WARNING: 95% of the rollouts never called the search tool: check that the prompt")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--corpus .*none.jsonl does not exist"):
        demo.run(out=tmp_path / "o", corpus=tmp_path / "none.jsonl", questions=tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        (json.dumps({**QUESTION, "golden_answers": []}), "line 2 has gold answers"),
        (json.dumps({"question": "x"}), "line 2 has gold answers None"),
        ("[1]", "line 2 is not an object"),
        (json.dumps({**QUESTION, "split": 3}), "line 2 has split 3"),
        (json.dumps({**QUESTION, "split": "dev"}), "split='dev': use 'train' or 'validation'"),
    ],
)
def test_bad_questions_are_named_by_line_and_leave_nothing(tmp_path, monkeypatch, line, message):
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": "1", "title": "t", "text": "x"}) + "\n")
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        assets.custom_assets(tmp_path / "c.jsonl", tmp_path / "q.jsonl")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_fixed_share_of_questions_without_split_is_held_out(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({**QUESTION, "id": str(i)}) + "\n" for i in range(2000))
    first = [split for split, _ in assets._split_questions(path)]
    assert first == [split for split, _ in assets._split_questions(path)]
    assert 0.17 < first.count("validation") / 2000 < 0.23


def test_files_are_made_once_and_kept_when_another_process_was_first(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": "1", "text": "x"}\n'))
    rows = [{**QUESTION, "id": split, "split": split} for split in ("train", "validation")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given, built = (tmp_path / "c.jsonl.gz", tmp_path / "q.jsonl"), []

    def build(corpus, index, encoder, log):
        assert corpus.read_bytes() == b'{"id": "1", "text": "x"}\n'
        built.append(corpus.parent)
        if len(built) == 1:
            other = assets.custom_assets(*given)  # another process, which begins later and ends earlier
            (other.corpus.parent / "first").touch()

    monkeypatch.setattr(assets, "_build_index", build)
    made = assets.custom_assets(*given)
    folder = made.corpus.parent
    assert (folder / "first").exists() and made.train_file.exists() and made.probe_file.exists()
    assert list((tmp_path / "cache").iterdir()) == [folder]
    assert assets.custom_assets(*given) == made and len(built) == 2


def metrics_file(tmp_path, *records):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in records) + '{"half')
    return path


def validation(em, supcor, hit, recall):
    values = {"em": em, "supcor": supcor, "tool_hit": hit, "format": 1.0}
    return {f"val-aux/w/{name}/mean@1": value for name, value in values.items()} | {
        "val/retrieval/recall_shown": recall,
        "val/retrieval/recall_top_k": 1.0,
    }


def test_summary_by_hand(tmp_path):
    steps = [{"timing_s/step": seconds, "timing_s/gca": 0.1} for seconds in (90.0, 10.0, 14.0)]
    path = metrics_file(
        tmp_path,
        (0, validation(0.4, 0.3, 0.5, 0.45)),
        (1, steps[0]),
        (2, steps[1]),
        (3, steps[2] | validation(0.6, 0.45, 0.7, 0.8)),
    )
    summary = demo.summarise(path, "w")
    assert (summary["em_start"], summary["em_end"]) == (0.4, 0.6)
    assert (summary["grounded_share_start"], summary["grounded_share_end"]) == (
        pytest.approx(0.75),
        pytest.approx(0.75),
    )
    assert (summary["tool_hit_start"], summary["recall_end"]) == (0.5, 0.8)
    assert (
        summary["step_seconds"]["step"] == 12.0 and summary["step_seconds"]["gca"] == 0.1
    )  # the first step is left out
    assert summary["step_seconds"]["likelihood"] == 0.0
    text = demo.table({**summary, "arm": "gca", "steps": 3})
    assert "EM                 0.400   0.600" in text and "recall@3           0.450   0.800" in text


def test_an_unfinished_run_has_no_summary(tmp_path):
    with pytest.raises(demo.DemoError, match="holds 1 validations, two are needed"):
        demo.summarise(metrics_file(tmp_path, (0, validation(0.4, 0.3, 0.5, 0.45))), "w")


def test_nothing_right_is_no_grounded_share(tmp_path):
    path = metrics_file(
        tmp_path, (0, validation(0.0, 0.0, 0.5, 0.4)), (1, {"timing_s/step": 1.0} | validation(0, 0, 0, 0))
    )
    assert demo.summarise(path, "w")["grounded_share_start"] == 0.0


def test_a_run_that_fails_says_why_and_keeps_its_log(tmp_path):
    command = ["python3", "-c", "print('ok'); raise ValueError('no such encoder')"]
    with pytest.raises(demo.DemoError, match=r"code 1: ValueError: no such encoder\n.*train.log"):
        demo._train(command, tmp_path, 1, print)
    assert "no such encoder" in (tmp_path / "train.log").read_text()


def test_questions_keep_their_split_and_an_id_of_zero(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        "".join(json.dumps({**QUESTION, "id": i, "split": s}) + "\n" for i, s in enumerate(("validation", "train")))
    )
    found = [(split, question.id) for split, question in assets._split_questions(path)]
    assert found == [("validation", "0"), ("train", "1")]


def test_a_cut_off_corpus_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"id": "1", "text": "x"}\n')[:-9])
    (tmp_path / "q.jsonl").write_text(
        "".join(json.dumps({**QUESTION, "split": split}) + "\n" for split in ("train", "validation"))
    )
    with pytest.raises(ValueError, match=r"corpus .*c\.jsonl\.gz is not a complete gzip file"):
        assets.custom_assets(tmp_path / "c.jsonl.gz", tmp_path / "q.jsonl")
