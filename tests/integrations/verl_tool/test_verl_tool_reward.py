"""The reward manager and the padded batch, on verl's DataProto: the answer is the rollout's, never the prompt's."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY

from verl_bridge.embedded import policy
from verl_bridge.integrations.verl_tool import REWARD_MANAGER
from verl_bridge.integrations.verl_tool.batch import answer_log_probs, read_rollouts
from verl_bridge.integrations.verl_tool.reward import TraceRewardManager
from verl_bridge.trace import SearchTrace, SearchTurn

PROMPT = "Answer between <answer> and </answer>, for example <answer> Beijing </answer>. Capital of China?"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(policy.__file__.removesuffix(".py"))


def trace(length, answer, kind="answer"):
    turn = SearchTurn(kind, (0, length))
    span = None if answer is None else (0, length)
    reason = "no_action" if answer is None else "answer"
    return SearchTrace("Capital of China?", ("Beijing",), (turn,), answer, span, reason, length)


def data_of(tokenizer, *said, width=40, **columns):
    """Prompts padded left, responses padded right; ``said``: (response text, answer)."""
    rows = []
    for text, _ in said:
        prompt, response = tokenizer.encode(PROMPT), tokenizer.encode(text)
        pads = (60 - len(prompt), width - len(response))
        rows.append(([0] * pads[0] + prompt, response + [0] * pads[1], [0] * pads[0] + [1] * 60, len(response)))
    prompts, responses = torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])
    mask = torch.tensor([r[2][:60] + [1] * r[3] + [0] * (width - r[3]) for r in rows])
    records = [
        trace(r[3], answer, "malformed" if answer is None else "answer").to_dict()
        for r, (_, answer) in zip(rows, said, strict=True)
    ]
    made = {
        "search_trace": records,
        "data_source": ["nq"] * len(rows),
        "reward_model": [{"ground_truth": {"target": ["Beijing"]}}] * len(rows),
        "extra_info": [{"question": "Capital of China?"}] * len(rows),
        **columns,
    }
    arrays = {name: np.array([None, *values], dtype=object)[1:] for name, values in made.items()}
    return DataProto.from_dict({"prompts": prompts, "responses": responses, "attention_mask": mask}, arrays)


def test_it_is_registered():
    assert REWARD_MANAGER_REGISTRY[REWARD_MANAGER] is TraceRewardManager


def test_the_prompt_s_example_is_no_answer(tokenizer):
    """verl-tool's search_r1_qa_em gives the first row 1.0: the gold is the example in the prompt."""
    data = data_of(
        tokenizer, ("I do not know", None), ("<answer>Beijing</answer>", "Beijing"), ("<answer>Xi</answer>", "Xi")
    )
    manager = TraceRewardManager(tokenizer, compute_score=default_compute_score, reward_fn_key="data_source")
    told = manager(data, return_dict=True)
    rewards, lengths = told["reward_tensor"], data.batch["attention_mask"][:, 60:].sum(-1)
    assert rewards.sum(-1).tolist() == [0.0, 1.0, 0.0]
    assert rewards[1, lengths[1] - 1] == 1.0  # at the last token
    assert told["reward_extra_info"]["em"] == [0.0, 1.0, 0.0]
    assert {len(values) for values in told["reward_extra_info"].values()} == {3}  # the same keys in every row
    assert torch.equal(manager(data), rewards)


def test_a_custom_reward_function_is_asked(tokenizer):
    asked = []

    def custom(data_source, solution_str, ground_truth, extra_info, bonus):
        asked.append((data_source, solution_str, ground_truth, extra_info["search_trace"]["answer"]))
        return 0.25 + bonus

    data = data_of(tokenizer, ("<answer>Xi</answer>", "Xi"))
    told = TraceRewardManager(tokenizer, compute_score=partial(custom, bonus=0.5))(data, return_dict=True)
    assert told["reward_tensor"].sum() == 0.75 and told["reward_extra_info"] == {"score": [0.75]}
    assert asked == [("nq", "<answer>Xi</answer>", {"target": ["Beijing"]}, "Xi")]


def test_verl_s_default_with_a_sandbox_is_no_function_of_yours(tokenizer):
    data = data_of(tokenizer, ("<answer>Beijing</answer>", "Beijing"))
    manager = TraceRewardManager(tokenizer, compute_score=partial(default_compute_score, sandbox_fusion_url="x"))
    assert manager(data).sum() == 1.0


def test_options_are_those_of_the_score(tokenizer):
    data = data_of(tokenizer, ("<answer>Xi</answer>", "Xi"))
    assert TraceRewardManager(tokenizer, wrong_format_bonus=0.125)(data).sum() == 0.125
    with pytest.raises(ValueError, match="did you mean 'format_weight'"):
        TraceRewardManager(tokenizer, format_wieght=0.1)(data)


def test_scores_that_are_there_already_are_handed_on(tokenizer):
    data = data_of(tokenizer, ("x", None))
    data.batch["rm_scores"] = torch.full((1, 40), 0.5)
    data.non_tensor_batch["em"] = np.array([1.0])
    data.meta_info["reward_extra_keys"] = ["em"]
    told = TraceRewardManager(tokenizer)(data, return_dict=True)
    assert told["reward_tensor"] is data.batch["rm_scores"] and told["reward_extra_info"]["em"].tolist() == [1.0]


def test_a_rollout_without_a_trace_is_named(tokenizer):
    data = data_of(tokenizer, ("x", None), search_trace=[None])
    with pytest.raises(ValueError, match="carries no search_trace"):
        TraceRewardManager(tokenizer)(data)


# ---- the trainer's batch ----


def test_a_padded_batch_is_unpacked(tokenizer):
    data = data_of(tokenizer, ("no", None), ("<answer>Xi</answer>", "Xi"), ("no", None), uid=["b", "a", "b"])
    shape = data.batch["responses"].shape
    data.batch["response_mask"], data.batch["advantages"] = torch.ones(shape), torch.rand(shape)
    data.batch["token_level_scores"] = torch.zeros(shape)
    data.batch["token_level_scores"][1, 2] = 0.5
    rollouts = read_rollouts(data)
    assert rollouts.prompt_ids == [tokenizer.encode(PROMPT)] * 3
    assert rollouts.response_ids[1] == tokenizer.encode("<answer>Xi</answer>")
    assert [len(ids) for ids in rollouts.response_ids] == [t.response_length for t in rollouts.traces]
    assert rollouts.rewards.tolist() == [0.0, 0.5, 0.0]
    groups = rollouts.group_index.tolist()
    assert groups[0] == groups[2] != groups[1] and isinstance(rollouts.traces[0], SearchTrace)


def test_a_batch_of_another_loop_is_named(tokenizer):
    data = data_of(tokenizer, ("x", None), uid=["a"])
    data.non_tensor_batch.pop("search_trace")
    with pytest.raises(ValueError, match="default_agent_loop=verl_bridge_search"):
        read_rollouts(data)


def test_answers_are_scored_where_they_stand():
    """Every row's numbers are its own: the fake log-probability of a token is minus its id and hundred its position."""
    seen = {}

    def compute_log_prob(data):
        seen.update(rows=len(data), **data.batch)
        width = data.batch["responses"].shape[-1]
        positions = data.batch["position_ids"][:, -width:]
        return SimpleNamespace(batch={"old_log_probs": -(data.batch["responses"] + 100.0 * positions)})

    workers = SimpleNamespace(world_size=2, compute_log_prob=compute_log_prob)
    sequences = [([5, 6, 7], [1, 2]), ([8], [3]), ([9, 9], [4, 4, 4])]
    scored = answer_log_probs(workers, sequences, pad_token=0)
    assert seen["rows"] == 4  # a multiple of the ranks
    assert [row.tolist() for row in scored] == [[-301, -402], [-103], [-204, -304, -404]]
    assert seen["input_ids"][:3].tolist() == [[5, 6, 7, 1, 2, 0], [0, 0, 8, 3, 0, 0], [0, 9, 9, 4, 4, 4]]
    assert seen["attention_mask"][1].tolist() == [0, 0, 1, 1, 0, 0]
    assert answer_log_probs(workers, [], pad_token=0) == []
