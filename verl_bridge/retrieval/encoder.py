"""Text encoders: one frozen base model in memory, a LoRA adapter that only queries pass through.

The base is any sentence-transformers model. Prefixes, pooling and normalisation are the model's own or settings, a
family of them at once if wanted (``families.py``), and never guessed from a name. The model stays in evaluation mode:
without dropout serving and training give the same vectors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.files import new_folder
from verl_bridge.retrieval.families import get_family
from verl_bridge.retrieval.lengths import length_groups
from verl_bridge.retrieval.precision import resolve_dtype

if TYPE_CHECKING:
    import torch

LORA_ALPHA = 32.0  # LoRA's scale is this over the rank [ours]


def is_hub_name(name: str) -> bool:
    """Whether an encoder's name has to mean the hub: no folder of that name, and not written like a path."""
    return not Path(name).exists() and not name.startswith(("/", "./", "../", "~")) and name.count("/") <= 1


class BaseEncoder:
    """A frozen sentence-transformers model.

    Args:
        name: a folder or a hub name.
        revision: the hub revision; pin it so that an index stays usable.
        max_length: longest input in tokens, the rest is cut off; None keeps the model's own limit.
        pooling: ``mean`` or ``cls``, for a model that does not say; None keeps the model's own.
        normalize: whether vectors are scaled to length 1; None keeps the model's own choice.
        device: torch device.
        batch_size: texts in one forward pass.

    Raises:
        ValueError: the model cannot be loaded (names it and the fix), or ``normalize=False`` for one that always does.
    """

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        max_length: int | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        device: str = "cpu",
        batch_size: int = 64,
    ) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.name, self.revision, self.batch_size = str(name), revision, batch_size
        try:
            model = SentenceTransformer(
                self.name, revision=revision, device=device, model_kwargs={"dtype": torch.float32}
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"encoder {self.name!r} (revision {revision}) cannot be loaded: {error}; "
                "give a sentence-transformers folder or hub name, and check network and revision for the latter"
            ) from error
        self.model = model.eval().requires_grad_(False)
        if max_length is not None:
            self.model.max_seq_length = max_length
        self.max_length: int = self.model.max_seq_length
        self.dim: int = self.model.get_embedding_dimension()
        kinds = [type(module).__name__ for module in self.model]
        if normalize is False and "Normalize" in kinds:
            raise ValueError(f"normalize=False, but encoder {self.name!r} normalises by itself; leave normalize out")
        self.normalised = "Normalize" in kinds or bool(normalize)
        self.adds_normalize = self.normalised and "Normalize" not in kinds  # the model itself does not
        if pooling is not None:
            self._set_pooling(pooling)
        if isinstance(getattr(self.model[0], "processing_kwargs", None), dict):
            # lengths in steps: a processor's library keeps code and memory for every shape it has met
            self.model[0].processing_kwargs.setdefault("text", {}).setdefault("pad_to_multiple_of", 4)
        self.pooling = next((str(m.pooling_mode) for m in self.model if hasattr(m, "pooling_mode")), "none")
        self.adapter: Any = None  # the peft model that a QueryEncoder injects

    def _set_pooling(self, pooling: str) -> None:
        from sentence_transformers.models import Pooling

        place = next((i for i, m in enumerate(self.model) if hasattr(m, "pooling_mode")), None)
        if pooling not in ("mean", "cls") or place is None:
            raise ValueError(f"pooling {pooling!r} cannot be set for encoder {self.name!r}; use 'mean', 'cls' or None")
        self.model[place] = Pooling(self.dim, pooling_mode=pooling)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the base weights: the same model is recognised under any path."""
        digest = hashlib.sha256()
        for key, value in sorted(self.model.state_dict().items()):
            digest.update(key.encode())
            digest.update(value.cpu().contiguous().numpy())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What an index must agree with: weights, pooling, normalisation and dimension."""
        return {
            "encoder": self.name,
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "pooling": self.pooling,
            "normalised": self.normalised,
            "dim": self.dim,
        }

    def encode(self, texts: Sequence[str], model: Any = None) -> torch.Tensor:
        """Vectors of texts in their order. Texts of similar length share a pass, so that little padding is computed.

        Args:
            texts: what to encode, prefix included.
            model: a copy of the model to run instead, in another number format for instance.

        Returns:
            float32 vectors, shape (texts, dim).
        """
        import torch

        model = self.model if model is None else model
        if not texts:
            return torch.empty(0, self.dim, device=self.model.device)
        groups = list(length_groups(texts, self.batch_size))
        order = [position for group in groups for position in group]
        parts = []
        for group in groups:
            features = self.model.preprocess([texts[i] for i in group])
            features = {k: v.to(self.model.device) if torch.is_tensor(v) else v for k, v in features.items()}
            parts.append(model(features)["sentence_embedding"].float())
        vectors = torch.cat(parts)[torch.tensor(order, device=self.model.device).argsort()]
        # a copy in a short format rounds what it normalised
        again = self.adds_normalize or (model is not self.model and self.normalised)
        return torch.nn.functional.normalize(vectors, dim=-1) if again else vectors


class DocumentEncoder:
    """Documents through the frozen base, whatever adapter the queries use.

    Args:
        base: the shared base model.
        family: the encoder family, whose passage prefix is used when none is given; see ``families.py``.
        passage_prefix: put before every passage ("passage: " for E5); None is the family's, or none.
        compute_dtype: ``float32``, ``bfloat16``, ``float16`` (GPU), or ``auto``. Vectors differ by about 1e-3 between
            them, the same for serving and training, which both read the stored ones.

    Raises:
        ValueError: another compute_dtype or family.
    """

    def __init__(
        self,
        base: BaseEncoder,
        *,
        family: str | None = None,
        passage_prefix: str | None = None,
        compute_dtype: str = "float32",
    ) -> None:
        known = get_family(family)
        if passage_prefix is None:
            passage_prefix = known.passage_prefix if known else ""
        self.base, self.family, self.passage_prefix = base, family, passage_prefix
        self.compute_dtype = resolve_dtype(compute_dtype, base.model.device.type)

    def describe(self) -> dict[str, Any]:
        """The base's description, with what else the passage vectors depend on."""
        return {
            **self.base.describe(),
            "family": self.family,
            "passage_prefix": self.passage_prefix,
            "max_length": self.base.max_length,
            "compute_dtype": self.compute_dtype,
        }

    def encode_documents(self, passages: Sequence[str]) -> torch.Tensor:
        """Float32 vectors of passages, shape (passages, dim), without gradient."""
        import contextlib

        import torch

        adapter, half = self.base.adapter, self.compute_dtype != "float32"
        with (
            torch.no_grad(),
            adapter.disable_adapter() if adapter is not None else contextlib.nullcontext(),
            torch.autocast(self.base.model.device.type, getattr(torch, self.compute_dtype), enabled=half),
        ):
            return self.base.encode([self.passage_prefix + passage for passage in passages])


class QueryEncoder:
    """Queries through the base plus a trainable LoRA adapter; a fresh adapter changes nothing.

    ``adapter_version`` counts the states of the adapter: whoever changes the weights raises it, whoever serves reports
    it. Not thread-safe: one thread owns an encoder. The adapter is on every linear layer but the pooler, which mean
    pooling never runs through (BERT: query, key, value and the dense layers).

    Args:
        base: the shared base model, one query encoder each.
        family: the encoder family, whose query prefix is used when none is given; see ``families.py``.
        query_prefix: put before every query ("query: " for E5); None is the family's, or none.
        lora_rank: rank of the adapter, 16 in the paper.
        seed: of the adapter's initial A matrices.

    Raises:
        ValueError: the base carries an adapter already, or an unknown family.
    """

    def __init__(
        self,
        base: BaseEncoder,
        *,
        family: str | None = None,
        query_prefix: str | None = None,
        lora_rank: int = 16,
        seed: int = 0,
    ) -> None:
        import torch
        from peft import LoraConfig, PeftModel

        known = get_family(family)
        if base.adapter is not None:
            raise ValueError(f"encoder {base.name!r} already carries an adapter; share one QueryEncoder instead")
        base.fingerprint  # noqa: B018  hashed before the adapter's layers wrap the base
        config = LoraConfig(
            r=lora_rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            base_model_name_or_path=base.name,
            revision=base.revision,
            target_modules="all-linear",
            exclude_modules=r".*pooler.*",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            base.adapter = PeftModel(base.model.transformers_model, config).eval()
        if query_prefix is None:
            query_prefix = known.query_prefix if known else ""
        self.base, self.query_prefix = base, query_prefix
        self.dim = base.dim
        self.adapter_version = 0

    def describe(self) -> dict[str, Any]:
        """The base's description and the prefix of the queries."""
        return {**self.base.describe(), "query_prefix": self.query_prefix}

    def encode_queries(
        self, queries: Sequence[str], *, training: bool = False, compute_dtype: str = "float32"
    ) -> torch.Tensor:
        """Vectors of queries with the current adapter.

        Args:
            queries: the texts; serving and training pass the same string, the prefix is added only here.
            training: keep the graph, so that gradients reach the adapter; values are the same either way.
            compute_dtype: ``bfloat16`` does the matrix products in it, under autocast; the adapter stays in float32.

        Returns:
            float32 vectors, shape (queries, dim).
        """
        import torch

        device, half = self.base.model.device.type, compute_dtype != "float32"
        with torch.set_grad_enabled(training), torch.autocast(device, getattr(torch, compute_dtype), enabled=half):
            vectors = self.base.encode([self.query_prefix + query for query in queries])
            # one that was normalised in a short format is not quite of length 1
            return torch.nn.functional.normalize(vectors, dim=-1) if half and self.base.normalised else vectors

    def lora_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trainable parameters by name, in a fixed order."""
        return {name: p for name, p in self.base.adapter.named_parameters() if p.requires_grad}

    def file_names(self) -> dict[str, str]:
        """What PEFT calls each of :meth:`lora_parameters` in its files, which leave the adapter's name out."""
        return {name: name.replace(".default.", ".") for name in self.lora_parameters()}

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter's tensors by name."""
        return {name: p.detach().clone() for name, p in self.lora_parameters().items()}

    def set_adapter_state(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Writes adapter tensors in place and sets the version. Raises ValueError when names or shapes differ."""
        import torch

        parameters = self.lora_parameters()
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        if shapes != {name: tuple(value.shape) for name, value in state.items()}:
            raise ValueError(
                f"the adapter does not fit encoder {self.base.name!r}: {len(state)} tensors for {len(shapes)} "
                "parameters or other shapes; use the lora_rank and encoder it was trained with"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])
        self.adapter_version = version

    def save_adapter(self, directory: str | os.PathLike, state: dict[str, torch.Tensor] | None = None) -> None:
        """Writes the adapter in PEFT format, or ``state`` in its place; the folder appears when complete."""
        with new_folder(directory) as folder:
            # never the embeddings, which nothing changes: to be sure of that, peft would ask the hub at every save
            self.base.adapter.save_pretrained(folder, save_embedding_layers=False, state_dict=state)
            (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card

    def adapter_bytes(self) -> bytes:
        """The adapter's tensors as the bytes of PEFT's ``adapter_model.safetensors``."""
        from safetensors.torch import save

        names = self.file_names()
        return save({names[name]: p.detach().cpu() for name, p in self.lora_parameters().items()})

    def load_adapter(self, source: str | os.PathLike | bytes, version: int) -> None:
        """Takes over a saved adapter; on an error nothing changes.

        Args:
            source: a folder that :meth:`save_adapter` wrote, or the bytes of its ``adapter_model.safetensors``.
            version: the version it serves as.

        Raises:
            ValueError: it is missing, not a safetensors file, not finite, or does not fit.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        if isinstance(source, bytes):
            place, data = "the adapter", source
        else:
            place, file = f"adapter {source}", Path(source) / "adapter_model.safetensors"
            if not file.is_file():
                raise ValueError(f"no adapter at {source}; give a folder that holds adapter_model.safetensors")
            data = file.read_bytes()
        try:
            state = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ValueError(f"{place} is damaged ({error}); use the one before it") from error
        known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        if others := {str(value.dtype) for value in state.values() if value.dtype not in known}:
            raise ValueError(f"{place} holds numbers of type {', '.join(sorted(others))}; save it in float32")
        state = {key: value.float() for key, value in state.items()}
        if not all(torch.isfinite(value).all() for value in state.values()):
            raise ValueError(f"{place} holds values that are not finite; use the one before it")
        names = {file: name for name, file in self.file_names().items()}
        self.set_adapter_state({names.get(key, key): value for key, value in state.items()}, version)


def load_encoders(
    name: str,
    *,
    family: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    lora_rank: int = 16,
    compute_dtype: str = "float32",
    seed: int = 0,
    **base: Any,
) -> tuple[QueryEncoder, DocumentEncoder]:
    """A query and a document encoder over one base model in memory; ``base`` goes to :class:`BaseEncoder`.

    What is left at None comes from the family, and without a family from the model; prefixes are then empty. From then
    on transformers shows no progress bars in this process: an error has to be the first thing to be seen.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    known = get_family(family)
    if known is not None:
        pooling = known.pooling if pooling is None else pooling
        normalize = known.normalize if normalize is None else normalize
    shared = BaseEncoder(name, pooling=pooling, normalize=normalize, **base)
    documents = DocumentEncoder(shared, family=family, passage_prefix=passage_prefix, compute_dtype=compute_dtype)
    return QueryEncoder(shared, family=family, query_prefix=query_prefix, lora_rank=lora_rank, seed=seed), documents
