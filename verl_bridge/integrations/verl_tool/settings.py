"""Settings of the search tool, from the environment: verl-tool's tool server hands a tool none of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_bridge.config.schema import ConfigError

PREFIX = "VERL_BRIDGE_"
URL, CORPUS, INDEX = PREFIX + "RETRIEVER_URL", PREFIX + "CORPUS", PREFIX + "INDEX"
SHOWN, TOP_K, DEADLINE, TOKEN = PREFIX + "SHOWN", PREFIX + "TOP_K", PREFIX + "DEADLINE", PREFIX + "TOKEN"
#: Further settings of a retriever in the tool server's own process, as `verl-bridge serve` names them.
LOCAL = ("encoder", "family", "query_prefix")

#: Passages the model reads for one search, and candidates kept for the trainer.
DEFAULT_SHOWN, DEFAULT_TOP_K = 3, 10
#: Seconds for a search, retries included: below verl-tool's ``tool_call_timeout`` (30), which ends the whole rollout.
DEFAULT_DEADLINE = 20.0


def read_counts(env: Mapping[str, str]) -> tuple[int, int]:
    """``VERL_BRIDGE_SHOWN`` and ``VERL_BRIDGE_TOP_K``. Raises ConfigError that names the variable."""
    shown, top_k = (
        _number(env, name, int, default) for name, default in ((SHOWN, DEFAULT_SHOWN), (TOP_K, DEFAULT_TOP_K))
    )
    if top_k < shown:
        raise ConfigError(f"{TOP_K}={top_k} is below {SHOWN}={shown}: keep at least as many candidates as are shown")
    return shown, top_k


def open_source(env: Mapping[str, str]) -> Any:
    """What answers searches: a client of ``VERL_BRIDGE_RETRIEVER_URL``, or a retriever in this process.

    The second is made from ``VERL_BRIDGE_CORPUS`` and ``VERL_BRIDGE_INDEX`` and never learns.

    Raises:
        ConfigError: neither or both are set, or a value that cannot be used; names the variable and the fix.
    """
    url, corpus, index = (env.get(name) or None for name in (URL, CORPUS, INDEX))
    _, top_k = read_counts(env)
    if url is not None and (corpus or index):
        raise ConfigError(f"{URL}={url!r} and {CORPUS} or {INDEX} exclude each other: unset one side")
    if url is not None:
        from verl_bridge.retrieval.client import RetrievalClient

        deadline = _number(env, DEADLINE, float, DEFAULT_DEADLINE)
        try:
            return RetrievalClient(url, token=env.get(TOKEN) or None, deadline=deadline)
        except ValueError as error:
            raise ConfigError(f"{URL}={url!r} with the token in {TOKEN}: {error}") from None
    if corpus is None or index is None:
        raise ConfigError(
            f"the search tool has nothing to search: set {URL} to a `verl-bridge serve`, or {CORPUS} and {INDEX}"
        )
    from verl_bridge.retrieval.service import RetrieverService

    settings = {name: env[PREFIX + name.upper()] for name in LOCAL if env.get(PREFIX + name.upper())}
    try:
        return RetrieverService(corpus=corpus, index=index, top_k=top_k, **settings)
    except ValueError as error:
        raise ConfigError(f"{CORPUS}={corpus!r}, {INDEX}={index!r}: {error}") from None


def _number(env: Mapping[str, str], name: str, kind: type, default: Any) -> Any:
    text = env.get(name)
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not 0 < value < float("inf"):
        raise ConfigError(f"{name}={text!r} is not a positive {'whole ' if kind is int else ''}number")
    return value
