import asyncio
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, RayTaskError

from verl_bridge.retrieval import sharding
from verl_bridge.retrieval.exact import ExactSearch
from verl_bridge.retrieval.sharding import IndexShard, ShardedSearch, merge_top, shard_bounds


class Handle:
    """A Serve handle to an object in this process; the first ``deaths`` calls of ``search`` find it dead."""

    def __init__(self, shard, deaths=0):
        self._shard, self.deaths, self.asked = shard, deaths, 0
        self.describe, self.search = _Method(self, "describe"), _Method(self, "search")


class _Method:
    def __init__(self, handle, name):
        self._handle, self._name = handle, name

    def remote(self, *arguments):
        return _Response(self._handle, self._name, arguments)


class _Response:
    def __init__(self, *call):
        self._call = call

    def result(self, timeout_s):
        handle, name, arguments = self._call
        if name == "search":
            handle.asked += 1
            if handle.asked <= handle.deaths:
                raise ActorDiedError()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, getattr(handle._shard, name)(*arguments)).result(timeout_s)


def shards_of(vectors, count):
    with patch.object(sharding, "exact_vectors", lambda index: vectors):
        return [IndexShard("index", i, count, "float32", "cpu", 1) for i in range(count)]


def best(vectors, queries, k):
    """Scores and rows by a plain sort: by score, then by row."""
    scores = queries @ vectors.T
    rows = np.broadcast_to(np.arange(len(vectors)), scores.shape)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), order


def test_bounds_cover_every_row_once_and_evenly():
    assert shard_bounds(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert shard_bounds(2, 4) == [(0, 0), (0, 1), (1, 1), (1, 2)]
    for documents in range(20):
        for shards in range(1, 9):
            bounds = shard_bounds(documents, shards)
            assert [row for start, end in bounds for row in range(start, end)] == list(range(documents))
            assert {end - start for start, end in bounds} <= {documents // shards, documents // shards + 1}


def test_merged_by_score_and_equal_scores_by_row():
    first = np.array([[0.9, 0.5], [0.1, 0.0]]), np.array([[4, 1], [0, 2]])
    second = np.array([[0.9, 0.7, 0.5], [0.3, 0.2, 0.1]]), np.array([[9, 7, 8], [6, 5, 7]])
    scores, rows = merge_top([second, first], 4)
    assert rows.tolist() == [[4, 9, 7, 1], [6, 5, 0, 7]]
    assert scores.tolist() == [[0.9, 0.9, 0.7, 0.5], [0.3, 0.2, 0.1, 0.1]]
    empty = np.empty((2, 0)), np.empty((2, 0), np.int64)
    assert merge_top([empty, first], 9)[1].tolist() == [[4, 1], [0, 2]]
    assert merge_top([empty, empty], 3)[0].shape == (2, 0)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.integers(1, 40),
    count=st.integers(1, 8),
    queries=st.integers(1, 4),
    k=st.integers(1, 50),
    levels=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 2**16),
)
def test_shards_together_equal_one_exact_search(documents, count, queries, k, levels, seed):
    random = np.random.default_rng(seed)
    # whole numbers give exact sums, and few levels give equal scores
    vectors = random.integers(-levels, levels + 1, (documents, 3)).astype(np.float32)
    asked = random.integers(-levels, levels + 1, (queries, 3)).astype(np.float32)
    merged = ShardedSearch([Handle(shard) for shard in shards_of(vectors, count)])
    assert (merged.ntotal, merged.d) == (documents, 3)
    scores, rows = merged.search(asked, k)
    right_scores, right_rows = best(vectors, asked, k)
    assert scores.tolist() == right_scores.tolist() and scores.dtype == np.float32 and rows.dtype == np.int64
    assert all(len(set(row)) == len(row) for row in rows.tolist())
    assert np.array_equal(np.take_along_axis(asked @ vectors.T, rows, axis=1), scores)
    # of documents that tie for the last places an exact search may give any; above them the rows are settled
    settled = right_scores > right_scores[:, -1:]
    assert rows[settled].tolist() == right_rows[settled].tolist()
    whole = ExactSearch(vectors, compute_dtype="float32").search(asked, k)
    assert whole[0].tolist() == scores.tolist() and whole[1][settled].tolist() == rows[settled].tolist()


def test_without_ties_rows_equal_the_unsharded_search_in_every_format():
    random = np.random.default_rng(0)
    vectors = random.standard_normal((500, 16)).astype(np.float16)
    asked = random.standard_normal((20, 16)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        with patch.object(sharding, "exact_vectors", lambda index: vectors):
            parts = [Handle(IndexShard("index", i, 3, dtype, "cpu", 1)) for i in range(3)]
        scores, rows = ShardedSearch(parts).search(asked, 10)
        right_scores, right_rows = ExactSearch(vectors, compute_dtype="float32").search(asked, 10)
        assert rows.tolist() == right_rows.tolist()
        assert scores == pytest.approx(right_scores, abs=1e-5)


def test_a_shard_that_dies_is_asked_again_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(sharding, "PAUSE", 0.0)
    vectors = np.eye(6, dtype=np.float32)
    alive, dying = (Handle(shard, deaths) for shard, deaths in zip(shards_of(vectors, 2), (0, 2), strict=True))
    rows = ShardedSearch([alive, dying]).search(vectors, 1)[1]
    assert rows[:, 0].tolist() == list(range(6)) and (alive.asked, dying.asked) == (1, 3)
    lost = Handle(shards_of(vectors, 2)[1], deaths=99)
    with pytest.raises(ActorDiedError):
        ShardedSearch([alive, lost]).search(vectors, 1)
    assert lost.asked == sharding.ATTEMPTS


def test_a_shard_that_refuses_is_not_asked_again():
    class Broken(Handle):
        def __init__(self, shard):
            super().__init__(shard)

            async def fail(queries, k):
                raise RayTaskError("search", "ValueError: no", ValueError("no"))

            self._shard.search = fail

    (shard,) = shards_of(np.eye(3, dtype=np.float32), 1)
    broken = Broken(shard)
    with pytest.raises(RayTaskError):
        ShardedSearch([broken]).search(np.eye(3, dtype=np.float32), 1)
    assert broken.asked == 1


def test_shards_of_different_indexes_are_refused():
    small, large = (shards_of(np.zeros((n, 2), np.float32), 2) for n in (4, 6))
    with pytest.raises(ValueError, match=r"rows \[\(0, 2\), \(3, 6\)\] .*give every node the same index"):
        ShardedSearch([Handle(small[0]), Handle(large[1])])
    with pytest.raises(ValueError, match="give every node the same index"):
        ShardedSearch([Handle(small[1]), Handle(small[0])])


def test_an_approximate_index_is_refused_with_the_fix(places, loaded, tmp_path):
    from verl_bridge.retrieval.index import DocumentIndex

    DocumentIndex.build(places, loaded[1], tmp_path / "hnsw", factory="HNSW4")
    with pytest.raises(ValueError, match=r"of kind HNSW4.*rebuild it with factory Flat or set shards=1"):
        IndexShard(str(tmp_path / "hnsw"), 0, 2, "auto", "cpu", 1)


def test_a_shard_reads_its_slice_of_an_index_on_disk(places, places_index_folder):
    shard = IndexShard(str(places_index_folder), 1, 3, "auto", "cpu", 1)
    assert asyncio.run(shard.describe()) == (5, 10, len(places), 384)
    vectors = np.load(places_index_folder / "embeddings.npy")
    scores, rows = asyncio.run(shard.search(vectors[6:8].astype(np.float32), 1))
    assert rows.tolist() == [[6], [7]] and scores == pytest.approx(1.0, abs=1e-3)
