"""BRIDGE's retriever optimiser: one step of the lower level on a batch of retrieval turns. Knows no host.

The loss is (L_RL + γ·L_RAG)/(1+γ) over the candidates of each turn (METHODS §2.2–2.7); only the LoRA adapter of the
query encoder moves, document vectors and index stay as they are.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_bridge.algorithms.bridge import BridgeLoss, bridge_loss, retrieval_log_probs
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.files import new_folder
from verl_bridge.retrieval.encoder import QueryEncoder, length_groups
from verl_bridge.retrieval.index import DocumentIndex

logger = logging.getLogger(__name__)

CHARACTERS_AT_ONCE = 4096  # of one group of queries, padding included: some 1,000 tokens


@dataclass(frozen=True)
class UpdateResult:
    """The adapter version after an update, and ``bridge/*`` metrics."""

    version: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Batch:
    """A batch as tensors, padded to the widest turn."""

    query_index: torch.Tensor  # (turns,) into the unique queries
    document_index: torch.Tensor  # (turns, candidates) into the unique documents
    mask: torch.Tensor  # (turns, candidates) bool
    log_likelihood: torch.Tensor  # (turns, candidates)
    advantages: torch.Tensor  # (turns,)
    rl_mask: torch.Tensor  # (turns,) bool
    hits: torch.Tensor | None  # (turns, candidates) bool
    queries: list[str]
    documents: torch.Tensor  # (unique documents, dim)


class RetrieverUpdater:
    """Owns the adapter's optimiser and counters.

    Args:
        encoder: the query encoder that serves; updated in place.
        index: document vectors.
        lr: AdamW learning rate [paper: 1e-5].
        gamma: weight γ of the RAG loss [paper].
        tau_retrieval: temperature of p(d|q) [paper].
        tau_posterior: temperature of the credit weights [paper].
        tau_likelihood: temperature of ℓ_d in the RAG loss [ours].
        clip: PPO clip ε of the document ratio [ours].
        credit_weights: ``likelihood`` or ``posterior``.
        minibatch_size: turns per optimiser step, None for all.
        epochs: passes over a batch.
        queries_at_once: most distinct queries whose activations are held at a time, fewer when they are long; gradients
            add up over the groups, so that it bounds memory and changes nothing else.
        max_grad_norm: gradient norm above which gradients are scaled down.
        weight_decay: AdamW weight decay.
        max_staleness: how many versions back a turn may have been served (0: synchronous training).
        seed: of the minibatch order.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        index: DocumentIndex,
        *,
        lr: float = 1e-5,
        gamma: float = 0.25,
        tau_retrieval: float = 0.4,
        tau_posterior: float = 0.5,
        tau_likelihood: float = 1.0,
        clip: float = 0.2,
        credit_weights: str = "likelihood",
        minibatch_size: int | None = None,
        epochs: int = 1,
        queries_at_once: int = 32,
        max_grad_norm: float = 1.0,
        weight_decay: float = 0.0,
        max_staleness: int = 0,
        seed: int = 0,
    ) -> None:
        if minibatch_size is not None and minibatch_size < 1:
            raise ValueError(f"minibatch_size is {minibatch_size}; use at least 1 or None for the whole batch")
        for key, value, least in (
            ("epochs", epochs, 1),
            ("queries_at_once", queries_at_once, 1),
            ("max_staleness", max_staleness, 0),
        ):
            if value < least:
                raise ValueError(f"{key} is {value}; use at least {least}")
        self.encoder, self.index = encoder, index
        self.loss_settings = {
            "tau_retrieval": tau_retrieval,
            "tau_posterior": tau_posterior,
            "tau_likelihood": tau_likelihood,
            "clip": clip,
            "gamma": gamma,
            "credit_weights": credit_weights,
        }
        self.minibatch_size, self.epochs, self.max_grad_norm = minibatch_size, epochs, max_grad_norm
        self.max_staleness, self.queries_at_once = max_staleness, queries_at_once
        self.parameters = encoder.lora_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr, weight_decay=weight_decay)
        self.generator = torch.Generator().manual_seed(seed)
        self.initial = encoder.adapter_state()  # drift is measured from here
        self.served: dict[int, dict[str, torch.Tensor]] = {}  # earlier versions that a turn may still name
        self.counters = {"updates": 0, "steps": 0, "steps_dropped": 0}

    # ---- one update -------------------------------------------------------------------------------------------

    def update(self, batch: RetrieverBatch) -> UpdateResult:
        """Trains on a batch and raises the adapter's version once when anything changed.

        Raises:
            ValueError: a turn was served by a version that is neither current nor kept, or an answer likelihood or
                advantage is not finite.
        """
        started = time.perf_counter()
        if not batch.queries:
            return UpdateResult(self.encoder.adapter_version, {"bridge/turns": 0.0})
        self._check(batch)
        data = self._tensors(batch)
        old_log_probs = self._served_log_probs(data, batch.adapter_version)
        before, version = self.encoder.adapter_state(), self.encoder.adapter_version

        collected: list[tuple[int, dict[str, float]]] = []  # (turns, metrics) of each step taken
        dropped = 0
        size = self.minibatch_size or len(batch.queries)
        for _ in range(self.epochs):
            order = torch.randperm(len(batch.queries), generator=self.generator)
            for rows in order.split(size):
                metrics = self._step(data, old_log_probs, rows.sort().values)
                if metrics is None:
                    dropped += 1
                else:
                    collected.append((len(rows), metrics))
        self.counters["updates"] += 1
        self.counters["steps"] += len(collected)
        self.counters["steps_dropped"] += dropped
        if collected:
            if self.max_staleness:
                self.served[version] = before
                self.served = {v: s for v, s in self.served.items() if v > version - self.max_staleness}
            self.encoder.adapter_version = version + 1

        turns = sum(count for count, _ in collected)
        metrics = {
            key: sum(count * values[key] for count, values in collected) / turns
            for key in (collected[0][1] if collected else ())
        }
        if collected:
            metrics["bridge/ratio_deviation_max"] = max(values["bridge/ratio_deviation_max"] for _, values in collected)
        top_documents = data.document_index.gather(1, old_log_probs.argmax(-1, keepdim=True))
        metrics |= {
            "bridge/turns": float(len(batch.queries)),
            "bridge/rl_turns": float(sum(batch.rl_mask)),
            "bridge/unique_queries": float(len(data.queries)),
            "bridge/distinct_top1_share": top_documents.unique().numel() / len(data.queries),
            "bridge/steps_dropped": float(dropped),
            "bridge/adapter_drift": self._drift(),
            "bridge/adapter_version": float(self.encoder.adapter_version),
            "bridge/update_seconds": time.perf_counter() - started,
        }
        return UpdateResult(self.encoder.adapter_version, metrics)

    def _check(self, batch: RetrieverBatch) -> None:
        current = self.encoder.adapter_version
        known = {current, *(v for v in self.served if v >= current - self.max_staleness)}
        for turn, served in enumerate(batch.adapter_version):
            if served not in known:
                raise ValueError(
                    f"turn {turn} was served by adapter version {served} but the updater has {sorted(known)}; train on "
                    "rollouts of the current adapter, or raise max_staleness for asynchronous training"
                )
        for turn, values in enumerate(batch.answer_log_likelihood):
            if not all(map(math.isfinite, values)) or not math.isfinite(batch.advantages[turn]):
                raise ValueError(
                    f"turn {turn} has a log-likelihood or advantage that is not finite: {list(values)}, "
                    f"{batch.advantages[turn]}; leave the turn out"
                )

    def _tensors(self, batch: RetrieverBatch) -> _Batch:
        device = self.encoder.base.model.device
        queries = {query: i for i, query in enumerate(dict.fromkeys(batch.queries))}
        ids = {d: i for i, d in enumerate(dict.fromkeys(d for row in batch.candidate_ids for d in row))}
        width = max(map(len, batch.candidate_ids))
        document_index = torch.zeros(len(batch.queries), width, dtype=torch.long)
        log_likelihood = torch.zeros(len(batch.queries), width)
        mask = torch.zeros(len(batch.queries), width, dtype=torch.bool)
        for turn, (row, values) in enumerate(zip(batch.candidate_ids, batch.answer_log_likelihood, strict=True)):
            document_index[turn, : len(row)] = torch.tensor([ids[d] for d in row])
            log_likelihood[turn, : len(row)] = torch.tensor(list(values), dtype=torch.float32)
            mask[turn, : len(row)] = True
        hits = None
        if batch.hits is not None:
            hits = torch.zeros_like(mask)
            for turn, row in enumerate(batch.hits):
                hits[turn, : len(row)] = torch.tensor(list(row), dtype=torch.bool)
        return _Batch(
            query_index=torch.tensor([queries[q] for q in batch.queries], device=device),
            document_index=document_index.to(device),
            mask=mask.to(device),
            log_likelihood=log_likelihood.to(device),
            advantages=torch.tensor(list(batch.advantages), dtype=torch.float32, device=device),
            rl_mask=torch.tensor(list(batch.rl_mask), dtype=torch.bool, device=device),
            hits=None if hits is None else hits.to(device),
            queries=list(queries),
            documents=self.index.vectors(list(ids)).to(device),
        )

    def _scores(self, embeddings: torch.Tensor, data: _Batch, rows: torch.Tensor) -> torch.Tensor:
        """Inner products of per-turn query embeddings (turns, dim) with their candidates: (turns, candidates)."""
        return torch.einsum("td,tcd->tc", embeddings, data.documents[data.document_index[rows]])

    def _served_log_probs(self, data: _Batch, versions: Sequence[int]) -> torch.Tensor:
        """log p_old(d|q) (turns, candidates) under the adapter that served each turn; padding holds −inf."""
        current, current_version = self.encoder.adapter_state(), self.encoder.adapter_version
        out = torch.full(data.mask.shape, -torch.inf, device=data.mask.device)
        wanted = torch.tensor(list(versions), device=data.mask.device)
        try:
            for version in sorted(set(versions)):
                if version != current_version:
                    self.encoder.set_adapter_state(self.served[version], version)
                rows = (wanted == version).nonzero().squeeze(1)
                used, inverse = data.query_index[rows].unique(return_inverse=True)
                embeddings = self.encoder.encode_queries([data.queries[i] for i in used.tolist()])[inverse]
                if not embeddings.isfinite().all():
                    raise ValueError(f"adapter version {version} gives vectors that are not finite; load a saved one")
                scores = self._scores(embeddings, data, rows)
                out[rows] = retrieval_log_probs(scores, data.mask[rows], self.loss_settings["tau_retrieval"])
                if version != current_version:
                    self.encoder.set_adapter_state(current, current_version)
        finally:
            self.encoder.adapter_version = current_version
        return out

    def _loss(
        self, scores: torch.Tensor, data: _Batch, old_log_probs: torch.Tensor, rows: torch.Tensor, **changes: Any
    ) -> BridgeLoss:
        return bridge_loss(
            scores,
            old_log_probs[rows],
            data.log_likelihood[rows],
            data.advantages[rows],
            data.mask[rows],
            rl_mask=data.rl_mask[rows],
            **{**self.loss_settings, **changes},
        )

    def _step(self, data: _Batch, old_log_probs: torch.Tensor, rows: torch.Tensor) -> dict[str, float] | None:
        """One optimiser step on the turns ``rows``; None when it was dropped for a value that is not finite."""
        rows = rows.to(data.mask.device)
        counts = {"turn_count": len(rows), "rl_turn_count": int(data.rl_mask[rows].sum())}
        gamma = self.loss_settings["gamma"]
        all_scores = torch.zeros(data.mask.shape, device=rows.device)
        squares = {"rl": 0.0, "rag": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        used = data.query_index[rows].unique()
        texts = [data.queries[i] for i in used.tolist()]
        for positions in length_groups(texts, self.queries_at_once, CHARACTERS_AT_ONCE):
            group = used[sorted(positions)]
            part = rows[torch.isin(data.query_index[rows], group)]
            embeddings = self.encoder.encode_queries([data.queries[i] for i in group.tolist()], training=True)
            scores = self._scores(embeddings[torch.searchsorted(group, data.query_index[part])], data, part)
            if not scores.isfinite().all():
                return self._drop()
            all_scores[part] = scores.detach()
            total = self._loss(scores, data, old_log_probs, part, **counts).loss
            credit = self._loss(scores, data, old_log_probs, part, **counts, gamma=0.0).loss
            # both gradients stop at the query vectors, the encoder is walked once
            (slope,) = torch.autograd.grad(total, embeddings, retain_graph=True)
            (credit_slope,) = torch.autograd.grad(credit, embeddings, retain_graph=True)
            squares["rl"] += credit_slope.square().sum().item()
            if gamma > 0:
                squares["rag"] += (((1 + gamma) * slope - credit_slope) / gamma).square().sum().item()
            embeddings.backward(slope)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)
        hits = None if data.hits is None else data.hits[rows]
        result = self._loss(all_scores[rows], data, old_log_probs, rows, hit_mask=hits)
        if not torch.isfinite(result.loss) or not torch.isfinite(norm):
            return self._drop()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            **result.metrics,
            "bridge/loss": result.loss.item(),
            "bridge/grad_norm": norm.item(),
            "bridge/grad_norm_rl": math.sqrt(squares["rl"]),
            "bridge/grad_norm_rag": math.sqrt(squares["rag"]),
        }

    def _drop(self) -> None:
        logger.warning("a retriever step was dropped: its scores, loss or gradient are not finite")
        self.optimizer.zero_grad(set_to_none=True)

    def _drift(self) -> float:
        """Norm of the adapter's change from its start, relative to the start's norm."""
        change = sum((p.detach() - self.initial[n]).square().sum() for n, p in self.parameters.items())
        start = sum(value.square().sum() for value in self.initial.values())
        return float((change / start).sqrt())

    # ---- saving and resuming ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``tensors`` (adapter, its start, kept versions, AdamW moments, RNG) by flat name; ``counters`` for JSON."""
        tensors = {f"adapter/{name}": value for name, value in self.encoder.adapter_state().items()}
        tensors |= {f"initial/{name}": value for name, value in self.initial.items()}
        for version, state in self.served.items():
            tensors |= {f"served/{version}/{name}": value for name, value in state.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value.detach().clone()
        tensors["rng"] = self.generator.get_state()
        return {"tensors": tensors, "counters": {**self.counters, "adapter_version": self.encoder.adapter_version}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict` as if never interrupted. Raises ValueError when it does not fit."""
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in state["tensors"].items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = value
        counters = dict(state["counters"])
        self.encoder.set_adapter_state(groups["adapter"], int(counters.pop("adapter_version")))
        self.initial = {name: value.clone() for name, value in groups["initial"].items()}
        self.served = {}
        for key, value in groups.get("served", {}).items():
            version, _, name = key.partition("/")
            self.served.setdefault(int(version), {})[name] = value.clone()
        self.optimizer.state.clear()
        for key, value in groups.get("optimizer", {}).items():
            field, _, name = key.partition("/")
            self.optimizer.state[self.parameters[name]][field] = value.clone()
        self.generator.set_state(groups["rng"][""])
        self.counters = {key: int(value) for key, value in counters.items()}

    def save(self, directory: str | os.PathLike) -> None:
        """Writes ``adapter/`` (PEFT format), ``updater.safetensors`` and ``updater.json``; appears when complete."""
        from safetensors.torch import save_file

        state = self.state_dict()
        tensors = {name: v.contiguous() for name, v in state["tensors"].items() if not name.startswith("adapter/")}
        with new_folder(directory) as folder:
            self.encoder.save_adapter(folder / "adapter")
            save_file(tensors, folder / "updater.safetensors")
            (folder / "updater.json").write_text(json.dumps(state["counters"], indent=2) + "\n")

    def load(self, directory: str | os.PathLike) -> None:
        """Continues from what :meth:`save` wrote. Raises ValueError when a file is missing or does not fit."""
        from safetensors.torch import load_file

        directory = Path(directory)
        for name in ("updater.json", "updater.safetensors"):
            if not (directory / name).is_file():
                raise ValueError(f"no retriever checkpoint at {directory}: {name} is missing; give a saved folder")
        counters = json.loads((directory / "updater.json").read_text())
        self.encoder.load_adapter(directory / "adapter", int(counters["adapter_version"]))
        tensors = load_file(directory / "updater.safetensors")
        tensors |= {f"adapter/{name}": value for name, value in self.encoder.adapter_state().items()}
        self.load_state_dict({"tensors": tensors, "counters": counters})
