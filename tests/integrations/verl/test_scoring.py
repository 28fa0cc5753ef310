"""The extra pass over verl's workers: which positions are the answer's, and that nothing stays behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_bridge.integrations.verl import scoring


class Queue:
    """TransferQueue's place: one dictionary a row."""

    def __init__(self):
        self.rows, self.cleared = {}, []

    def kv_batch_put(self, keys, partition_id, fields, tags):
        assert partition_id == scoring.PARTITION
        self.rows |= {key: {name: fields[name][i] for name in fields.keys()} for i, key in enumerate(keys)}
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=tags)

    def kv_batch_get(self, keys, partition_id, select_fields):
        (name,) = select_fields
        return TensorDict({name: scoring.jagged([self.rows[key][name] for key in keys])}, batch_size=len(keys))

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.cleared.append(self.rows.pop(key))


class Workers:
    """Position t of a row gets −(token t + 1), the last one 0: what predicts a token lies one position before it."""

    fails = False

    def __init__(self, queue, ranks):
        self._dispatch_info, self.queue, self.ranks, self.asked = {}, queue, ranks, []

    def _query_dispatch_info(self, role):
        assert role == "actor"
        return [rank for rank in range(self.ranks) for _ in range(2)]  # two devices a rank

    def compute_log_prob(self, meta):
        self.asked.append(meta)
        if self.fails:
            raise RuntimeError("worker died")
        for key in meta.keys:
            row = self.queue.rows[key]
            row["log_probs"] = torch.cat((-row["input_ids"][1:].float(), torch.zeros(1)))


@pytest.fixture
def workers(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(scoring, "tq", queue)
    return Workers(queue, ranks=2)


SEQUENCES = [((1, 2, 3), (4, 5)), ((6,), (7,)), ((1, 1), (8, 9, 10))]


def score(workers, sequences=SEQUENCES):
    return scoring.answer_log_probs(workers, sequences, temperature=0.7, max_token_len_per_gpu=64)


def test_every_answer_gets_its_own_tokens_log_probs(workers):
    assert [row.tolist() for row in score(workers)] == [[-4, -5], [-7], [-8, -9, -10]]
    (meta,) = workers.asked
    assert len(meta) == 4  # a rank without a row would wait for ever: the first sequence is scored twice
    assert [tag["seq_len"] for tag in meta.tags] == [5, 2, 5, 5]
    assert meta.extra_info["temperature"] == 0.7 and meta.extra_info["max_token_len_per_gpu"] == 64
    masks = [row["loss_mask"].tolist() for row in workers.queue.cleared]
    assert masks == [[0, 0, 0, 1, 1], [0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]] and not workers.queue.rows


def test_nothing_to_score_asks_nobody(workers):
    assert score(workers, []) == [] and not workers.asked


def test_rows_of_a_failed_pass_do_not_stay(workers):
    workers.fails = True
    with pytest.raises(RuntimeError, match="worker died"):
        score(workers)
    assert len(workers.queue.cleared) == 4 and not workers.queue.rows


def test_ranks_are_asked_for_once():
    asked = []
    group = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: asked.append(role) or [0, 0, 1, 2])
    assert [scoring.data_parallel_size(group) for _ in range(2)] == [3, 3] and asked == ["actor"]
