"""``verl-bridge data check``: every fault is named with its row, and what passes is what training accepts."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_bridge import cli
from verl_bridge.qa.check import FAULTS, check_files
from verl_bridge.qa.questions import gold_answers, question_of
from verl_bridge.qa.reward import score_trace
from verl_bridge.trace import SearchTrace

ASK = "Search with <search> query </search>, answer inside <answer> and </answer>. Question: "


def row(question="Capital of Peru?", golds=("Lima",), **more):
    """A row in Search-R1's columns."""
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"{ASK}{question}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(golds) if golds is not None else None}},
        "extra_info": {"split": "train", "index": 0},
        **more,
    }


def write(path: Path, *rows) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        lines = "".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in rows)
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def check(capsys, *arguments) -> tuple[int, dict]:
    code = cli.main(["data", "check", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def refused(capsys, *arguments) -> str:
    """The one line that a file that cannot be read leaves on stderr."""
    assert cli.main(["data", "check", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("verl-bridge: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("name", ["q.parquet", "q.jsonl", "q.jsonl.gz"])
def test_a_good_file_is_counted(tmp_path, capsys, name):
    rows = [
        row(),
        row("Is Peru in Asia?", ["no"]),
        row("Which river?", ["Amazon", "the Amazon"], data_source="hotpotqa"),
    ]
    code, said = check(capsys, write(tmp_path / name, *rows))
    assert (code, said["errors"]) == (0, 0)
    assert said["files"][0] == {
        "file": str(tmp_path / name),
        "form": "verl",
        "rows": 3,
        "aliases": 4,
        "yes_no": 1,
        "gold_forms": {"list": 3},
        "sources": {"nq": 2, "hotpotqa": 1},
        "errors": 0,
        "faults": {},
    }


ASKED = {"question": "Capital of Peru?"}
FAULTY = [
    ("golds_missing", row(golds=None)),
    ("golds_missing", row(golds=[])),
    ("golds_missing", row(reward_model=None)),
    ("reward_model_type", row(reward_model='{"ground_truth": {"target": ["Lima"]}}')),
    ("reward_model_type", row(reward_model=["Lima"])),
    ("golds_missing", row(reward_model={"ground_truth": {"aliases": ["Lima"]}})),
    # only verl's column counts where verl reads the rows
    ("golds_missing", row(golds=None, golden_answers=["Lima"])),
    ("golds_type", row(golds=[1821])),
    ("golds_type", row(reward_model={"ground_truth": {"target": {"value": "Lima"}}})),
    ("golds_type", row(golds=["Lima", None])),
    ("golds_blank", row(golds=["Lima", " "])),
    ("golds_blank", row(reward_model={"ground_truth": ""})),
    ("golds_printed", row(golds=["['Lima', 'Callao']"])),
    ("golds_printed", row(reward_model={"ground_truth": {"target": "array(['Lima'], dtype=object)"}})),
    ("golds_printed", row(golds=["['Lima' 'Callao']"])),
    ("question_missing", row("")),
    ("prompt_type", row(prompt="Capital of Peru?", extra_info=ASKED)),
    ("prompt_type", row(prompt=[], extra_info=ASKED)),
    ("prompt_type", row(prompt=[{"role": "user", "content": None}], extra_info=ASKED)),
    ("prompt_tags", row(prompt=[{"role": "user", "content": "Answer in <answer> tags. Question: Capital of Peru?"}])),
    ("source_missing", row(data_source=None)),
    ("extra_info_type", row(extra_info="train")),
    ("agent_name", row(agent_name="tool_agent")),
    ("not_unicode", row("half \ud83d")),
]


@pytest.mark.parametrize(("kind", "bad"), FAULTY, ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_names_its_row(tmp_path, capsys, kind, bad):
    code, said = check(capsys, write(tmp_path / "q.jsonl", row("Another?"), bad))
    faults = said["files"][0]["faults"]
    assert code == 1 and set(faults) - {"golds_differ"} == {kind} and FAULTS[kind][0]
    assert faults[kind]["count"] == 1 and faults[kind]["rows"][0]["row"] == 2


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("golds_unmatchable", [row(golds=["The"])]),
        ("golds_bracketed", [row(golds=["1821"]), row("When?", golds=["[1821 1822]"])]),
        ("golds_bracketed", [row(golds=["Lima", " {'target': ['Lima']}\n"])]),
        ("golds_bracketed", [row(reward_model={"ground_truth": '{"target": ["Lima"]}'})]),
        ("golds_bracketed", [row(golds=["array([1821, 1822], dtype=int64)"])]),
        ("golds_differ", [row(golden_answers=["Cusco"])]),
        ("source_unknown", [row(data_source="our_questions")]),
        ("repeated_question", [row(), row(" capital of  PERU ")]),
        ("repeated_id", [row("One?", id="train_0"), row("Two?", id="train_0")]),
    ],
)
def test_a_note_is_no_failure(tmp_path, capsys, kind, rows):
    code, said = check(capsys, write(tmp_path / "q.jsonl", *rows))
    faults = said["files"][0]["faults"]
    assert code == 0 and set(faults) == {kind} and faults[kind]["rows"][0]["row"] == len(rows)


@pytest.mark.parametrize("gold", ["[sic] Lima", "Lima [city]", "{Lima", "array", "f(x) = [x]"])
def test_brackets_inside_a_gold_are_words(tmp_path, capsys, gold):
    assert check(capsys, write(tmp_path / "q.jsonl", row(golds=[gold])))[1]["files"][0]["faults"] == {}


def test_function_calls_need_no_tags(tmp_path, capsys):
    """The prompt that examples/tool_agent recommends, as it stands there."""
    text = (Path(__file__).parents[2] / "examples/tool_agent/README.md").read_text(encoding="utf-8")
    asked = text.split('"content": f"')[1].split('"}')[0].replace("{question}", "Capital of Peru?")
    prompt = [{"role": "user", "content": asked}]
    good = row(prompt=prompt, extra_info={"question": "Capital of Peru?"})
    bare = row(prompt=[{"role": "user", "content": "Which river?"}])
    file = write(tmp_path / "q.parquet", good, bare)
    code, said = check(capsys, file)
    assert code == 1 and said["files"][0]["faults"]["prompt_tags"]["count"] == 2
    assert said["files"][0]["faults"]["prompt_tags"]["fix"].endswith("(none: --function-calls)")
    code, said = check(capsys, file, "--function-calls")
    assert (code, said["files"][0]["faults"]) == (0, {})
    empty = write(tmp_path / "empty.jsonl", row(prompt=[], extra_info=ASKED))
    assert set(check(capsys, empty, "--function-calls")[1]["files"][0]["faults"]) == {"prompt_type"}


def test_equal_ids_of_two_sources_are_two(tmp_path, capsys):
    """Search-R1's merged files number every source from train_0."""
    rows = [row("One?", id="train_0"), row("Two?", id="train_0", data_source="hotpotqa")]
    assert check(capsys, write(tmp_path / "q.jsonl", *rows))[1]["files"][0]["faults"] == {}


def test_overlap_of_training_and_validation(tmp_path, capsys):
    train = write(tmp_path / "train.parquet", row("One?"), row("Capital of Peru?"))
    test = write(tmp_path / "test.jsonl", row("Three?"), row("capital of Peru"), row("Capital of Peru?"))
    code, said = check(capsys, train, test)
    first, second = said["files"]
    assert code == 1 and first["faults"] == {} and second["faults"]["overlap"]["count"] == 2
    assert second["faults"]["overlap"]["rows"][0] == {"row": 2, "says": "'capital of Peru' is row 2 of file 1"}


def test_long_prompts_by_the_models_own_template(tmp_path, capsys):
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    file = write(tmp_path / "q.jsonl", row("a b"), row("a b c"))
    fits = len(f"user {ASK}a b assistant".split())
    tokenizer.save_pretrained(tmp_path / "plain")
    plain = ["--tokenizer", tmp_path / "plain", "--max-prompt-length", fits]
    assert "has no chat template" in refused(capsys, file, *plain)
    each, opening = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}", " assistant"
    tokenizer.chat_template = each + "{% if add_generation_prompt %}" + opening + "{% endif %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    code, said = check(capsys, file, "--tokenizer", tmp_path / "chat", "--max-prompt-length", fits)
    assert code == 1 and said["files"][0]["faults"]["prompt_long"]["rows"] == [
        {"row": 2, "says": f"{fits + 1} tokens, {fits} fit"}
    ]
    assert "go together" in refused(capsys, file, "--max-prompt-length", "3")


def test_the_table_and_all(tmp_path, capsys):
    bad = [row(f"Question {i}?", golds=[]) for i in range(7)]
    file = write(tmp_path / "q.jsonl", row(data_source="own"), *bad)
    assert cli.main(["data", "check", str(file)]) == 1
    out = capsys.readouterr().out
    assert "ERROR golds_missing: 7" in out and "row 6:" in out and "row 7:" not in out and "… 2 more" in out
    assert "note  source_unknown: 1" in out
    assert cli.main(["data", "check", str(file), "--all"]) == 1
    out = capsys.readouterr().out
    assert "row 8:" in out and "more" not in out
    assert cli.main(["data", "check", str(write(tmp_path / "good.jsonl", row()))]) == 0
    assert "nothing wrong" in capsys.readouterr().out


def test_plain_questions_need_no_prompt(tmp_path, capsys):
    good = {"id": "1", "question": "Capital of Peru?", "golden_answers": ["Lima", "Ciudad de los Reyes"]}
    rows = [good, {"id": 2, "question": " ", "golden_answers": "Lima"}, {"question": "Q?"}, [1]]
    code, said = check(capsys, write(tmp_path / "q.jsonl", *rows))
    report = said["files"][0]
    assert (code, report["form"], report["aliases"]) == (1, "questions", 3)
    assert {kind: found["rows"][0]["row"] for kind, found in report["faults"].items()} == {
        "question_missing": 2,
        "golds_missing": 3,
        "no_object": 4,
    }


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("q.jsonl", b"", "is empty"),
        ("q.jsonl", json.dumps(row()).encode() + b"\n{broken\n", "line 2 is not JSON"),
        ("q.jsonl", b"[" * 200_000, "line 1 is not JSON"),
        ("q.jsonl", b'{"question": "Caf\xe9"}\n', "q.jsonl line 1 is not UTF-8"),
        ("q.jsonl.gz", b"no gzip", "q.jsonl.gz line 1: not a complete gzip file"),
        ("q.jsonl.gz", gzip.compress(json.dumps(row()).encode() * 99)[:-20], "line 1: not a complete gzip file"),
        ("q.parquet", b"PAR1 no parquet", "q.parquet row 1: not readable as parquet"),
    ],
)
def test_an_unreadable_file(tmp_path, capsys, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in refused(capsys, tmp_path / name)


@pytest.mark.parametrize(
    ("column", "value", "kind", "says"),
    [
        ("id", b"n\xffq", pa.string(), "'utf-8' codec can't decode"),
        ("extra_info", 2**62, pa.timestamp("us"), "date value out of range"),
    ],
    ids=["not UTF-8", "a date after the year 9999"],
)
def test_a_value_that_python_cannot_read_names_its_row(tmp_path, capsys, column, value, kind, says):
    """The row, not the thousand that are read with it."""
    good, raw = (b"1", pa.binary()) if column == "id" else (0, pa.int64())
    values = pa.array([good] * 1030 + [value] + [good], raw)
    values = pa.Array.from_buffers(kind, len(values), values.buffers())
    table = pa.Table.from_pylist([row(f"Question {i}?", id=str(i)) for i in range(len(values))])
    if column == "extra_info":
        values = pa.StructArray.from_arrays([values], ["when"])
    table = table.set_column(table.column_names.index(column), column, values)
    parquet.write_table(table, tmp_path / "q.parquet")
    err = refused(capsys, tmp_path / "q.parquet")
    assert f"q.parquet row 1031: not readable as parquet ({says}" in err and "write the file again" in err


def test_rows_count_from_one_as_at_the_start_of_a_run(tmp_path, capsys):
    from verl_bridge.config.schema import ConfigError
    from verl_bridge.integrations.verl.preflight import check_rows

    file = write(tmp_path / "q.parquet", row(), row("Which river?", golds=[""]))
    assert check(capsys, file)[1]["files"][0]["faults"]["golds_blank"]["rows"][0]["row"] == 2
    with pytest.raises(ConfigError, match=r"data.train_files: row 2 has gold answers"):
        check_rows("data.train_files", file)


def test_a_byte_order_mark_is_no_fault(tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text(json.dumps(row()) + "\n", encoding="utf-8-sig")
    assert check(capsys, tmp_path / "q.jsonl")[0] == 0


TEXT = st.sampled_from(["Lima", "", " ", "The", "no", "['Lima']", "Sucre?"])
GOLDS = st.one_of(st.none(), TEXT, st.integers(), st.lists(st.one_of(TEXT, st.none(), st.integers()), max_size=3))
TRUTH = st.one_of(GOLDS, st.builds(lambda golds: {"target": golds}, GOLDS))
MESSAGE = st.builds(lambda text: {"role": "user", "content": text}, st.sampled_from(["", ASK, ASK + "Q?", "Q?", None]))
ROWS = st.builds(
    lambda prompt, truth, source, info, question: {
        **row(prompt=prompt, reward_model={"ground_truth": truth}, data_source=source, extra_info=info),
        **question,
    },
    st.one_of(st.none(), st.just("Q?"), st.lists(MESSAGE, max_size=2)),
    TRUTH,
    st.sampled_from(["nq", "", None]),
    st.sampled_from([None, {}, {"question": "Q?"}, "x", {"index": 1}]),
    st.sampled_from([{}, {"question": "Q?"}, {"question": ""}, {"golden_answers": ["Lima"]}]),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=ROWS)
def test_what_passes_training_accepts_and_what_training_refuses_fails(tmp_path, found):
    """Training: the start of a run, the agent loop's reading of a row, and the reward."""
    from verl_bridge.integrations.checks import check_gold_answers

    report = check_files([write(tmp_path / "q.jsonl", found)])[0]
    try:
        check_gold_answers("data.train_files", [found])
        golds = gold_answers({"reward_model": found["reward_model"]}, "row")
        trace = SearchTrace(question_of(found), golds, (), None, None, "no_action", 1)
        score_trace(trace)
        accepted = isinstance(found["prompt"], list) and trace.question is not None
    except ValueError:
        accepted = False
    assert accepted or report.errors, found
    unfit = sum(report.counts[kind] for kind in ("golds_missing", "golds_type", "golds_blank"))
    assert not (accepted and unfit), found


def test_a_passing_file_is_loaded_by_verl_and_starts(tmp_path):
    """verl's own dataset on a parquet file of Search-R1's columns; golds reach the loop as verl hands them on."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_bridge.embedded.policy import POLICY_DIR
    from verl_bridge.integrations.verl.preflight import check_rows

    rows = [row("Capital of Peru?", ["Lima", "Ciudad de los Reyes"]), row("Which river?", ["Amazon"])]
    file = write(tmp_path / "q.parquet", *rows)
    assert check_files([file])[0].counts == {}
    check_rows("data.train_files", file)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(POLICY_DIR)
    config = OmegaConf.create({"cache_dir": str(tmp_path), "filter_overlong_prompts": False})
    loaded = RLHFDataset(str(file), tokenizer, config)[0]
    assert gold_answers({"reward_model": loaded["reward_model"]}, "row") == ("Lima", "Ciudad de los Reyes")
    assert question_of({**loaded, "prompt": loaded["raw_prompt"]}) == "Capital of Peru?"


@pytest.mark.parametrize("golds", [np.array(["Lima", "Callao"], dtype=object), ["Lima", "Callao"], ("Lima", "Callao")])
def test_golds_in_memory_may_be_arrays_lists_or_tuples(golds):
    assert gold_answers({"reward_model": {"ground_truth": {"target": golds}}}, "row") == ("Lima", "Callao")


def test_memory_does_not_grow_with_the_rows_texts(tmp_path):
    """Of a row group of 50 MB a thousand rows are read at a time, and columns that nobody asks for not at all."""
    schema = pa.Table.from_pylist([row(metadata="x")]).schema
    filler = "word" * 1000
    with parquet.ParquetWriter(tmp_path / "q.parquet", schema, compression="zstd") as writer:
        table = pa.Table.from_pylist([row(f"{filler} {i}?", metadata=filler) for i in range(6_000)], schema)
        writer.write_table(table, row_group_size=6_000)
    del table
    tracemalloc.start()
    report = check_files([tmp_path / "q.parquet"])[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.rows == 6_000 and report.counts == {}
    assert peak < 16e6  # 1,024 rows of 4 kB, in two copies at most, and some 200 bytes for each row seen
