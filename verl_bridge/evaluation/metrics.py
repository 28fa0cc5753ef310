"""Accuracy and grounding of saved rollouts, counted row by row: memory does not grow with the files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verl_bridge.config.schema import ROLLOUT_TYPES
from verl_bridge.evaluation.rollouts import read_rollouts
from verl_bridge.qa.signals import Signals, rollout_signals


def type_of(signals: Signals) -> str:
    """Type of a rollout [paper]; D undivided, since whether its evidence could be found is its group's to say."""
    if signals.hit:
        return "A" if signals.correct else "B1" if signals.answered else "B2"
    return "D" if signals.correct else "C"


@dataclass
class Figures:
    """Counts of some rollouts.

    Args:
        n: rollouts.
        types: rollouts by type.
        searches: well-formed searches in all.
        yes_no: rollouts of questions with a yes/no gold, where a hit says nothing.
        compared: rollouts whose recorded EM was compared with ours.
    """

    n: int = 0
    types: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLLOUT_TYPES, 0))
    searches: int = 0
    yes_no: int = 0
    compared: int = 0

    def add(self, signals: Signals, searches: int, compared: bool) -> None:
        """Count one rollout."""
        self.n += 1
        self.types[type_of(signals)] += 1
        self.searches += searches
        self.yes_no += signals.yes_no
        self.compared += compared

    def to_dict(self) -> dict[str, Any]:
        """em, tool_hit, supcor, grounded_share, hitacc, hit_but_wrong: shares in [0, 1], 0 where nothing is divided;
        types: counts; searches: per rollout."""
        a, wrong, unsupported = self.types["A"], self.types["B1"] + self.types["B2"], self.types["D"]
        return {
            "n": self.n,
            "em": _share(a + unsupported, self.n),
            "tool_hit": _share(a + wrong, self.n),
            "supcor": _share(a, self.n),
            "grounded_share": _share(a, a + unsupported),
            "hitacc": _share(a, a + wrong),
            "hit_but_wrong": _share(wrong, self.n),
            "types": dict(self.types),
            "searches": _share(self.searches, self.n),
            "yes_no": self.yes_no,
            "em_compared": self.compared,
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Evaluation:
    """What some files of rollouts say.

    Args:
        total: figures of all files together.
        files: figures by file.
        disagreements: ``file: id`` of the rollouts whose recorded EM is not ours.
    """

    total: Figures
    files: dict[str, Figures]
    disagreements: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON: the figures of all files, then ``files`` and ``disagreements``."""
        files = {name: figures.to_dict() for name, figures in self.files.items()}
        return {**self.total.to_dict(), "files": files, "disagreements": self.disagreements}

    def table(self) -> str:
        """One column per file, and one for all when there are several."""
        named = {os.path.basename(name): figures for name, figures in self.files.items()}
        if len(named) < len(self.files):
            named = dict(self.files)
        columns = {name: figures.to_dict() for name, figures in named.items()}
        if len(columns) > 1:
            columns["all"] = self.total.to_dict()
        rows = [["", *columns]]
        for key in self.total.to_dict():
            if key != "types":
                rows.append([key, *(_figure(column[key]) for column in columns.values())])
                continue
            for kind in ROLLOUT_TYPES:
                counts = [(column["types"][kind], column["n"]) for column in columns.values()]
                rows.append([f"type {kind}", *(f"{count} ({_share(count, n):.1%})" for count, n in counts)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows)
        return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def evaluate(paths: Iterable[str | os.PathLike], *, unicode: bool = False) -> Evaluation:
    """Read every file once and count.

    Args:
        paths: the files, each once.
        unicode: find evidence with the Unicode-aware normalisation of :mod:`verl_bridge.qa.answers`.

    Raises:
        ValueError: a file or a row that cannot be read (:func:`~verl_bridge.evaluation.rollouts.read_rollouts`).
    """
    total, files, disagreements = Figures(), {}, []
    for path in map(str, paths):
        if path in files:
            raise ValueError(f"{path} is given twice: its rollouts would count twice")
        files[path] = Figures()
        for rollout in read_rollouts(path):
            signals = rollout_signals(rollout.trace, unicode=unicode)
            recorded = rollout.recorded_em
            for figures in (total, files[path]):
                figures.add(signals, len(rollout.trace.searches), recorded is not None)
            if recorded is not None and recorded != signals.correct:
                disagreements.append(f"{path}: {rollout.id}")
    return Evaluation(total, files, disagreements)
