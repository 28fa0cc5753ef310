"""``verl-bridge data check``: what is wrong with a question file, row by row."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import add_command, positive


def add(commands: Any) -> None:
    """Adds ``data check`` to the parser."""
    data = commands.add_parser("data", help="check question files").add_subparsers(required=True, metavar="check")
    check = add_command(data, "check", _check, "read every row and say what is wrong with it, and how to mend it")
    check.epilog = (
        "Rows count from 1, as everywhere; in JSONL they are the lines. "
        "Exit code: 0 no error (notes may remain), 1 errors, 2 a file cannot be read."
    )
    check.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL, JSONL.gz or parquet: training data, then files that may share no question with those before",
    )
    check.add_argument("--all", action="store_true", help="list every faulty row, not the first five of a kind")
    check.add_argument(
        "--function-calls",
        action="store_true",
        help="the model searches by function calls (verl_bridge_tool_agent): ask for no tags in prompts",
    )
    check.add_argument("--tokenizer", metavar="MODEL", help="also measure prompts with this model's chat template")
    check.add_argument(
        "--max-prompt-length", type=positive, metavar="TOKENS", help="longest prompt (data.max_prompt_length)"
    )


def _check(options: argparse.Namespace) -> int:
    from verl_bridge.qa.check import check_files, table

    if (options.tokenizer is None) != (options.max_prompt_length is None):
        raise ValueError("--tokenizer and --max-prompt-length go together: give both, or neither")
    reports = check_files(
        options.files,
        keep=None if options.all else 5,
        function_calls=options.function_calls,
        prompt_tokens=None if options.tokenizer is None else _counter(options.tokenizer),
        limit=options.max_prompt_length or 0,
    )
    errors = sum(report.errors for report in reports)
    if options.json:
        print(json.dumps({"errors": errors, "files": [report.to_dict() for report in reports]}))
    else:
        print(table(reports, every=options.all))
    return 1 if errors else 0


def _counter(model: str) -> Callable[[list], int]:
    """Tokens of a prompt as verl counts them: with the chat template and the opening of the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        raise ValueError(f"--tokenizer {model} has no chat template, which verl needs: name a model with one")

    def count(messages: list) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return count
