"""``verl-bridge eval``: accuracy and grounding of saved rollouts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import add_command


def add(commands: Any) -> None:
    """Adds ``eval`` to the parser."""
    command = add_command(
        commands,
        "eval",
        _eval,
        "accuracy and grounding of saved rollouts",
        description=(
            "Read saved rollouts and print em, tool_hit, supcor, grounded_share, hitacc and hit_but_wrong (shares from "
            "0 to 1), the number of rollouts of each type, and searches per rollout. Where a row holds em as others "
            "scored it, ours is compared: a disagreement is listed, and the exit code is 1."
        ),
    )
    command.add_argument(
        "--rollouts",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL or JSONL.gz: a run's rollouts/step_N.jsonl, or rows with question, golden_answers and response "
        "(Search-R1's text with <information> blocks; its spans count characters)",
    )
    command.add_argument("--unicode", action="store_true", help="find evidence with the Unicode-aware normalisation")
    command.add_argument(
        "--merged-table",
        type=Path,
        metavar="OUT.yaml",
        help="also measure GCA's routing table with one search segment per type (an ablation) and write it",
    )


def _eval(options: argparse.Namespace) -> int:
    from verl_bridge.evaluation.metrics import evaluate

    result = evaluate(options.rollouts, unicode=options.unicode)
    if options.merged_table:
        from verl_bridge.evaluation.merged import write_merged_table

        _, unseen = write_merged_table(options.rollouts, options.merged_table, unicode=options.unicode)
        print(f"merged table: {options.merged_table}", file=sys.stderr)
        for name in unseen:
            print(f"no search tokens of type {name}: its entry is 0; give more rollouts", file=sys.stderr)
    print(json.dumps(result.to_dict()) if options.json else result.table())
    for rollout in result.disagreements:
        print(f"recorded em disagrees: {rollout}", file=sys.stderr)
    return 1 if result.disagreements else 0
