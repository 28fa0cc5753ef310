"""Checks in the driver, before Ray starts: a bad setting is one line and exit code 2, not a traceback from a worker.

The arms' yaml name :class:`Preflight` as a Hydra callback, so it runs however verl's ``main_ppo`` is launched.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl_bridge.config import VerlBridgeConfig, load_settings
from verl_bridge.config.schema import ConfigError, RetrieverConfig
from verl_bridge.integrations.checks import check_gold_answers, read_probe, stop_unless
from verl_bridge.integrations.sources import make_client
from verl_bridge.integrations.verl.checks import needs_files, prepare_config
from verl_bridge.plugin import TRAINERS
from verl_bridge.retrieval.encoder import is_hub_name
from verl_bridge.retrieval.families import get_family
from verl_bridge.retrieval.manifest import check_index


class Preflight(Callback):
    """Hydra's ``on_job_start``: stop the run with a message when it cannot work."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        stop_unless(check_run, config)


def check_run(config: DictConfig) -> None:
    """Everything about a composed config that can be checked without loading a model.

    Raises:
        ConfigError: a setting, file or data row the run cannot work with.
    """
    settings, _ = check_settings(config)
    check_probe(settings.retriever)
    built = check_files(settings.retriever) if needs_files(settings) else None
    if settings.retriever.url is not None:
        check_servers(settings.retriever, built)
    for key, file in data_files(config):
        check_rows(key, file)


def check_settings(config: DictConfig) -> tuple[VerlBridgeConfig, DictConfig]:
    """The checked settings, and the config as verl's own trainer will see it; no file is looked at.

    Raises:
        ConfigError: a setting the methods cannot work with.
    """
    settings = load_settings(config)
    # An unfilled ??? belongs to verl, which names it itself. A trainer of the user's own counts as a synchronous one.
    modes = {name: mode for mode, name in TRAINERS.items()}
    verl_mode = modes.get(OmegaConf.select(config, "trainer.v1.trainer_mode"), "sync")
    prepared = copy.deepcopy(config)
    prepare_config(prepared, settings, verl_mode)
    return settings, prepared


def data_files(config: DictConfig) -> Iterator[tuple[str, Path]]:
    """(key, path) of each local data file; verl fetches remote ones, and the trainer looks at their rows."""
    for key in ("train_files", "val_files"):
        files = config.data.get(key)
        for file in [files] if isinstance(files, str) else files or []:
            if "://" not in str(file):
                yield f"data.{key}", Path(str(file)).expanduser()


def check_probe(retriever: RetrieverConfig) -> None:
    """Raises ConfigError for a probe that cannot be read."""
    if retriever.probe is not None and Path(retriever.probe).is_dir():
        raise ConfigError(f"verl_bridge.retriever.probe={retriever.probe!r} is a folder: give a JSONL file, or null")
    read_probe(retriever.probe)


def check_files(retriever: RetrieverConfig) -> dict[str, Any]:
    """Corpus, index and encoder as far as they can be checked unread; what the index says about itself.

    Raises:
        ConfigError: one is missing, damaged or not made for the others.
    """
    for name in ("corpus", "index"):
        path = getattr(retriever, name)
        if not Path(path).exists():
            raise ConfigError(f"verl_bridge.retriever.{name}={path!r} does not exist: give the path of the {name}")
    if not Path(retriever.corpus).is_file():
        raise ConfigError(
            f"verl_bridge.retriever.corpus={retriever.corpus!r} is not a file: give a JSONL or JSONL.gz file"
        )
    encoder = retriever.encoder
    if encoder is not None and not is_hub_name(encoder) and not Path(encoder).is_dir():
        raise ConfigError(f"verl_bridge.retriever.encoder={encoder!r} does not exist: give a folder or a hub name")
    try:
        built = check_index(retriever.index)
    except ValueError as error:
        raise ConfigError(f"verl_bridge.retriever.index={retriever.index!r}: {error}") from error
    if Path(retriever.index).is_file():
        if encoder is None:
            raise ConfigError(
                f"verl_bridge.retriever.encoder is not set: the bare FAISS file {retriever.index!r} does not say which "
                "encoder made it"
            )
        return built
    family, prefix, made_with = get_family(retriever.family), retriever.passage_prefix, built["passage_prefix"]
    if prefix is None:
        prefix = made_with if family is None else family.passage_prefix
    if prefix != made_with:
        named = f"passage_prefix={prefix!r}" + ("" if retriever.passage_prefix is not None else " of its family")
        raise ConfigError(
            f"verl_bridge.retriever.{named}, but the index {retriever.index!r} was built with {made_with!r}: set "
            "the one it was built with, or rebuild it"
        )
    made_from, size = built["corpus"]["size"], Path(retriever.corpus).stat().st_size
    if not retriever.corpus.endswith(".gz") and made_from != size:
        raise ConfigError(
            f"verl_bridge.retriever.index={retriever.index!r} was built from a corpus of {made_from} bytes, but "
            f"verl_bridge.retriever.corpus={retriever.corpus!r} has {size}: rebuild the index or name the corpus it "
            "was built from"
        )
    return built


def check_servers(retriever: RetrieverConfig, built: dict[str, Any] | None) -> None:
    """Every server behind ``url`` is up, takes the token and serves one and the same index: the learner's, if any.

    Args:
        retriever: its ``url`` is set.
        built: what :func:`check_files` returned; None where no index is opened here.

    Raises:
        ConfigError: a server that does not answer, refuses the token or serves another index.
    """

    async def ask() -> dict[str, dict[str, Any]]:
        async with make_client(retriever, deadline=min(retriever.deadline, 10.0), attempts=3) as client:
            states = await client.health()
            await client.versions()  # needs the token, which health does not
            return states

    try:
        states = asyncio.run(ask())
    except RuntimeError as error:
        hint = f" (the token is read from {retriever.token_env})" if "HTTP 401" in str(error) else ""
        raise ConfigError(f"verl_bridge.retriever.url={retriever.url!r}: {error}{hint}") from error
    sizes = {url: (state["documents"], state["dim"]) for url, state in states.items()}
    if built is not None:
        sizes[retriever.index] = (built["documents"], built["dim"])
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{place} {documents} documents × {dim}" for place, (documents, dim) in sizes.items())
        raise ConfigError(
            f"verl_bridge.retriever.url={retriever.url!r}: {said}; serve one index everywhere, the one that "
            "verl_bridge.retriever.index names"
        )


def check_rows(key: str, file: Path) -> None:
    """Raises ConfigError for a data file that is missing, unreadable, empty or without gold answers; names ``key``."""
    if not file.is_file():
        raise ConfigError(f"{key}={str(file)!r} does not exist: give the path of a parquet file")
    if file.suffix != ".parquet":
        return  # verl reads other forms; the trainer looks at the rows once they are loaded
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        names = parquet.read_schema(file).names
        columns = ["reward_model"] if "reward_model" in names else []
        table = parquet.read_table(file, columns=columns)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # as data check reads it
        raise ConfigError(f"{key}={str(file)!r} is not a readable parquet file ({error}): write it again") from error
    if not table.num_rows:
        raise ConfigError(f"{key}={str(file)!r} has no rows: give at least one")
    if "agent_name" in names:
        raise ConfigError(
            f"{key}={str(file)!r} has a column agent_name, by which its rows would choose an agent loop that writes no "
            "search traces: drop the column"
        )
    if not columns:
        raise ConfigError(
            f"{key}={str(file)!r} has no column reward_model and so no gold answers: every row needs "
            "reward_model={'ground_truth': {'target': ['answer', 'alias', ...]}}"
        )
    check_gold_answers(key, rows)
