"""What the model cards of common encoder families ask for. A family is a setting and never guessed from a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The conventions an encoder was trained with.

    Args:
        query_prefix: put before every query.
        passage_prefix: put before every passage.
        pooling: how token vectors become one: ``mean`` or ``cls``.
        normalize: whether vectors are scaled to length 1.
    """

    query_prefix: str
    passage_prefix: str
    pooling: str
    normalize: bool


FAMILIES: dict[str, Family] = {
    "e5": Family("query: ", "passage: ", "mean", True),
    "bge": Family("Represent this sentence for searching relevant passages: ", "", "cls", True),
    "gte": Family("", "", "mean", True),
    "minilm": Family("", "", "mean", True),
    "contriever": Family("", "", "mean", False),
}


def get_family(name: str | None) -> Family | None:
    """The family of that name; None for None. Raises ValueError that lists the names."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"encoder family {name!r} is unknown; use one of {', '.join(FAMILIES)}, or set the prefixes")
    return None if name is None else FAMILIES[name]
