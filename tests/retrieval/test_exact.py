import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.retrieval import exact
from verl_bridge.retrieval.exact import ExactSearch


def unit(rng, count, dim):
    vectors = rng.normal(size=(count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def brute(vectors, queries, k):
    """Rows by score in float64, equal scores by row."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_equals_faiss_flat(dtype, stored):
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 20_000, 48).astype(stored), unit(rng, 33, 48)
    flat = faiss.IndexFlatIP(48)
    flat.add(vectors.astype(np.float32))
    search = ExactSearch(vectors, compute_dtype=dtype)
    for k in (1, 3, 10, 200):
        scores, rows = search.search(queries, k)
        expected_scores, expected = flat.search(queries, k)
        gaps = np.abs(np.diff(expected_scores, axis=1, prepend=9, append=-9))
        tied = (gaps[:, :-1] < 1e-6) | (gaps[:, 1:] < 1e-6)  # float32 sums in another order swap these
        assert ((rows == expected) | tied).all() and (k > 10 or not tied.any())
        np.testing.assert_allclose(scores, expected_scores, atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.integers(1, 300),
    dim=st.integers(1, 9),
    k=st.integers(1, 320),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    levels=st.sampled_from([1, 3, 1000]),
    block=st.sampled_from([7, 64, 1 << 18]),
)
def test_is_exact_for_any_shape_ties_and_duplicates_included(documents, dim, k, seed, scale, levels, block):
    """Few levels make many equal and nearly equal scores, small blocks many merges."""
    rng = np.random.default_rng(seed)
    vectors = (rng.integers(-levels, levels + 1, size=(documents, dim)) / levels * scale).astype(np.float32)
    queries = rng.normal(size=(3, dim)).astype(np.float32)
    before = exact.BLOCK
    exact.BLOCK = block
    try:
        scores, rows = ExactSearch(vectors, compute_dtype="bfloat16").search(queries, k)
    finally:
        exact.BLOCK = before
    expected, _ = brute(vectors, queries, k)
    assert scores.shape == rows.shape == (3, min(k, documents))
    np.testing.assert_allclose(scores, expected, atol=2e-6 * max(scale, 1) * dim, rtol=1e-5)
    for row, score, query in zip(rows, scores, queries, strict=True):
        assert len(set(row.tolist())) == len(row)
        np.testing.assert_allclose(vectors[row] @ query, score, atol=2e-6 * max(scale, 1) * dim, rtol=1e-5)


def test_what_rounding_confuses_is_searched_again(monkeypatch):
    """A thousand documents that bfloat16 cannot tell apart: 32 candidates do not do, all of them are looked at."""
    rng = np.random.default_rng(1)
    vectors = np.tile(unit(rng, 1, 64), (1000, 1)) + 1e-6 * rng.normal(size=(1000, 64)).astype(np.float32)
    search, asked = ExactSearch(vectors, compute_dtype="bfloat16"), []
    best = search._best
    monkeypatch.setattr(search, "_best", lambda q, k, c: asked.append((len(q), c)) or best(q, k, c))
    queries = np.concatenate([vectors[:1], -vectors[:1], unit(rng, 1, 64)])
    scores, _ = search.search(queries, 3)
    np.testing.assert_allclose(scores, brute(vectors, queries, 3)[0], atol=3e-7)
    assert asked == [(3, 32), (3, 512), (3, 1000)]


def test_clear_winners_are_certain_at_once(monkeypatch):
    rng = np.random.default_rng(2)
    vectors = unit(rng, 5000, 64)
    search, asked = ExactSearch(vectors, compute_dtype="bfloat16"), []
    best = search._best
    monkeypatch.setattr(search, "_best", lambda q, k, c: asked.append((len(q), c)) or best(q, k, c))
    _, rows = search.search(vectors[:40], 1)
    assert rows[:, 0].tolist() == list(range(40)) and asked == [(40, 32)]


def test_equal_scores_come_by_row():
    vectors = np.zeros((200, 4), dtype=np.float32)
    vectors[[150, 20, 90]] = [1, 0, 0, 0]
    for dtype in ("float32", "bfloat16"):
        _, rows = ExactSearch(vectors, compute_dtype=dtype).search(np.eye(4, dtype=np.float32)[:1], 3)
        assert rows.tolist() == [[20, 90, 150]]


def test_the_memory_map_is_kept_and_only_candidates_are_read_from_it(tmp_path):
    np.save(tmp_path / "v.npy", unit(np.random.default_rng(3), 500, 16).astype(np.float16))
    vectors = np.load(tmp_path / "v.npy", mmap_mode="r")
    search = ExactSearch(vectors, compute_dtype="bfloat16")
    assert search.vectors is vectors and search._copy.dtype == torch.bfloat16
    assert (search.ntotal, search.d) == (500, 16)


def test_the_top_of_a_row_by_groups():
    generator = torch.Generator().manual_seed(0)
    for width in (512, 5000, 64 * 8 * 4 + 13):
        scores = torch.randn(5, width, generator=generator)
        best, rows = exact._top(scores, 4)
        assert torch.equal(best, scores.topk(4, dim=1).values)
        assert torch.equal(scores.gather(1, rows), best)


def test_a_vector_that_is_not_finite_is_named():
    vectors = unit(np.random.default_rng(4), 100, 8)
    vectors[[41, 70], [3, 0]] = [np.nan, np.inf]
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match="the vector in row 41 is not finite"):
            ExactSearch(vectors, compute_dtype=dtype)


def test_what_is_read_to_score_again_is_bounded(monkeypatch):
    """Nine equal documents in ten: every query has to look at all of them, a few queries at a time."""
    rng = np.random.default_rng(5)
    vectors = unit(rng, 2000, 16)
    vectors[:1800] = vectors[0]
    search, largest = ExactSearch(vectors, compute_dtype="bfloat16"), []
    read = search._read
    monkeypatch.setattr(search, "_read", lambda rows: largest.append(len(rows)) or read(rows))
    monkeypatch.setattr(exact, "READ", 4000 * 16)
    scores, rows = search.search(np.repeat(vectors[:1], 9, axis=0), 3)
    np.testing.assert_allclose(scores, 1.0, atol=1e-6)
    assert max(largest) == 4000 and (rows < 1800).all()
    with pytest.raises(RuntimeError, match="searchable=True"):
        exact.NoSearch(vectors).search(vectors[:1], 3)
