"""Exact inner-product search: a fast pass in a short number format, then float32 on the few that can matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_bridge.retrieval.precision import resolve_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch

GROUP = 64  # documents whose best score is looked at first
BLOCK = 1 << 18  # documents scored at a time: bounds the score matrix
READ = 1 << 26  # numbers read at a time to score candidates again


class ExactSearch:
    """The ``k`` nearest of all documents, as FAISS's flat index gives them, several times as fast with bfloat16.

    The vectors are held once in a short format. A rounded score is off by no more than a bound known from the rounding
    itself; the best candidates by rounded score are scored again in float32 from the vectors as given, and a query
    whose k-th best does not clear everything left out by that bound is searched again with more candidates. So the
    answer is exact, in float32. Same call as a FAISS index. [ours]

    Args:
        vectors: float16 or float32, shape (documents, dim), usually a memory map, which is kept.
        compute_dtype: of the copy in memory: ``float32`` (scores are exact at once), ``bfloat16``, ``float16`` (GPU),
            or ``auto``.
        device: torch device that holds the copy.

    Raises:
        ValueError: an unknown compute_dtype, or a vector that is not finite.
    """

    def __init__(self, vectors: np.ndarray, *, compute_dtype: str = "auto", device: str = "cpu") -> None:
        import torch

        self.vectors, self.device = vectors, torch.device(device)
        self.ntotal, self.d = vectors.shape
        if self.device.type == "cuda":  # the bound below counts on sums in float32
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.compute_dtype = resolve_dtype(compute_dtype, device)
        dtype = getattr(torch, self.compute_dtype)
        self._copy = torch.empty(self.ntotal, self.d, dtype=dtype, device=self.device)  # (documents, dim)
        self._longest = self._rounding = 0.0  # largest length of a vector, and of what rounding took from one
        for start in range(0, self.ntotal, BLOCK):
            block = self._read(slice(start, start + BLOCK))
            if not (finite := torch.isfinite(block).all(dim=1)).all():
                row = start + int((~finite).nonzero()[0])
                raise ValueError(f"the vector in row {row} is not finite; build the index again")
            copy = self._copy[start : start + BLOCK].copy_(block)
            self._longest = max(self._longest, block.norm(dim=1).max().item())
            self._rounding = max(self._rounding, (copy.float() - block).norm(dim=1).max().item())

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows of the nearest documents, best first; equal scores by row.

        Args:
            queries: finite float32, shape (queries, dim).
            k: documents per query; a smaller corpus gives fewer columns.

        Returns:
            float32 scores and int64 rows, both of shape (queries, min(k, documents)).
        """
        import torch

        k = min(k, self.ntotal)
        given = torch.from_numpy(queries).to(self.device)
        scores = torch.empty(len(queries), k, device=self.device)
        rows = torch.empty(len(queries), k, dtype=torch.int64, device=self.device)
        todo = torch.arange(len(queries), device=self.device)
        candidates = k if self.compute_dtype == "float32" else max(32, 2 * k)
        while len(todo):
            candidates, unsure = min(candidates, self.ntotal), []
            for part in todo.split(max(1, READ // (candidates * self.d))):
                certain, scores[part], rows[part] = self._best(given[part], k, candidates)
                unsure.append(part[~certain])
            todo = torch.cat(unsure)
            candidates *= 16
        return scores.cpu().numpy(), rows.cpu().numpy()

    def _best(self, queries: torch.Tensor, k: int, candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which queries are surely right (queries,), and scores and rows of their best, (queries, k)."""
        import torch

        short = queries.to(self._copy.dtype)
        rounded, rows = self._nearest(short, candidates)  # (queries, candidates)
        if self.compute_dtype == "float32":
            exact, certain = rounded, torch.ones(len(queries), dtype=torch.bool, device=self.device)
        else:
            exact = torch.einsum("qd,qcd->qc", queries, self._read(rows.flatten()).view(*rows.shape, self.d))
        rows, order = rows.sort(dim=1)
        exact, best = exact.gather(1, order).sort(dim=1, descending=True, stable=True)
        exact, rows = exact[:, :k], rows.gather(1, best[:, :k])
        if self.compute_dtype != "float32":
            # |q·d − q̃·d̃| ≤ |q − q̃||d| + |q̃||d − d̃|, and the product itself is rounded to the short format
            unit = 0.51 * torch.finfo(self._copy.dtype).eps  # half a step, and a little for the float32 sum
            error = (queries - short.float()).norm(dim=1) * self._longest + short.float().norm(dim=1) * self._rounding
            left_out = rounded[:, -1] + error + unit * rounded[:, -1].abs()
            certain = (exact[:, -1] >= left_out) | (candidates == self.ntotal)
        return certain, exact, rows

    def _nearest(self, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and rows of the ``k`` best by the scores of the copy, best first, (queries, k)."""
        import torch

        parts = []
        for start in range(0, self.ntotal, BLOCK):
            scores = queries @ self._copy[start : start + BLOCK].T  # (queries, documents of the block)
            best, rows = _top(scores, min(k, scores.shape[1]))
            parts.append((best.float(), rows + start))
        if len(parts) == 1:
            return parts[0]
        scores, rows = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        best, order = scores.topk(k, dim=1)
        return best, rows.gather(1, order)

    def _read(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Vectors as given, in float32."""
        import torch

        rows = rows if isinstance(rows, slice) else rows.cpu().numpy()
        return torch.from_numpy(self.vectors[rows].astype("float32")).to(self.device)


class NoSearch:
    """Stands where a search would be for whoever only looks vectors up: a search may be gigabytes of memory.

    Args:
        vectors: shape (documents, dim).
    """

    def __init__(self, vectors: np.ndarray) -> None:
        self.ntotal, self.d = vectors.shape

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Raises RuntimeError."""
        raise RuntimeError("this index was opened only for its vectors; open it with searchable=True")


def _top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``scores.topk(k)``, several times as fast when k is far below the width: the k groups with the largest maxima
    hold the k largest scores."""
    width = scores.shape[1]
    whole = width - width % GROUP
    if whole < 8 * k * GROUP:
        return scores.topk(k, dim=1)
    import torch

    groups = scores[:, :whole].unflatten(1, (-1, GROUP))  # (queries, groups, GROUP)
    chosen = groups.amax(dim=2).topk(k, dim=1).indices  # (queries, k)
    inside = groups.gather(1, chosen[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    rows = (chosen[:, :, None] * GROUP + torch.arange(GROUP, device=scores.device)).flatten(1)
    if whole < width:
        inside = torch.cat([inside, scores[:, whole:]], dim=1)
        rows = torch.cat([rows, torch.arange(whole, width, device=scores.device).expand(len(rows), -1)], dim=1)
    best, order = inside.topk(k, dim=1)
    return best, rows.gather(1, order)
