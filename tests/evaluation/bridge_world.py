"""A part of the embedded world with its index, for the benchmarks of BRIDGE: quick to encode."""

import json
import random

from verl_bridge.embedded.world import build_world, encoder_dir
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex

SEED = 2


def build_part(folder, questions=2):
    """Paths of a corpus, what the world says of the countries that ``world_rollouts`` asks about, and of its index."""
    world = build_world()
    asked = random.Random(SEED).sample([q for q in world.questions if q.split == "train"], questions)
    countries = {question.country for question in asked}
    lines = [
        json.dumps({"id": document.id, "title": document.title, "text": document.text})
        for document, article in zip(world.documents, world.articles, strict=True)
        if article.country in countries
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("\n".join(lines) + "\n")
    _, encode = load_encoders(str(encoder_dir()))
    DocumentIndex.build(Corpus.open(corpus), encode, folder / "index")
    return corpus, folder / "index"
