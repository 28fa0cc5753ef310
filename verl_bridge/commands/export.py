"""``verl-bridge export``: a learnt query encoder as a plain sentence-transformers folder, for use anywhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import add_command, add_encoder_arguments, encoder_settings

TRIED = ("who wrote Oblomov?", "the capital of a country", "Wer hat den Roman geschrieben, und wann war das?")
TOLERANCE = 1e-4  # between the vectors of the folder and those of the adapter, relative to their length

CARD = """# Query encoder

A sentence-transformers model for **queries**: `{encoder}` with the LoRA adapter `{adapter}` merged into its weights
(trained with BRIDGE by verl_bridge). Documents are **not** encoded with it: their encoder stayed `{encoder}`
as it was{index}, and with that one further documents have to be encoded.

```python
from sentence_transformers import SentenceTransformer

queries = SentenceTransformer("this folder").encode_query(["who wrote Oblomov?"])  # adds the prefix {query_prefix!r}
documents = SentenceTransformer({encoder!r}).encode([{passage_prefix!r} + "title\\ntext"]{documents})
```

`encode` adds nothing: write the prefix yourself, or say `prompt_name="query"`. Similarity: inner product{cosine}.
"""


def add(commands: Any) -> None:
    """Adds ``export`` to the parser."""
    export = add_command(commands, "export", _export, "write a learnt query encoder as a sentence-transformers folder")
    export.add_argument(
        "--adapter", type=Path, required=True, help="adapter folder of a run, or retriever/ of one of its checkpoints"
    )
    export.add_argument("--out", type=Path, required=True, help="the folder to write; must not exist")
    export.add_argument("--index", help="the run's index: names encoder and prefixes, and is compared with the encoder")
    add_encoder_arguments(export, required=False)


def _export(options: argparse.Namespace) -> int:
    if options.out.exists():
        raise ValueError(f"--out={options.out} exists; give a folder that does not")
    adapter = _adapter_folder(options.adapter)
    result = export_encoder(adapter, options.out, index=options.index, **_settings(options))
    line = "{out}: {encoder} with {adapter} merged; vectors agree within {difference:.1e}"
    print(json.dumps(result) if options.json else line.format(**result))
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``load_encoders``, the encoder's name among them: what is given, else what the index says."""
    from verl_bridge.retrieval import manifest

    settings = {"encoder": options.encoder, **encoder_settings(options)}
    if options.index:
        settings = manifest.encoder_settings(options.index, settings)
    if not settings["encoder"]:
        raise ValueError("--encoder is missing: give it, or the run's --index folder, which names it")
    return settings


def _adapter_folder(folder: Path) -> Path:
    """The folder with the adapter's files: itself, or ``adapter/`` in a checkpoint."""
    for place in (folder, folder / "adapter"):
        if (place / "adapter_model.safetensors").is_file() and (place / "adapter_config.json").is_file():
            return place
    raise ValueError(
        f"--adapter={folder} holds no adapter_config.json and adapter_model.safetensors, nor does its folder adapter/; "
        "give a run's adapter folder, or the folder retriever/ of one of its checkpoints"
    )


def export_encoder(
    adapter: Path, out: Path, *, encoder: str, index: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Writes the encoder with the adapter merged; the folder appears when it is complete and has been tried.

    Args:
        adapter: folder in PEFT's format.
        out: the folder to write.
        encoder: sentence-transformers folder or hub name of the base.
        index: compared with the base where given.
        settings: the others of :func:`verl_bridge.retrieval.encoder.load_encoders`.

    Returns:
        ``out``, ``adapter``, ``encoder``, ``query_prefix``, ``passage_prefix``, ``dim`` and ``difference``, the largest
        between a vector of the folder and one of the adapter.

    Raises:
        ValueError: the adapter is damaged or was not made for this encoder, or the index with another one.
    """
    from sentence_transformers import SentenceTransformer

    from verl_bridge.files import new_folder
    from verl_bridge.retrieval.encoder import load_encoders

    config = _read_config(adapter / "adapter_config.json")
    queries, documents = load_encoders(encoder, lora_rank=config["r"], **settings)
    base, made = queries.base, queries.base.adapter.peft_config["default"]
    if config["lora_alpha"] != made.lora_alpha:
        raise ValueError(
            f"{adapter} has lora_alpha={config['lora_alpha']}, verl_bridge trains with {made.lora_alpha}; merge it "
            "with peft itself (PeftModel.merge_and_unload)"
        )
    if index is not None:
        _compare(index, base.describe())
    queries.load_adapter(adapter, version=1)
    right = queries.encode_queries(TRIED)
    base.adapter.merge_and_unload(safe_merge=True)  # in place: the model's layers are plain again
    model = base.model
    if base.adds_normalize:
        from sentence_transformers.models import Normalize

        model.append(Normalize())
    model.prompts = {"query": queries.query_prefix, "document": documents.passage_prefix}
    with new_folder(out) as folder:
        model.save_pretrained(str(folder), create_model_card=False)
        (folder / "README.md").write_text(_card(encoder, adapter, index, queries.query_prefix, documents, base))
        saved = SentenceTransformer(str(folder), device=str(model.device))
        vectors = saved.encode_query(list(TRIED), convert_to_tensor=True)
        difference = ((vectors - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
        if not difference <= TOLERANCE:
            raise ValueError(
                f"the exported encoder's vectors differ by {difference:.1e} from the adapter's, more than {TOLERANCE}; "
                "the installed sentence-transformers does not save this encoder whole"
            )
    return {
        "out": str(out),
        "adapter": str(adapter),
        "encoder": encoder,
        "query_prefix": queries.query_prefix,
        "passage_prefix": documents.passage_prefix,
        "dim": base.dim,
        "difference": difference,
    }


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
        if type(config["r"]) is not int or config["r"] < 1 or not isinstance(config["lora_alpha"], int | float):
            raise ValueError(f"r is {config['r']!r}, lora_alpha {config['lora_alpha']!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be used ({type(error).__name__}: {error}); give another adapter") from error
    return config


def _compare(index: str, base: dict[str, Any]) -> None:
    from verl_bridge.retrieval.manifest import check_index

    manifest = check_index(index)
    for key in ("dim", "fingerprint", "pooling", "normalised"):
        if manifest[key] is not None and manifest[key] != base[key]:
            raise ValueError(
                f"index {index} was built with {key} {manifest[key]!r}, encoder {base['encoder']!r} has {base[key]!r}; "
                "give the encoder that the run used"
            )


def _card(encoder: str, adapter: Path, index: str | None, query_prefix: str, documents: Any, base: Any) -> str:
    return CARD.format(
        encoder=encoder,
        adapter=adapter,
        index=f" (the vectors of the index `{index}` are its own)" if index else "",
        query_prefix=query_prefix,
        passage_prefix=documents.passage_prefix,
        documents=", normalize_embeddings=True" if base.adds_normalize else "",
        cosine=", which is the cosine here" if base.normalised else "",
    )
