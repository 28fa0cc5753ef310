"""A documented setting, and the checks of its value: what every section of the schema is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value and the fix."""


_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    empty: bool = False,
) -> Any:
    """A documented field; its rules are what :func:`check_value` reads.

    Args:
        default: what it is when nothing is set.
        doc: for whoever sets it.
        choices: the allowed words; any where empty.
        low, high: the least and the largest number.
        open_low, open_high: ``low`` or ``high`` itself is not allowed.
        empty: '' is a value.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "low": low,
        "high": high,
        "open_low": open_low,
        "open_high": open_high,
        "empty": empty,
    }
    return field(default=default, metadata=metadata)


def mapping(key: str, value: Any) -> Mapping[str, Any]:
    """The group of settings at ``key``, empty for None. Raises ConfigError for anything that is not a group."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        hint = " (did verl_bridge's plugin load? run `verl-bridge doctor`)" if key == "verl_bridge" else ""
        raise ConfigError(f"{key}={value!r} is not a group of settings{hint}")
    return value


def _closest(word: Any, words: Iterable[str]) -> str:
    match = get_close_matches(str(word), list(words), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_keys(key: str, values: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raises ConfigError for a name in the group ``key`` that is not allowed, with the closest one that is."""
    allowed = list(allowed)
    for name, value in values.items():
        if name not in allowed:
            raise ConfigError(
                f"unknown setting {key}.{name}={value!r}: allowed are {', '.join(allowed)}{_closest(name, allowed)}"
            )


def check_section(key: str, section: Any) -> None:
    """:func:`check_value` on every field of a section but the routing table, which has its own check."""
    for entry in fields(section):
        if entry.name != "routing":
            check_value(f"{key}.{entry.name}", getattr(section, entry.name), entry)


def check_value(key: str, value: Any, entry: Any) -> None:
    """Raises ConfigError for a value of another type than the field's, or one that its rules do not allow.

    Args:
        key: the full name, for the message.
        value: what is set.
        entry: the dataclass field made by :func:`option`.
    """
    rules = entry.metadata
    name, _, optional = entry.type.partition(" | ")
    if value is None and optional:
        return
    if type(value) is not _TYPES[name]:
        raise ConfigError(f"{key}={value!r} is not of type {name}")
    if value == "" and not rules["empty"]:
        raise ConfigError(f"{key}='' is empty: {'give a value, or null' if optional else 'give a value'}")
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(
            f"{key}={value!r}: allowed are {', '.join(rules['choices'])}{_closest(value, rules['choices'])}"
        )
    low, high = rules["low"], rules["high"]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value!r} is not finite")
    if low is not None and (value < low or (rules["open_low"] and value == low)):
        raise ConfigError(f"{key}={value!r}: it must be {'above' if rules['open_low'] else 'at least'} {low}")
    if high is not None and (value > high or (rules["open_high"] and value == high)):
        raise ConfigError(f"{key}={value!r}: it must be {'below' if rules['open_high'] else 'at most'} {high}")
