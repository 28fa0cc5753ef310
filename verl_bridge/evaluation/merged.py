"""The table of the "one search segment" ablation, measured on saved rollouts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from verl_bridge.algorithms.gca import RoutingTable, merged_table
from verl_bridge.algorithms.grounding import RolloutType, Segment, TurnTable, segment_map
from verl_bridge.evaluation.metrics import type_of
from verl_bridge.evaluation.rollouts import SavedRollout, read_rollouts
from verl_bridge.files import new_file
from verl_bridge.qa.signals import rollout_signals

_BATCH = 256  # rollouts whose segments are laid out at a time
_CODES = {kind.name: kind for kind in RolloutType} | {"D": RolloutType.D_RETRIEVABLE}


def segment_tokens(paths: Iterable[str | os.PathLike], *, unicode: bool = False) -> Tensor:
    """Sampled tokens by rollout type and segment over saved rollouts, ``(types, segments)`` int64.

    Characters stand for tokens where a file is in text form. As in training, questions with a yes/no gold and groups
    of two or more with equal rewards get no residual and are left out; a rollout that is alone in its group counts.
    Type D is not divided: it is counted under ``D_RETRIEVABLE``.

    Raises:
        ValueError: a file or a row that cannot be read.
    """
    total = torch.zeros(len(RolloutType), len(Segment), dtype=torch.int64)
    for path in paths:
        groups: dict[str, list[tuple[float, int, Tensor]]] = defaultdict(list)
        rows = read_rollouts(path)
        while rollouts := list(islice(rows, _BATCH)):
            for group, row in _counts(rollouts, unicode):
                groups[group].append(row)
        for members in groups.values():
            if len(members) == 1 or len({reward for reward, _, _ in members}) > 1:
                for _, code, counts in members:
                    total[code] += counts
    return total


def _counts(rollouts: list[SavedRollout], unicode: bool) -> Iterator[tuple[str, tuple[float, int, Tensor]]]:
    """Group, reward, type and tokens by segment ``(segments,)`` of each rollout without a yes/no gold."""
    signals = [rollout_signals(rollout.trace, unicode=unicode) for rollout in rollouts]
    traces = [rollout.trace for rollout in rollouts]
    first = torch.tensor([signal.first_hit_turn for signal in signals])
    length = max(trace.response_length for trace in traces)
    # spans lie only on sampled tokens, so that no other mask is needed
    segments = segment_map(
        TurnTable.of([trace.turns for trace in traces]), first, torch.ones(len(traces), length, dtype=torch.bool)
    )
    counts = torch.stack([(segments == code).sum(dim=1) for code in Segment], dim=1)
    counts[:, Segment.NONE] = 0
    for rollout, signal, row in zip(rollouts, signals, counts, strict=True):
        if not signal.yes_no:
            reward = float(signal.correct) if rollout.reward is None else rollout.reward
            yield rollout.group, (reward, int(_CODES[type_of(signal)]), row)


def write_merged_table(
    paths: Iterable[str | os.PathLike], out: str | os.PathLike, *, unicode: bool = False
) -> tuple[RoutingTable, list[str]]:
    """Measure the table and write it as YAML for ``verl_bridge.gca``.

    Returns:
        the table, and the types with a hit of which the rollouts hold no search token: their entry is 0.

    Raises:
        ValueError: a file or a row that cannot be read, or ``out`` among the files.
        OSError: ``out`` cannot be written.
    """
    paths = [str(path) for path in paths]
    if Path(out).resolve() in {Path(path).resolve() for path in paths}:
        raise ValueError(f"--merged-table {out} is one of the rollouts files: choose another name")
    tokens = segment_tokens(paths, unicode=unicode)
    table = merged_table(tokens)
    searched = tokens[:, [Segment.VSEARCH, Segment.RSEARCH]].sum(dim=1).tolist()
    unseen = [name for name in ("A", "B1", "B2") if not searched[_CODES[name]]]
    with new_file(out) as file:
        file.write(_yaml(table, tokens, unseen, paths))
    return table, unseen


def _yaml(table: RoutingTable, tokens: Tensor, unseen: list[str], paths: list[str]) -> str:
    names = " ".join(" ".join(os.path.basename(path).split()) for path in paths)  # no line break leaves the comment
    lines = [
        "# GCA with one search segment per rollout type, measured by `verl-bridge eval --merged-table` on",
        f"# {names}; characters stand for tokens where rollouts are text.",
    ]
    lines += ["verl_bridge:", "  gca:", "    merged_search: true", "    routing:"]
    rows = {"A": table.a, "B1": table.b1, "B2": table.b2, "C": table.c, "D": table.d_retrievable}
    for name, (search, _, answer) in rows.items():
        useful, later = tokens[_CODES[name], [Segment.VSEARCH, Segment.RSEARCH]].tolist()
        seen = (
            "no search tokens of this type: 0" if name in unseen else f"search tokens: {useful} useful, {later} later"
        )
        entry = f"{{VSEARCH: {search!r}, RSEARCH: {search!r}, ANS: {answer!r}}}"
        lines.append(f"      {name}: {entry}  # {seen}")
    return "\n".join(lines) + "\n"
