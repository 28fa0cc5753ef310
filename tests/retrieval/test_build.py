"""A build streams, continues after being killed at any moment, and stores no vector that no search can use."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.retrieval.words import WordEncoder, make_corpus
from verl_bridge.retrieval.build import build_index
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.index import DocumentIndex

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path, 50)


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_progress_is_told_before_the_first_batch_and_after_each(corpus, tmp_path):
    encoder, told = WordEncoder(), []
    build_index(corpus, encoder, tmp_path / "i", batch_size=7, progress=lambda *step: told.append(step))
    assert encoder.batches == [7] * 7 + [1]
    assert told == [(done, 50) for done in (0, 7, 14, 21, 28, 35, 42, 49, 50)]


CHILD = """
import os, signal, sys
from pathlib import Path
from tests.retrieval.words import WordEncoder
from verl_bridge.retrieval import build
from verl_bridge.retrieval.corpus import Corpus

moment, corpus, out = sys.argv[1:]
die = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
record, put, tree = build._record, build.put_folder, build.shutil.rmtree

if moment == "before the record":      # vectors written, the record still says 14
    build._record = lambda work, plan, done: die() if done == 21 else record(work, plan, done)
elif moment == "after the record":
    build._record = lambda work, plan, done: (record(work, plan, done), done == 21 and die())
elif moment == "in a batch":           # half of a batch on disk
    def half(work, plan, done):
        if done == 21:
            with open(work / "index" / "embeddings.npy", "r+b") as file:
                file.truncate(file.seek(0, 2) - 30)
            die()
        record(work, plan, done)
    build._record = half
elif moment == "before the rename":
    build.put_folder = die
elif moment == "after the rename":
    build.put_folder = lambda *folders: (put(*folders), die())
build.build_index(Corpus.open(corpus), WordEncoder(), out, batch_size=7, factory="HNSW8", overwrite=True)
"""


@pytest.mark.parametrize(
    ("moment", "again"),
    [
        ("before the record", 50 - 14),
        ("in a batch", 50 - 14),
        ("after the record", 50 - 21),
        ("before the rename", 0),
        ("after the rename", 50),  # the index is there; only who wants another one encodes again
    ],
)
def test_killed_at_any_moment_it_continues_and_ends_with_the_same_bytes(corpus, tmp_path, moment, again):
    whole = tmp_path / "whole" / "i"
    build_index(corpus, WordEncoder(), whole, batch_size=7, factory="HNSW8")
    arguments = [moment, str(corpus.path), str(tmp_path / "i")]
    run = subprocess.run([sys.executable, "-c", CHILD, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert (tmp_path / "i").exists() == (moment == "after the rename")
    encoder = WordEncoder()
    build_index(corpus, encoder, tmp_path / "i", batch_size=7, factory="HNSW8", overwrite=True)
    assert sum(encoder.batches) == again
    assert contents(tmp_path / "i") == contents(whole)
    assert folders(tmp_path) == ["i", "whole"]
    assert len(DocumentIndex.load(tmp_path / "i", corpus, WordEncoder())) == 50


def interrupted(corpus, folder, **settings):
    with pytest.raises(RuntimeError, match="out of memory"):
        build_index(corpus, WordEncoder(fail_at=3), folder, batch_size=10, **settings)


def test_whoever_misses_the_index_is_told_of_the_interrupted_build(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"lacks manifest\.json, embeddings\.npy; build it with `[^;]*`$"):
        DocumentIndex.load(tmp_path / "i", corpus)
    interrupted(corpus, tmp_path / "i")
    with pytest.raises(ValueError, match=r"lacks .*; .*/\.i\.building is an interrupted build of it, which continues"):
        DocumentIndex.load(tmp_path / "i", corpus)


def test_a_failed_build_is_continued_and_an_existing_index_stays_until_then(corpus, tmp_path):
    build_index(corpus, WordEncoder(fingerprint="old"), tmp_path / "i")
    interrupted(corpus, tmp_path / "i", overwrite=True)
    assert folders(tmp_path) == [".i.building", "i"]
    assert json.loads((tmp_path / "i" / "manifest.json").read_text())["fingerprint"] == "old"
    encoder = WordEncoder()
    told = []
    build_index(
        corpus, encoder, tmp_path / "i", batch_size=10, overwrite=True, progress=lambda *step: told.append(step)
    )
    assert encoder.batches == [10, 10, 10] and told[0] == (20, 50)
    assert DocumentIndex.load(tmp_path / "i", corpus, encoder).manifest["fingerprint"] == "f"
    assert folders(tmp_path) == ["i"]


def test_other_settings_do_not_continue_and_the_difference_is_named(corpus, tmp_path):
    interrupted(corpus, tmp_path / "i")
    with pytest.raises(ValueError, match=r"has dtype 'float16', this one 'float32'; .*--restart"):
        build_index(corpus, WordEncoder(), tmp_path / "i", dtype="float32")
    with pytest.raises(ValueError, match=r"has fingerprint 'f', this one 'g'; .*--restart"):
        build_index(corpus, WordEncoder(fingerprint="g"), tmp_path / "i")
    with pytest.raises(ValueError, match=r"has corpus '[0-9a-f]{64}', this one"):
        build_index(make_corpus(tmp_path, 51), WordEncoder(), tmp_path / "i")
    prefixed = WordEncoder()
    prefixed.describe = lambda: {**WordEncoder().describe(), "passage_prefix": "passage: "}
    with pytest.raises(ValueError, match=r"has passage_prefix '', this one 'passage: '"):
        build_index(corpus, prefixed, tmp_path / "i")
    other = WordEncoder(fingerprint="g")
    manifest = build_index(corpus, other, tmp_path / "i", batch_size=10, restart=True)
    assert manifest["fingerprint"] == "g" and sum(other.batches) == 50
    assert folders(tmp_path) == ["i"]


def test_vectors_are_kept_when_the_faiss_index_cannot_be_made(corpus, tmp_path):
    """They do not depend on the factory: hours of encoding are not lost to a bad choice of clusters."""
    with pytest.raises(ValueError, match=r"factory 'IVF100,Flat' cannot be made from 50 documents .*; use 'Flat'"):
        build_index(corpus, WordEncoder(), tmp_path / "i", factory="IVF100,Flat")
    assert not (tmp_path / "i").exists()
    encoder = WordEncoder()
    assert build_index(corpus, encoder, tmp_path / "i", factory="IVF5,Flat")["factory"] == "IVF5,Flat"
    assert encoder.batches == []


def test_a_record_that_cannot_be_read_is_named(corpus, tmp_path):
    interrupted(corpus, tmp_path / "i")
    for content in (b"", b"[1]", b'{"done": 3}', b'{"done": null, "plan": {}}'):
        (tmp_path / ".i.building" / "progress.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"record of the interrupted build in .*\.i\.building .*--restart"):
            build_index(corpus, WordEncoder(), tmp_path / "i")
    build_index(corpus, WordEncoder(), tmp_path / "i", restart=True)
    assert folders(tmp_path) == ["i"]


def test_two_builds_of_one_index_do_not_mix(corpus, tmp_path):
    class Meanwhile(WordEncoder):
        def encode_documents(self, passages):
            with pytest.raises(ValueError, match=r"another process builds .*/i; wait"):
                build_index(corpus, WordEncoder(), tmp_path / "i")
            return super().encode_documents(passages)

    encoder = Meanwhile()
    build_index(corpus, encoder, tmp_path / "i", batch_size=25)
    assert encoder.batches == [25, 25] and len(DocumentIndex.load(tmp_path / "i", corpus, WordEncoder())) == 50


@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (1e6, "not finite"), (0, "zeros")]
)
def test_a_vector_that_no_search_can_use_is_refused_with_its_document(corpus, tmp_path, value, what):
    class Broken(WordEncoder):
        def encode_documents(self, passages):
            vectors = super().encode_documents(passages)
            if "t33\nx" in passages:
                vectors[passages.index("t33\nx")] = value  # 1e6 is beyond float16
            return vectors

    with pytest.raises(ValueError, match=rf"document 'd33' \(row 33\) is .*{what} in float16; check the encoder"):
        build_index(corpus, Broken(), tmp_path / "i", batch_size=10)
    assert not (tmp_path / "i").exists()
    repaired = WordEncoder()
    build_index(corpus, repaired, tmp_path / "i", batch_size=10)
    assert sum(repaired.batches) == 20  # from the batch on that failed


def test_bad_settings_are_refused_before_encoding_and_leave_nothing(corpus, tmp_path):
    encoder = WordEncoder()
    for settings, message in (
        ({"factory": "Flatt"}, "'Flatt' is unknown to FAISS"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"search_parameters": "nprobe=3"}, "'nprobe=3' do not apply to exact search"),
        ({"factory": "HNSW8", "search_parameters": "nprobe=3"}, "'nprobe=3' do not fit a IndexHNSWFlat"),
        ({"factory": "IVF4,Flat", "search_parameters": "nprobe"}, "'nprobe' do not fit a IndexIVFFlat"),
    ):
        with pytest.raises(ValueError, match=message):
            build_index(corpus, encoder, tmp_path / "i", **settings)
    assert encoder.batches == [] and folders(tmp_path) == []


def test_only_an_index_or_an_empty_folder_is_overwritten(corpus, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    encoder = WordEncoder()
    for name in ("notes", "file"):
        with pytest.raises(ValueError, match=rf"{name} is not an index .* not replaced"):
            build_index(corpus, encoder, tmp_path / name, overwrite=True)
        with pytest.raises(ValueError, match="exists"):
            build_index(corpus, encoder, tmp_path / name)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"
    assert encoder.batches == []
    (tmp_path / "empty").mkdir()
    assert build_index(corpus, encoder, tmp_path / "empty", overwrite=True)["documents"] == 50


def test_a_place_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"file/deep/i cannot be written \(Not a directory\); choose another place"):
        build_index(corpus, WordEncoder(), tmp_path / "file" / "deep" / "i")


MEMORY = """
import json, resource, sys
from pathlib import Path
import torch
from tests.retrieval.words import WordEncoder
from verl_bridge.retrieval.build import build_index
from verl_bridge.retrieval.corpus import Corpus

class Ones(WordEncoder):
    def encode_documents(self, passages):
        return torch.ones(len(passages), self.dim)

for count in (3_000, 30_000):
    path = Path(sys.argv[1]) / f"{count}.jsonl"
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"id": f"d{i}", "contents": f"t{i}" + 1000 * "x"}) + "\\n")
    build_index(Corpus.open(path), Ones(dim=768), Path(sys.argv[1]) / f"i{count}", dtype="float32", batch_size=100)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB, the most so far
"""


def test_building_streams(tmp_path):
    """PeterGriffinJin/Search-R1#54: ten times the documents (30 MB of text, 92 MB of vectors), hardly more memory."""
    environment = {**os.environ, "VERL_BRIDGE_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    small, large = map(int, run.stdout.split())
    assert large - small < 8 * 1024, (small, large)
    vectors = np.load(tmp_path / "i30000" / "embeddings.npy", mmap_mode="r")
    assert vectors.shape == (30_000, 768) and (vectors[[0, 15_000, -1]] == 1).all()


def test_the_default_is_half_precision_exact_search(encoders, places, tmp_path):
    """The real encoder: half the size, and rows that differ from float32 only where scores are as good as equal."""
    _, documents = encoders
    half = DocumentIndex.build(places, documents, tmp_path / "half")
    full = DocumentIndex.build(places, documents, tmp_path / "full", dtype="float32")
    assert half.manifest["dtype"] == "float16" and half.manifest["factory"] == "Flat"
    ids = [document.id for document in places]
    torch.testing.assert_close(half.vectors(ids), full.vectors(ids), atol=2.5e-4, rtol=0)
    questions = documents.encode_documents(["what is paid with in Borsk?", "a town near a lake"])
    for one, other in zip(half.search(questions, 16), full.search(questions, 16), strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-3)
    assert Corpus.open(places.path).sha256 == half.manifest["corpus"]["sha256"]
