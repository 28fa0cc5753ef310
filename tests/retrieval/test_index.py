"""Search equals brute force over what is stored; an index that does not belong here is refused with both values."""

import json

import numpy as np
import pytest
import torch

from tests.retrieval.words import WordEncoder, encoded, make_corpus, queries
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.index import DocumentIndex, compare_vectors, open_index
from verl_bridge.retrieval.manifest import check_index, manifest_settings


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path, 50)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_exact_search_equals_brute_force_over_the_stored_vectors(corpus, tmp_path, dtype):
    encoder = WordEncoder()
    index = DocumentIndex.build(corpus, encoder, tmp_path / "i", dtype=dtype)
    assert sorted(file.name for file in (tmp_path / "i").iterdir()) == ["embeddings.npy", "manifest.json"]
    stored = index.vectors([f"d{i}" for i in range(50)])
    exact = encoded(encoder, corpus)
    torch.testing.assert_close(stored, exact, atol=0 if dtype == "float32" else 5e-4, rtol=0)
    assert stored.dtype == torch.float32 and index.embeddings.dtype == dtype
    scores = queries(5) @ stored.T
    for hits, row in zip(index.search(queries(5), 6), scores, strict=True):
        best = row.topk(6)
        assert hits.rows == tuple(best.indices.tolist())
        assert hits.scores == pytest.approx(best.values.tolist(), abs=1e-5)
    # rows of any order and repeated ids
    assert torch.equal(index.vectors(["d9", "d3", "d9"]), stored[[9, 3, 9]])
    with pytest.raises(KeyError, match="d99"):
        index.vectors(["d99"])


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF1,Flat"])
def test_fewer_documents_than_top_k(tmp_path, factory):
    """RUC-NLPIR/FlashRAG#247: three documents and k=5 give three results, never the last document by row −1."""
    index = DocumentIndex.build(make_corpus(tmp_path, 3), WordEncoder(), tmp_path / "i", factory=factory)
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
    """castorini/pyserini#1557 and RUC-NLPIR/FlashRAG#12: one searches, and gives wrong documents."""
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    for other in (49, 51):
        with pytest.raises(ValueError, match=rf"holds 50 documents but the corpus {other}; rebuild"):
            DocumentIndex.load(tmp_path / "i", make_corpus(tmp_path, other))
    # as many documents, but not the same ones
    changed = tmp_path / "changed.jsonl"
    changed.write_text(corpus.path.read_text().replace("t7", "T7"))
    with pytest.raises(ValueError, match="built from corpus"):
        DocumentIndex.load(tmp_path / "i", Corpus.open(changed))


def test_another_encoder_or_dimension_is_refused(corpus, tmp_path):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    with pytest.raises(ValueError, match=r"built with dim 8 .* has 16; rebuild"):
        DocumentIndex.load(tmp_path / "i", corpus, WordEncoder(dim=16))
    with pytest.raises(ValueError, match=r"built with fingerprint 'f' .* has 'g'"):
        DocumentIndex.load(tmp_path / "i", corpus, WordEncoder(fingerprint="g"))
    for key, value in (("passage_prefix", "passage: "), ("pooling", "cls"), ("normalised", False), ("max_length", 8)):
        other = WordEncoder()
        other.describe = lambda key=key, value=value: {**WordEncoder().describe(), key: value}
        with pytest.raises(ValueError, match=rf"built with {key} .* has {value!r}; rebuild"):
            DocumentIndex.load(tmp_path / "i", corpus, other)
    with pytest.raises(ValueError, match=r"lacks manifest\.json, embeddings\.npy; build it with"):
        DocumentIndex.load(tmp_path / "none", corpus)


def test_the_manifest_says_what_the_index_was_made_of(corpus, tmp_path):
    encoder = WordEncoder()
    index = DocumentIndex.build(corpus, encoder, tmp_path / "i", query_prefix="query: ", factory="HNSW8")
    manifest = index.manifest
    assert {key: manifest[key] for key in encoder.describe()} == encoder.describe()
    assert (manifest["format"], manifest["factory"], manifest["dtype"], manifest["documents"]) == (
        (2, "HNSW8", "float16", 50)
    )
    assert manifest["corpus"] == {"sha256": corpus.sha256, "size": corpus.size}
    assert {file: said["size"] for file, said in manifest["files"].items()} == {
        file: (tmp_path / "i" / file).stat().st_size for file in ("embeddings.npy", "index.faiss")
    }
    assert manifest_settings(tmp_path / "i") == {
        "encoder": "words", "revision": None, "family": None, "query_prefix": "query: ", "passage_prefix": "",
        "max_length": 16, "pooling": "mean", "normalize": True,
    }  # fmt: skip


def flip(data):
    """One bit of the last vector: sizes and headers stay as they were."""
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES = [
    ("manifest.json", lambda data: data[:40], r"manifest\.json of index .* is damaged: .*; rebuild it with"),
    ("manifest.json", lambda data: b"[1]", "not a JSON object"),
    ("manifest.json", lambda data: b"\xff", "is damaged"),
    ("manifest.json", lambda data: b"[" * 200_000, "is damaged"),
    ("manifest.json", lambda data: data.replace(b'"pooling"', b'"poling"'), "damaged: pooling is None"),
    ("manifest.json", lambda data: data.replace(b'"size"', b'"sise"'), "damaged: corpus is"),
    ("manifest.json", lambda data: data.replace(b'"files"', b'"fils"'), "damaged: files is None"),
    ("manifest.json", lambda data: data.replace(b'"embeddings.npy"', b'"../x"'), "files say None of embeddings.npy"),
    ("manifest.json", lambda data: data.replace(b'"format": 2', b'"format": 1'), "has format 1, this version reads 2"),
    ("embeddings.npy", lambda data: data[:-100], r"embeddings\.npy of index .* is damaged"),
    ("embeddings.npy", lambda data: data + b"x", r"embeddings\.npy of index .* is damaged: it has \d+ bytes"),
    ("embeddings.npy", lambda data: b"", r"embeddings\.npy of index .* is damaged"),
    ("embeddings.npy", lambda data: None, r"lacks embeddings\.npy; build it with"),
    ("index.faiss", lambda data: data[:50], r"index\.faiss of index .* is damaged: it has 50 bytes"),
    ("index.faiss", lambda data: b"x" * len(data), r"index\.faiss of index .* its header does not say 50 documents"),
    ("index.faiss", lambda data: None, r"lacks index\.faiss; build it with"),
]


@pytest.fixture(scope="module")
def approximate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("approximate")
    corpus = make_corpus(folder, 50)
    DocumentIndex.build(corpus, WordEncoder(), folder / "i", factory="HNSW8")
    return corpus, {file.name: file.read_bytes() for file in (folder / "i").iterdir()}


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES)
def test_a_damaged_index_names_the_file_and_the_fix(approximate, tmp_path, file, damage, message):
    corpus, files = approximate
    (tmp_path / "i").mkdir()
    for name, data in {**files, file: damage(files[file])}.items():
        if data is not None:
            (tmp_path / "i" / name).write_bytes(data)
    for verify in (True, False):  # all of this shows without reading the vectors
        with pytest.raises(ValueError, match=message):
            DocumentIndex.load(tmp_path / "i", corpus, verify=verify)
    with pytest.raises(ValueError, match=message):
        check_index(tmp_path / "i")


@pytest.mark.parametrize("file", ["embeddings.npy", "index.faiss"])
def test_a_single_wrong_bit_is_found_by_the_checksum(approximate, tmp_path, file):
    corpus, files = approximate
    (tmp_path / "i").mkdir()
    for name, data in {**files, file: flip(files[file])}.items():
        (tmp_path / "i" / name).write_bytes(data)
    message = rf"{file} of index .* is damaged: its SHA-256 is not"
    with pytest.raises(ValueError, match=message):
        DocumentIndex.load(tmp_path / "i", corpus)
    with pytest.raises(ValueError, match=message):
        check_index(tmp_path / "i", verify=True)
    assert check_index(tmp_path / "i")["documents"] == len(open_index(tmp_path / "i", corpus, verify=False).vectors)


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW8", "IVF2,Flat", "IVF2,PQ4x2", "PCA4,Flat", "SQ8,RFlat"])
def test_every_kind_is_built_checked_and_searched(corpus, tmp_path, factory):
    encoder = WordEncoder()
    built = DocumentIndex.build(corpus, encoder, tmp_path / "i", factory=factory)
    assert check_index(tmp_path / "i") == built.manifest
    loaded = DocumentIndex.load(tmp_path / "i", corpus, encoder)
    (hits,) = loaded.search(loaded.vectors(["d7"]), 50)
    assert len(set(hits.rows)) == len(hits.rows) and 7 in hits.rows[:25]
    # whatever the index keeps, learning reads the vectors as they were encoded
    torch.testing.assert_close(loaded.vectors(["d7"]), encoded(encoder, corpus)[[7]], atol=5e-4, rtol=0)


def test_documents_encoded_again_agree_or_the_worst_is_named(corpus, tmp_path):
    encoder = WordEncoder()
    DocumentIndex.build(corpus, encoder, tmp_path / "i")
    stored = open_index(tmp_path / "i", corpus, encoder)
    cosine, _ = compare_vectors(stored, corpus, encoder)
    assert cosine > 0.9999

    class Turned(WordEncoder):
        """Says what the right one says, but the last document comes out otherwise."""

        def encode_documents(self, passages):
            vectors = super().encode_documents(passages)
            vectors[-1] = -vectors[-1]
            return vectors

    with pytest.raises(ValueError, match=r"row 49 \(document 'd49'\) has cosine -1\.000 .* passage prefix"):
        compare_vectors(stored, corpus, Turned())


def test_an_index_of_a_model_that_knows_no_lengths_is_no_obstacle(corpus, tmp_path):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i")
    manifest = json.loads((tmp_path / "i" / "manifest.json").read_text())
    manifest |= {"max_length": None, "pooling": "none", "normalised": False}
    (tmp_path / "i" / "manifest.json").write_text(json.dumps(manifest))
    settings = manifest_settings(tmp_path / "i")
    assert (settings["max_length"], settings["pooling"], settings["normalize"]) == (None, None, None)
    assert np.isfinite(DocumentIndex.load(tmp_path / "i", corpus).search(queries(1), 1)[0].scores).all()
