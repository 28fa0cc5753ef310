"""A batch read from TransferQueue: padding rows out, columns cut to the response, and none that nobody wrote."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

os.environ.setdefault("VERL_PLATFORM", "cpu")

from transfer_queue import KVBatchMeta

from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.config.schema import GCAConfig
from verl_bridge.evaluation.rollouts import read_rollouts as saved_rollouts
from verl_bridge.integrations.rollout_batch import save_rollouts
from verl_bridge.integrations.verl import rollouts
from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN
from verl_bridge.trace import SearchTrace, SearchTurn

RESPONSES, PROMPTS = (3, 5), (2, 1)


def jagged(*rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def trace(length):
    return SearchTrace("?", ("Lima",), (SearchTurn("answer", (0, length)),), "Lima", (0, 1), "answer", length)


def stored(**more):
    """Rows "a" and "b" of one prompt; "pad" is verl's padding and is not asked for."""
    traces = [{"search_trace": trace(length).to_dict()} for length in RESPONSES]
    columns = {
        "uid": NonTensorStack("u", "u"),
        "extra_fields": NonTensorStack(*traces),
        "prompts": jagged([1, 2], [3]),
        "responses": jagged([4, 5, 6], [7, 8, 9, 10, 11]),
        "response_mask": jagged([1, 1, 0], [1, 0, 1, 1, 1]),
        "advantages": jagged([0.5] * 3, [-0.5] * 5),
        "rm_scores": jagged([0.0, 0.0, 1.0], [0.0] * 5),
        **more,
    }
    return TensorDict(columns, batch_size=2)


@pytest.fixture
def read(monkeypatch):
    """Reads a batch whose queue holds :func:`stored` columns."""

    def read(columns, **more):
        def get(keys, partition_id, select_fields):
            # as TransferQueue does it: a field that no row has is left out without a word
            assert keys == ["a", "b"] and partition_id == "train"
            data = stored(**more)
            return data.select(*[field for field in select_fields if field in data.keys()])

        monkeypatch.setattr(rollouts.tq, "kv_batch_get", get)
        meta = KVBatchMeta(partition_id="train", keys=["a", "pad", "b"], tags=[{}, {"is_padding": True}, {}])
        return rollouts.read_rollouts(meta, columns)

    return read


def test_columns_are_cut_to_the_response_whatever_they_run_over(read):
    """An engine's column is about the next token: that of a response token lies one position before it."""
    whole = jagged(np.arange(5.0), np.arange(6.0))  # over prompt and response
    batch = read([MARGIN, "entropy"], **{MARGIN: whole, "entropy": jagged([7.0] * 3, [8.0] * 5)})
    assert batch.columns[MARGIN].tolist() == [[1, 2, 3, 0, 0], [0, 1, 2, 3, 4]]
    assert batch.columns["entropy"].tolist() == [[7, 7, 7, 0, 0], [8] * 5]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0, 0], [1, 0, 1, 1, 1]]
    assert batch.rewards.tolist() == [1, 0] and batch.group_index.tolist() == [0, 0]
    assert batch.prompt_ids == [[1, 2], [3]] and batch.response_ids == [[4, 5, 6], [7, 8, 9, 10, 11]]
    assert batch.traces == [trace(3), trace(5)]


def test_an_engine_without_the_hook_ends_in_a_refusal_that_names_the_way_out(read):
    batch = read([MARGIN, ENTROPY])
    assert batch.columns == {}
    signals = credit.batch_signals(batch.traces, batch.group_index)
    with pytest.raises(ValueError, match=r"the engine gave none; set verl_bridge\.gca\.salience=uniform"):
        credit.ground(
            batch.traces,
            signals,
            batch.advantages,
            batch.response_mask,
            batch.group_index,
            batch.rewards,
            group_relative=True,
            settings=GCAConfig(enable=True),
            margin=batch.columns.get(MARGIN),
            top_entropy=batch.columns.get(ENTROPY),
        )


def test_saved_rollouts_are_read_by_the_evaluation(read, tmp_path):
    """What a step leaves, whatever its file is called: all of a batch, or one of a step's several."""
    batch = read([])
    file = tmp_path / "rollouts" / "step_000001_0.jsonl"
    save_rollouts(file, batch, torch.tensor([RolloutType.A, RolloutType.C]), step=1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["uid"], row["reward"], row["type"]) for row in rows] == [
        (1, "u", 1, "A"),
        (1, "u", 0, "C"),
    ]
    assert [(row.trace, row.reward) for row in saved_rollouts(file)] == [(trace(3), 1), (trace(5), 0)]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_rollouts_of_another_agent_loop_are_refused(read):
    with pytest.raises(ValueError, match="default_agent_loop to verl_bridge_search, or to verl_bridge_tool_agent"):
        read([], extra_fields=NonTensorStack({}, {}))
