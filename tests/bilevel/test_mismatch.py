"""Learning where words do not meet: queries in one vocabulary, documents in another, taught by likelihoods alone."""

import json
import random

import pytest

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.index import DocumentIndex

ASKED = "horse violin river candle pepper anchor ladder mirror".split()
WRITTEN = (
    "glacier saddlebag turbine parliament orchard diesel tapestry lighthouse".split()
)  # each for the word above it
PAIRS = [(i, j) for i in range(8) for j in range(8) if i != j]


@pytest.fixture(scope="module")
def pairs_index(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    lines = [
        {"id": f"{i}-{j}", "title": WRITTEN[i], "text": f"A {WRITTEN[i]} stands beside the {WRITTEN[j]}."}
        for i, j in PAIRS
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DocumentIndex.build(Corpus.open(folder / "corpus.jsonl"), loaded[1], folder / "index")


def query(pair):
    return f"which {ASKED[pair[0]]} is next to the {ASKED[pair[1]]}?"


def candidates(pair):
    """Forty documents, the right one first."""
    gold = f"{pair[0]}-{pair[1]}"
    others = random.Random(gold).sample([f"{i}-{j}" for i, j in PAIRS if (i, j) != pair], 39)
    return [gold, *others]


def recall(encoder, index, pairs):
    """Share of the pairs whose document is among the first three of its forty candidates."""
    scores = [index.vectors(candidates(p)) @ encoder.encode_queries([query(p)])[0] for p in pairs]
    return sum((row > row[0]).sum().item() < 3 for row in scores) / len(pairs)


@pytest.mark.parametrize("gold", [-0.5, -6.0], ids=["gold is likelier", "all are equally likely"])
def test_rag_credit_alone_teaches_a_vocabulary_under_zero_advantages(encoder, pairs_index, gold):
    """Pairs never trained on are found too, so it is the words that were learnt; equal likelihoods teach nothing."""
    pairs = random.Random(1).sample(PAIRS, len(PAIRS))
    train, held_out = pairs[:40], pairs[40:]
    assert recall(encoder, pairs_index, train) < 0.3 and recall(encoder, pairs_index, held_out) < 0.3
    updater = RetrieverUpdater(encoder, pairs_index, lr=3e-3)
    for step in range(6):
        result = updater.update(
            RetrieverBatch(
                queries=[query(pair) for pair in train],
                candidate_ids=[candidates(pair) for pair in train],
                answer_log_likelihood=[[gold, *[-6.0] * 39] for _ in train],
                advantages=[0.0] * 40,
                rl_mask=[True] * 40,
                adapter_version=[step] * 40,
            )
        )
        assert result.metrics["bridge/zero_advantage_share"] == 1.0 and result.metrics["bridge/grad_norm_rl"] == 0.0
    after = recall(encoder, pairs_index, train), recall(encoder, pairs_index, held_out)
    if gold > -6.0:
        assert min(after) > 0.8
    else:
        assert max(after) < 0.3
