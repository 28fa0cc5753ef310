"""Stand-ins for the encoder and small corpora, for tests of what does not depend on a model."""

import json

import numpy as np
import torch

from verl_bridge.retrieval.corpus import Corpus


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
            "family": None,
            "passage_prefix": "",
            "max_length": 16,
            "compute_dtype": "float32",
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


def encoded(encoder, corpus):
    """All vectors of a corpus as float32, (documents, dim)."""
    return encoder.encode_documents([document.contents for document in corpus])


def queries(count, dim=8):
    return torch.tensor(np.random.default_rng(0).normal(size=(count, dim)), dtype=torch.float32)
