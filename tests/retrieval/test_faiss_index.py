"""FAISS files that others wrote, and kinds of index that trade accuracy for speed."""

import gc

import faiss
import numpy as np
import pytest
import torch

from tests.retrieval.words import WordEncoder, encoded, make_corpus, queries
from verl_bridge.retrieval.index import DocumentIndex, compare_vectors, open_index
from verl_bridge.retrieval.manifest import check_index, manifest_settings

COUNT = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), COUNT)


@pytest.fixture(scope="module")
def vectors(corpus):
    return encoded(WordEncoder(), corpus).numpy()


def write(path, vectors, factory="Flat", metric=faiss.METRIC_INNER_PRODUCT):
    """As FlashRAG's index builder, which Search-R1 uses, writes ``e5_Flat.index``."""
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    if not index.is_trained:
        index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def test_a_flat_file_is_searched_exactly_and_lends_its_vectors(corpus, vectors, tmp_path):
    file = write(tmp_path / "e5_Flat.index", vectors)
    index = DocumentIndex.load(file, corpus, WordEncoder())
    expected, rows = faiss.read_index(str(file)).search(queries(20).numpy(), 7)
    for hits, right, scores in zip(index.search(queries(20), 7), rows, expected, strict=True):
        assert hits.rows == tuple(right.tolist()) and hits.scores == pytest.approx(scores.tolist(), abs=1e-5)
    assert torch.equal(index.vectors(["d7", "d299", "d7"]), torch.tensor(vectors[[7, 299, 7]]))
    assert len(index) == COUNT and index.dim == 8 and manifest_settings(file) == {}
    (few,) = index.search(queries(1), 10_000)
    assert sorted(few.rows) == list(range(COUNT))


def test_the_vectors_of_a_flat_file_are_mapped_and_outlive_their_index(corpus, vectors, tmp_path):
    kept = open_index(write(tmp_path / "x.index", vectors), corpus).vectors
    gc.collect()
    assert not kept.flags.owndata and not kept.flags.writeable
    assert np.array_equal(kept, vectors)
    mapped = open("/proc/self/maps").read()
    assert str(tmp_path / "x.index") in mapped
    del kept
    gc.collect()
    assert str(tmp_path / "x.index") not in open("/proc/self/maps").read()


def test_a_file_out_of_step_names_both_numbers(corpus, vectors, tmp_path):
    """castorini/pyserini#1557 and RUC-NLPIR/FlashRAG#12, without a manifest to help."""
    file = write(tmp_path / "x.index", vectors[:-1])
    for load in (DocumentIndex.load, open_index):
        with pytest.raises(ValueError, match=r"x\.index holds 299 documents but the corpus 300; give the corpus"):
            load(file, corpus)
    with pytest.raises(ValueError, match=r"built with dim 8 .* has 16; give the corpus and encoder"):
        DocumentIndex.load(write(tmp_path / "y.index", vectors), corpus, WordEncoder(dim=16))
    assert check_index(file)["documents"] == 299 and check_index(file)["passage_prefix"] is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-50], r"x\.index is damaged or of an unknown kind"),
        (lambda data: data[:9], r"x\.index is not a FAISS index"),
        (lambda data: b'{"id": "0", "contents": "a corpus"}', r"x\.index is not a FAISS index"),
        (lambda data: b"IxZZ" + data[4:], r"x\.index is damaged or of an unknown kind"),
    ],
)
def test_a_damaged_file_is_named(corpus, vectors, tmp_path, content, message):
    file = write(tmp_path / "x.index", vectors)
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        DocumentIndex.load(file, corpus)


def test_l2_is_taken_only_where_it_ranks_as_the_inner_product_does(corpus, vectors, tmp_path):
    file = write(tmp_path / "l2.index", vectors, metric=faiss.METRIC_L2)  # all of length 1
    index = DocumentIndex.load(file, corpus)
    _, rows = faiss.read_index(str(file)).search(queries(20).numpy(), 5)
    assert [hits.rows for hits in index.search(queries(20), 5)] == [tuple(row.tolist()) for row in rows]
    longer = vectors.copy()
    longer[17] *= 2
    with pytest.raises(ValueError, match=r"ranks by L2 distance and its vectors have lengths from 1 to 2: only"):
        DocumentIndex.load(write(tmp_path / "l2.index", longer, metric=faiss.METRIC_L2), corpus)
    for factory in ("HNSW8", "IVF4,Flat"):
        with pytest.raises(ValueError, match=r"with metric 1, not inner product; build it with"):
            DocumentIndex.load(write(tmp_path / "l2.index", vectors, factory, faiss.METRIC_L2), corpus)


def test_ids_of_its_own_are_refused(corpus, vectors, tmp_path):
    index = faiss.IndexIDMap(faiss.IndexFlatIP(8))
    index.add_with_ids(vectors, np.arange(COUNT)[::-1].copy())
    faiss.write_index(index, str(tmp_path / "x.index"))
    with pytest.raises(ValueError, match=r"maps ids of its own, but row i has to be document i"):
        DocumentIndex.load(tmp_path / "x.index", corpus)


@pytest.mark.parametrize(("factory", "off"), [("IVF4,Flat", 0), ("HNSW8", 0), ("SQ8", 0.02), ("PCA8,IVF4,Flat", 1e-5)])
def test_other_kinds_search_and_give_back_what_they_keep(corpus, vectors, tmp_path, factory, off):
    file = write(tmp_path / "x.index", vectors, factory)
    index = DocumentIndex.load(file, corpus, WordEncoder())
    back = index.vectors(["d250", "d3"]).numpy()
    assert np.abs(back - vectors[[250, 3]]).max() <= off
    (hits,) = index.search(torch.tensor(vectors[[250]]), 3)
    assert 250 in hits.rows
    assert compare_vectors(open_index(file, corpus), corpus, WordEncoder()) is None


def test_a_kind_that_cannot_give_vectors_back_says_so(corpus, vectors, tmp_path):
    index = faiss.read_index(str(write(tmp_path / "x.index", vectors, "IVF4,Flat")))  # no direct map was made
    with pytest.raises(ValueError, match=r"a IndexIVFFlat cannot give its vectors back, which learning needs; build"):
        DocumentIndex(corpus, index, None, {}).vectors(["d3"])


def test_search_parameters_trade_speed_for_accuracy(corpus, vectors, tmp_path):
    DocumentIndex.build(corpus, WordEncoder(), tmp_path / "i", factory="IVF30,Flat", search_parameters="nprobe=30")
    exact = [tuple(row.tolist()) for row in (queries(40) @ torch.tensor(vectors).T).topk(5).indices]

    def agreement(**settings):
        found = DocumentIndex.load(tmp_path / "i", corpus, **settings).search(queries(40), 5)
        return sum(hits.rows == right for hits, right in zip(found, exact, strict=True))

    assert agreement() == 40  # every list is probed, as the manifest says
    assert agreement(search_parameters="nprobe=1") < 30
    for bad in ("nprobe=x", "nprobe", "efSearch=3", "=", "nprobe=2,what=3"):
        with pytest.raises(ValueError, match=r"search parameters '.*' do not fit a IndexIVFFlat .*nprobe=32"):
            DocumentIndex.load(tmp_path / "i", corpus, search_parameters=bad)
    flat = write(tmp_path / "x.index", vectors)
    with pytest.raises(ValueError, match="do not apply to exact search"):
        DocumentIndex.load(flat, corpus, search_parameters="nprobe=3")


def test_a_gpu_that_is_not_there_is_named(corpus, vectors, tmp_path):
    file = write(tmp_path / "x.index", vectors, "IVF4,Flat")
    assert not hasattr(faiss, "StandardGpuResources")  # the tests run with faiss-cpu
    with pytest.raises(ValueError, match=r"device 'cuda' .* no GPU; install faiss-gpu, use device 'cpu'"):
        DocumentIndex.load(file, corpus, device="cuda")


def test_a_gpu_takes_a_clone_and_the_vectors_stay(corpus, vectors, tmp_path, monkeypatch):
    """FAISS's GPU calls, recorded: this machine has none."""
    calls, devices = [], []

    class OnGpu:
        def __init__(self, index):
            self.index, self.d = index, index.d

        def search(self, queries, k):
            calls.append(len(queries))
            return self.index.search(queries, k)

    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda _, device, index: (devices.append(device), OnGpu(index))[1], raising=False
    )
    file = write(tmp_path / "x.index", vectors, "IVF4,Flat")
    DocumentIndex.load(file, corpus, device="cuda:1")
    index = DocumentIndex.load(file, corpus, device="cuda")
    assert devices == [1, 0]
    assert index.search(torch.tensor(vectors[[9]]), 1)[0].rows == (9,) and calls == [1]
    assert torch.equal(index.vectors(["d9"]), torch.tensor(vectors[[9]]))


def test_the_training_sample_is_bounded(vectors, monkeypatch):
    from verl_bridge.retrieval import faiss_index

    monkeypatch.setattr(faiss_index, "TRAINING_SAMPLE", 100)
    seen, added = [], []

    class Index:
        is_trained = False

        def train(self, sample):
            seen.append(sample)

        def add(self, batch):
            added.append(batch)

    faiss_index.fill_index(Index(), vectors.astype(np.float16), "IVF4,Flat", 64)
    (sample,) = seen
    assert sample.shape == (100, 8) and sample.dtype == np.float32
    assert len({row.tobytes() for row in sample}) == 100  # of different documents, not only the first ones
    assert not np.array_equal(sample, vectors[:100].astype(np.float16).astype(np.float32))
    assert [len(batch) for batch in added] == [64, 64, 64, 64, 44]
    assert np.array_equal(np.concatenate(added), vectors.astype(np.float16).astype(np.float32))
