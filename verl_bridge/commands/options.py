"""Options that several commands share, so that they are called and mean the same everywhere."""

from __future__ import annotations

import argparse
from typing import Any

from verl_bridge.config.schema import DTYPES
from verl_bridge.retrieval.families import FAMILIES

_ENCODER = ("family", "revision", "query_prefix", "passage_prefix", "pooling", "normalize", "max_length")


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_command(
    commands: Any, name: str, run: Any, text: str, *, description: str | None = None
) -> argparse.ArgumentParser:
    """A command with ``--json`` that ``run(options)`` carries out.

    Args:
        commands: where it is added.
        name: what it is called.
        run: options to the exit code.
        text: what it does, in a few words.
        description: the same at length, for its own ``--help``; by default the text.
    """
    command = commands.add_parser(name, help=text, description=description or text[0].upper() + text[1:] + ".")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    command.set_defaults(run=run)
    return command


def add_encoder_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The encoder and how texts become vectors; what is not given is the family's, the index's or the model's own."""
    parser.add_argument(
        "--encoder",
        required=required,
        help="sentence-transformers folder or hub name" + ("" if required else " (default: the one the index names)"),
    )
    parser.add_argument("--revision", help="hub revision of the encoder; pin it so that an index stays usable")
    parser.add_argument(
        "--family", choices=sorted(FAMILIES), help="the family's prefixes, pooling and normalisation at once"
    )
    parser.add_argument("--query-prefix", help="put before every query ('query: ' for E5)")
    parser.add_argument("--passage-prefix", help="put before every passage ('passage: ' for E5)")
    parser.add_argument("--pooling", choices=("mean", "cls"), help="for a model that does not say")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="whether vectors are scaled to length 1"
    )
    parser.add_argument("--max-length", type=positive, help="longest text in tokens, the rest is cut off")
    parser.add_argument(
        "--compute-dtype", choices=DTYPES, default="float32", help="number format the encoder computes in"
    )
    parser.add_argument("--device", default="cpu", help="torch device, such as cpu or cuda")


def encoder_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``load_encoders`` besides the name, None where nothing was given."""
    return {key: getattr(options, key) for key in (*_ENCODER, "compute_dtype", "device")}


def add_retriever_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """What a retriever is opened with; ``required`` is about ``--corpus`` and ``--index``."""
    parser.add_argument("--corpus", required=required, help="JSONL or JSONL.gz")
    parser.add_argument("--index", required=required, help="index folder, or a FAISS file such as e5_Flat.index")
    add_encoder_arguments(parser, required=False)
    parser.add_argument("--lora-rank", type=positive, default=16, help="rank of the query adapter")
    parser.add_argument(
        "--search-dtype", choices=DTYPES, default="auto", help="number format of an exact search's first pass"
    )
    parser.add_argument("--search-parameters", help="such as nprobe=32 (default: the ones kept with the index)")


def retriever_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``open_retriever`` from :func:`add_retriever_arguments`."""
    names = ("corpus", "index", "encoder", "lora_rank", "search_dtype", "search_parameters")
    return {**{key: getattr(options, key) for key in names}, **encoder_settings(options)}
