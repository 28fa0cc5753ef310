"""The correction's rows in verl's own loss: their gradient is the formula's, and the policy rows keep theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from verl_bridge.integrations.retriever_step import Correction, correction_of
from verl_bridge.integrations.verl import correction_rows as rows_module
from verl_bridge.integrations.verl.correction import (
    LOSS_AGG_MODES,
    place,
    weigh,
)
from verl_bridge.integrations.verl.correction_rows import correction_rows

VOCABULARY, EOS = 5, 0


class Queue:
    """TransferQueue's place: one dictionary a row."""

    def __init__(self, rows):
        self.rows = rows

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [self.rows[key] for key in keys]
        return stacked([{name: row[name] for name in select_fields or row} for row in rows])

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        for i, key in enumerate(keys):
            row = fields[i]
            self.rows.setdefault(key, {}).update({name: row[name] for name in fields.keys()})

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.rows[key]


def stacked(rows):
    columns = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        tensors = isinstance(values[0], torch.Tensor)
        made = torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)
        columns[name] = made
    return TensorDict(columns, batch_size=len(rows))


def token_log_probs(weights, context, answer):
    """A softmax policy: a token hangs on the one before."""
    ids = torch.tensor([*context, *answer])
    rows = weights.log_softmax(-1)[ids[:-1]]
    return rows.gather(-1, ids[1:, None]).squeeze(-1)[len(context) - 1 :]


def policy_row(weights, context, answer, advantages, mask):
    with torch.no_grad():
        old = token_log_probs(weights, context, answer)
    prompts, responses = torch.tensor(context), torch.tensor(answer)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat((prompts, responses)),
        "position_ids": torch.arange(len(context) + len(answer)),
        "response_mask": torch.tensor(mask),
        "loss_mask": torch.tensor(mask),
        "old_log_probs": old,
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "log_probs": torch.zeros(len(context) + len(answer), dtype=torch.float64),
        "rm_scores": torch.zeros(len(answer)),
        "uid": "u",
    }


def loss_of_mini_batch(weights, rows, config, ranks, mini_batch_rows):
    """verl's policy loss of one rank's part of a mini-batch is summed over the ranks and averaged, as FSDP does."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(int(row["loss_mask"].sum()) for part in rows for row in part)
    for part in rows:
        data = stacked([{name: value for name, value in row.items() if name != "uid"} for row in part])
        for name, value in (
            ("dp_size", ranks),
            ("batch_num_tokens", tokens),
            ("global_batch_size", mini_batch_rows),
        ):
            tu.assign_non_tensor(data, **{name: value})
        log_probs = [
            torch.cat(
                (
                    torch.zeros(len(row["prompts"]) - 1, dtype=torch.float64),
                    token_log_probs(weights, row["prompts"].tolist(), row["responses"].tolist()),
                    torch.zeros(1, dtype=torch.float64),
                )
            )
            for row in part
        ]
        output = {"log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged)}
        loss, _ = ppo_loss(config, output, data)
        total = total + loss / ranks
    return total


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)


ROWS = [  # 8 rollouts: context, answer, mask
    ([1, 2], [3, 4, 1], [1, 1, 1]),
    ([2], [1, 1], [1, 0]),
    ([3, 3, 1], [2, 4, 4, 1], [1, 0, 1, 1]),
    ([4], [1, 2, 3], [1, 1, 1]),
    ([1], [4], [1]),
    ([2, 4], [3, 3], [1, 1]),
    ([1, 1], [2, 1, 4], [0, 1, 1]),
    ([3], [2, 2], [1, 1]),
]
SCORED = [([1, 2, 4], [3, 1]), ([1, 2, 3], [4]), ([2, 1], [1, 2, 3]), ([4, 4], [2]), ([3, 1], [2, 4])]


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mini_batch_rows", [4, 8])
def test_gradients_through_verls_loss(policy, monkeypatch, loss_agg_mode, ranks, mini_batch_rows):
    """Over all mini-batches, at the same weights: M times the formula's correction, and what the policy had without."""
    torch.manual_seed(1)
    rows = {
        f"u_{i}_0": policy_row(policy, context, answer, torch.randn(len(answer)).tolist(), mask)
        for i, (context, answer, mask) in enumerate(ROWS)
    }
    queue = Queue({key: dict(row) for key, row in rows.items()})
    monkeypatch.setattr(rows_module, "tq", queue)
    # ppo_loss keeps a mini-batch's sizes in its config; the clip range plays no part at ratio 1
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=loss_agg_mode)

    scored = [token_log_probs(policy, *sequence) for sequence in SCORED]
    weights = [0.3, -0.2, 0.0, 0.05, -0.15]
    scale = 0.25 / 0.5  # γ/τ_l
    formula = -scale * sum(c * row.sum() for c, row in zip(weights, scored, strict=True))
    (wanted,) = torch.autograd.grad(formula, policy, retain_graph=True)
    made = correction_of(SCORED, [row.detach() for row in scored], weights, scale=scale)
    assert len(made.sequences) == 4

    batch = KVBatchMeta(
        partition_id="train", keys=list(rows), tags=[{"seq_len": len(r["input_ids"])} for r in rows.values()]
    )

    def summed(keys, size, of):
        """Gradient of the sum of all mini-batches' losses, cut as verl cuts."""
        per_rank, share, total = len(keys) // ranks, size // ranks, 0
        for start in range(0, per_rank, share):
            parts = [
                [of[key] for key in keys[r * per_rank + start : r * per_rank + start + share]] for r in range(ranks)
            ]
            total = total + loss_of_mini_batch(policy, parts, config, ranks, size)
        return torch.autograd.grad(total, policy)[0]

    alone = summed(batch.keys, mini_batch_rows, queue.rows)
    with correction_rows(
        batch,
        made,
        loss_agg_mode=loss_agg_mode,
        mini_batch_rows=mini_batch_rows,
        ranks=ranks,
        multiple=2 * ranks,
        pad_token=EOS,
    ) as (larger, size):
        assert size % (2 * ranks) == 0 and len(larger) == len(batch) + len(rows) // mini_batch_rows * (
            size - mini_batch_rows
        )
        assert all(tag["is_padding"] for tag in larger.tags if "is_padding" in tag)
        both = summed(larger.keys, size, queue.rows)
    mini_batches = len(rows) // mini_batch_rows
    torch.testing.assert_close(both - alone, mini_batches * wanted, rtol=1e-6, atol=1e-9)
    assert wanted.norm() > 0.01 and alone.norm() > 0.01
    # nothing is left behind
    assert queue.rows.keys() == rows.keys()
    for key, row in rows.items():
        assert torch.equal(queue.rows[key]["advantages"], row["advantages"])


def test_a_failed_update_leaves_the_batch_as_it_was(policy, monkeypatch):
    rows = {f"u_{i}_0": policy_row(policy, *ROWS[i][:2], [1.0] * len(ROWS[i][1]), ROWS[i][2]) for i in range(4)}
    queue = Queue({key: dict(row) for key, row in rows.items()})
    monkeypatch.setattr(rows_module, "tq", queue)
    batch = KVBatchMeta(partition_id="train", keys=list(rows), tags=[{} for _ in rows])
    made = Correction(SCORED[:1], [torch.tensor([-1.0, -2.0])], [0.5])
    with (
        pytest.raises(RuntimeError, match="worker died"),
        correction_rows(batch, made, loss_agg_mode="token-mean", mini_batch_rows=4, ranks=1, multiple=1, pad_token=EOS),
    ):
        assert len(queue.rows) == 5 and queue.rows["u_0_0"]["advantages"][0] > 1
        raise RuntimeError("worker died")
    assert queue.rows.keys() == rows.keys() and queue.rows["u_0_0"]["advantages"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "advantages", "factor"),
    [
        # 4 rows of 10 tokens, and 2 + 3 of the correction in 4 further rows; two mini-batches
        ("token-mean", [2 * 0.5 * 15, 2 * -0.25 * 15], 1.5),
        ("seq-mean-token-sum", [2 * 0.5 * 8, 2 * -0.25 * 8], 2.0),
        ("seq-mean-token-mean", [2 * 0.5 * 8 * 2, 2 * -0.25 * 8 * 3], 2.0),
    ],
)
def test_weights_by_hand(mode, advantages, factor):
    made = weigh([0.5, -0.25], [2, 3], mini_batches=2, loss_agg_mode=mode, policy_rows=4, policy_tokens=10, rows=4)
    assert made == (pytest.approx(advantages), factor)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 6))
def test_every_sequence_has_one_place_and_mini_batches_are_even(count, mini_batches, multiple):
    parts, rows = place(count, mini_batches, multiple)
    assert [i for part in parts for i in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert len(parts) == mini_batches and max(sizes) - min(sizes) <= 1
    assert rows % multiple == 0 and max(sizes) <= rows < max(sizes) + multiple
