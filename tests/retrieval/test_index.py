import json
import tracemalloc

import numpy as np
import pytest
import torch

from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.index import DocumentIndex, check_index


class WordEncoder:
    """Vectors from the bytes of a text: cheap and repeatable. ``base`` and ``describe`` as the real one has."""

    def __init__(self, dim=8, fingerprint="f", fail_at=None):
        self.dim, self.fingerprint, self.fail_at, self.batches = dim, fingerprint, fail_at, []
        self.base = self

    def describe(self):
        return {
            "encoder": "words",
            "revision": None,
            "fingerprint": self.fingerprint,
            "pooling": "mean",
            "normalised": True,
            "dim": self.dim,
            "passage_prefix": "",
            "max_length": 16,
        }

    def encode_documents(self, passages):
        self.batches.append(len(passages))
        if self.fail_at is not None and len(self.batches) == self.fail_at:
            raise RuntimeError("out of memory")
        rows = [np.random.default_rng(list(p.encode())).normal(size=self.dim) for p in passages]
        return torch.nn.functional.normalize(torch.tensor(np.array(rows), dtype=torch.float32), dim=-1)


def make_corpus(folder, count):
    path = folder / f"c{count}.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i}", "contents": f"t{i}\nx"}) + "\n" for i in range(count)))
    return Corpus.open(path)


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path, 50)


def queries(count, dim=8):
    return torch.tensor(np.random.default_rng(0).normal(size=(count, dim)), dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_search_equals_brute_force_over_the_stored_vectors(corpus, tmp_path, dtype):
    encoder, done = WordEncoder(), []
    index = DocumentIndex.build(
        corpus, encoder, tmp_path / "i", dtype=dtype, batch_size=7, progress=lambda *args: done.append(args)
    )
    assert encoder.batches == [7] * 7 + [1] and done[0] == (7, 50) and done[-1] == (50, 50)
    stored = index.vectors([f"d{i}" for i in range(50)])
    exact = encoder.encode_documents([corpus[i].contents for i in range(50)])
    torch.testing.assert_close(stored, exact, atol=0 if dtype == "float32" else 5e-4, rtol=0)
    assert stored.dtype == torch.float32
    scores = queries(5) @ stored.T
    for hits, row in zip(index.search(queries(5), 6), scores, strict=True):
        best = row.topk(6)
        assert hits.rows == tuple(best.indices.tolist())
        assert hits.scores == pytest.approx(best.values.tolist(), abs=1e-5)
    # rows of any order and repeated ids
    assert torch.equal(index.vectors(["d9", "d3", "d9"]), stored[[9, 3, 9]])
    with pytest.raises(KeyError, match="d99"):
        index.vectors(["d99"])


def test_fewer_documents_than_top_k(tmp_path):
    index = DocumentIndex.build(make_corpus(tmp_path, 3), WordEncoder(), tmp_path / "i")
    (hits,) = index.search(queries(1), 5)
    assert sorted(hits.rows) == [0, 1, 2] and len(hits.scores) == 3
    assert list(hits.scores) == sorted(hits.scores, reverse=True)


def test_an_approximate_index_never_gives_row_minus_one(tmp_path):
    corpus = make_corpus(tmp_path, 200)
    index = DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i", factory="IVF40,Flat")  # probes one of 40 lists
    found = index.search(queries(30), 50)
    assert min(len(hits.rows) for hits in found) < 50
    assert all(0 <= row < 200 for hits in found for row in hits.rows)
    assert all(len(hits.rows) == len(hits.scores) for hits in found)


def test_bad_queries_are_refused(corpus, tmp_path):
    index = DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    for bad in (float("nan"), float("inf")):
        vectors = queries(3)
        vectors[1, 2] = bad
        with pytest.raises(ValueError, match=r"query vectors \[1\] are not finite"):
            index.search(vectors, 2)
    with pytest.raises(ValueError, match=r"\(1, 9\) do not fit an index of dimension 8"):
        index.search(queries(1, 9), 2)
    with pytest.raises(ValueError, match="top_k is 0"):
        index.search(queries(1), 0)
    assert index.search(queries(0), 2) == []


def test_index_and_corpus_out_of_step_name_both_numbers(corpus, tmp_path):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    for other in (49, 51):
        with pytest.raises(ValueError, match=rf"holds 50 documents but the corpus {other}; rebuild"):
            DocumentIndex.load(tmp_path / "i", make_corpus(tmp_path, other))
    # as many documents, but not the same ones
    changed = tmp_path / "changed.jsonl"
    changed.write_text(corpus.path.read_text().replace("t7", "T7"))
    with pytest.raises(ValueError, match="built from corpus"):
        DocumentIndex.load(tmp_path / "i", Corpus.open(changed))
    np.save(tmp_path / "i" / "embeddings.npy", np.zeros((48, 8), dtype=np.float32))
    with pytest.raises(ValueError, match=r"embeddings\.npy holds 48 documents but the corpus 50"):
        DocumentIndex.load(tmp_path / "i", corpus)


def test_another_encoder_or_dimension_is_refused(corpus, tmp_path):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    with pytest.raises(ValueError, match=r"built with dim 8 .* has 16; rebuild"):
        DocumentIndex.load(tmp_path / "i", corpus, WordEncoder(dim=16))
    with pytest.raises(ValueError, match=r"built with fingerprint 'f' .* has 'g'"):
        DocumentIndex.load(tmp_path / "i", corpus, WordEncoder(fingerprint="g"))
    prefixed = WordEncoder()
    prefixed.describe = lambda: {**WordEncoder().describe(), "passage_prefix": "passage: "}
    with pytest.raises(ValueError, match=r"passage_prefix '' .* has 'passage: '"):
        DocumentIndex.load(tmp_path / "i", corpus, prefixed)
    np.save(tmp_path / "i" / "embeddings.npy", np.zeros((50, 9), dtype=np.float32))
    with pytest.raises(ValueError, match=r"embeddings\.npy has dimension 9 but manifest\.json says 8"):
        DocumentIndex.load(tmp_path / "i", corpus)
    with pytest.raises(ValueError, match=r"lacks manifest\.json, embeddings\.npy, index\.faiss"):
        DocumentIndex.load(tmp_path / "none", corpus)


def test_a_failed_build_leaves_nothing_and_an_existing_folder_stays(corpus, tmp_path):
    for final in ("new", "old"):
        if final == "old":
            DocumentIndex.build(corpus, WordEncoder(), tmp_path / final)
        with pytest.raises(RuntimeError, match="out of memory"):
            DocumentIndex.build(corpus, WordEncoder(fail_at=3), tmp_path / final, batch_size=10, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["old"]
    assert len(DocumentIndex.load(tmp_path / "old", corpus, WordEncoder())) == 50
    with pytest.raises(ValueError, match="exists"):
        DocumentIndex.build(corpus, WordEncoder(), tmp_path / "old")
    with pytest.raises(ValueError, match="'Flatt' is unknown to FAISS"):
        DocumentIndex.build(corpus, WordEncoder(), tmp_path / "odd", factory="Flatt")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        DocumentIndex.build(corpus, WordEncoder(), tmp_path / "odd", dtype="int8")
    rebuilt = DocumentIndex.build(corpus, WordEncoder(fingerprint="g"), tmp_path / "old", overwrite=True)
    assert rebuilt.manifest["fingerprint"] == "g" and rebuilt.manifest["corpus"]["sha256"] == corpus.sha256
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["old"]


def test_building_streams(tmp_path):
    """Peak Python and NumPy memory follows the batch, not the corpus: the vectors lie in a memory map."""

    class Zeros(WordEncoder):
        def encode_documents(self, passages):
            return torch.zeros(len(passages), self.dim)

    peaks = {}
    for count in (2_000, 20_000):
        corpus = make_corpus(tmp_path, count)
        tracemalloc.start()
        DocumentIndex.build(corpus, Zeros(dim=64), tmp_path / f"i{count}", batch_size=100, factory="Flat")
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    whole = 20_000 * 64 * 4  # bytes of all vectors
    assert peaks[20_000] - peaks[2_000] < 0.05 * whole, (peaks, whole)


def test_only_an_index_or_an_empty_folder_is_overwritten(corpus, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    encoder = WordEncoder()
    for name in ("notes", "file"):
        with pytest.raises(ValueError, match=rf"{name} is no index .* not replaced"):
            DocumentIndex.build(corpus, encoder, tmp_path / name, overwrite=True)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"
    assert encoder.batches == []
    (tmp_path / "empty").mkdir()
    assert len(DocumentIndex.build(corpus, encoder, tmp_path / "empty", overwrite=True)) == 50


def test_a_bad_factory_is_refused_before_encoding_and_a_failed_training_names_it(corpus, tmp_path):
    encoder = WordEncoder()
    with pytest.raises(ValueError, match="'Flatt' is unknown to FAISS"):
        DocumentIndex.build(corpus, encoder, tmp_path / "i", factory="Flatt")
    assert encoder.batches == []
    with pytest.raises(ValueError, match="factory 'IVF100,Flat' cannot be made from 50 documents"):
        DocumentIndex.build(corpus, encoder, tmp_path / "i", factory="IVF100,Flat")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("manifest.json", lambda data: data[:40], r"manifest\.json of index .* is damaged: .*; rebuild it with"),
        ("manifest.json", lambda data: b"[1]", "not a JSON object"),
        ("manifest.json", lambda data: b"\xff", "is damaged"),
        ("manifest.json", lambda data: b"[" * 200_000, "is damaged"),
        ("manifest.json", lambda data: data.replace(b'"pooling"', b'"poling"'), "damaged: pooling is None"),
        ("manifest.json", lambda data: data.replace(b'"size"', b'"sise"'), "damaged: corpus is"),
        ("embeddings.npy", lambda data: data[:-100], r"embeddings\.npy of index .* is damaged"),
        ("embeddings.npy", lambda data: b"", r"embeddings\.npy of index .* is damaged"),
        ("index.faiss", lambda data: data[:50], r"index\.faiss of index .* is damaged"),
        ("index.faiss", lambda data: None, r"lacks index\.faiss; build it with"),
    ],
)
def test_a_damaged_index_names_the_file_and_the_fix(corpus, tmp_path, file, damage, message):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    path = tmp_path / "i" / file
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        DocumentIndex.load(tmp_path / "i", corpus)


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW8", "IVF2,Flat", "IVF2,PQ4x2", "PCA4,Flat", "SQ8,RFlat"])
def test_the_cheap_check_reads_the_header_of_every_kind(corpus, tmp_path, factory):
    built = DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i", factory=factory)
    assert check_index(tmp_path / "i") == built.manifest


def test_a_place_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"file/deep/i cannot be written \(Not a directory\); choose another place"):
        DocumentIndex.build(corpus, WordEncoder(), tmp_path / "file" / "deep" / "i")
