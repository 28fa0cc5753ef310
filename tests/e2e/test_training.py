"""Whole runs of verl's own trainer on CPU, as a user starts them, with a trainer that looks at itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl_bridge.algorithms.grounding import RolloutType, Segment
from verl_bridge.algorithms.salience import token_statistics
from verl_bridge.embedded import demo
from verl_bridge.embedded.assets import embedded_assets

SHARED = Path(__file__).parents[3] / "shared" / "data" / "2wiki"


@pytest.fixture(scope="module")
def both(start):
    return start("both", "bridge_gca", 2, "trainer.save_freq=1")


def test_verls_advantages_are_what_gca_builds_on_and_the_actor_receives_the_result(both):
    for record in both.steps.values():
        assert record["rows"] == 16 and record["actor_receives_it"]
        assert record["reference_differs"] < 1e-6
    assert max(record["grounding_moves"] for record in both.steps.values()) > 0.01


def test_the_retriever_is_updated_first_and_serves_the_next_rollouts(both):
    assert [both.steps[step]["versions"] for step in (1, 2)] == [[0], [1]]
    assert [both.steps[step]["now_version"] for step in (1, 2)] == [1, 2]
    assert all(value.norm() > 0 for name, value in both.adapter().items() if "lora_B" in name)


def test_traces_fit_the_tokens_and_hold_more_candidates_than_shown(both):
    assert all(record["spans_fit"] for record in both.steps.values())
    made = [turn for step in (1, 2) for trace in both.traces(step) for turn in trace.searches]
    searches = [turn for turn in made if turn.status == "ok"]
    assert searches and all(turn.shown == 3 and len(turn.candidate_ids) == 10 for turn in searches)
    assert all(sorted(turn.candidate_scores, reverse=True) == list(turn.candidate_scores) for turn in searches)
    assert all(len(trace.turns) <= 5 for step in (1, 2) for trace in both.traces(step))


def test_answer_likelihoods_agree_with_a_direct_pass(both):
    """The scoring pass uses the actor before its update: at step 1 that is the shipped policy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_assets().policy, dtype=torch.float32)
    record = both.steps[1]
    for answer, scored in zip(([5, 6, 7], [8]), record["likelihood"], strict=True):
        ids = torch.tensor([record["prompt_ids"] + answer])
        with torch.no_grad():
            log_probs = model(ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        assert scored == pytest.approx(log_probs.gather(-1, torch.tensor(answer)[:, None]).sum().item(), abs=1e-4)


def test_salience_columns_agree_with_a_direct_pass(both):
    """What came through TransferQueue for one rollout at step 1, against the shipped policy's own logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_assets().policy, dtype=torch.float32)
    record = both.steps[1]
    prompt, response = record["prompt_ids"], torch.tensor(record["response_ids"])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1]
    direct = token_statistics(logits, response)
    sampled = torch.tensor(record["response_mask"])[: len(response)].bool()
    for name, values in (("salience_margin", direct.margin), ("salience_entropy", direct.entropy)):
        column = torch.tensor(record["columns"][name])[: len(response)]
        torch.testing.assert_close(column[sampled], values[sampled], rtol=0, atol=1e-3)
        # not so if a column were shifted by one
        assert (column[sampled][1:] - values[sampled][:-1]).abs().max() > 0.1
    assert sampled.sum() > 8


def test_gca_takes_little_of_a_step(both):
    spent, step = (sum(both.metrics[i][f"timing_s/{name}"] for i in (1, 2)) for name in ("gca", "step"))
    assert 0 < spent <= 0.05 * step


def test_rollout_and_actor_agree_on_log_probs(both):
    for data in (both.metrics[1], both.metrics[2]):
        assert data["training/rollout_probs_diff_max"] < 1e-4


def test_metrics_of_every_part_are_logged(both):
    data = both.metrics[2]
    for key in (
        *(f"grounding/type_share/{code.name}" for code in RolloutType),
        "grounding/tool_hit",
        "grounding/supcor",
        "grounding/grounded_share",
        "grounding/hitacc",
        "grounding/hit_but_wrong",
        "grounding/groups_zero_variance_all_right",
        "grounding/groups_zero_variance_all_wrong",
        "grounding/groups_singleton",
        "grounding/delta",
        "grounding/identity_advantage",
        "grounding/identity_covariance",
        "gca/conflict_cell_share",
        "gca/residual_mean",
        "gca/residual_at_bound_share",
        "gca/groups_only_negative",
        *(f"gca/token_share/{code.name}" for code in Segment),
        *(f"gca/entropy/{code.name}" for code in Segment),
        "search/toolless_share",
        "search/failed_share",
        "bridge/loss",
        "bridge/adapter_drift",
        "bridge/plan/sequences_saved",
        "timing_s/likelihood",
        "timing_s/retriever_update",
        "timing_s/gca",
        "actor/entropy",
    ):
        assert key in data, key
    assert data["search/failed_share"] == 0
    assert sum(data[f"grounding/type_share/{code.name}"] for code in RolloutType) == pytest.approx(1)
    assert sum(data[f"gca/token_share/{code.name}"] for code in Segment) == pytest.approx(1)
    for step in (1, 2):  # verl's own advantages, and the covariance of hits with rewards
        advantage, covariance = (
            both.metrics[step][f"grounding/identity_{side}"] for side in ("advantage", "covariance")
        )
        assert advantage == pytest.approx(covariance, abs=1e-4)


def test_resuming_equals_the_uninterrupted_run(start, both):
    checkpoint = both.folder / "checkpoints" / "global_step_1"
    assert (checkpoint / "retriever" / "adapter" / "adapter_model.safetensors").is_file()
    resumed = start(
        "resumed",
        "bridge_gca",
        2,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
    )
    assert list(resumed.steps) == [2] and resumed.steps[2]["versions"] == [1]
    assert {t.question for t in resumed.traces(2)} == {t.question for t in both.traces(2)}
    for name, value in both.adapter().items():
        torch.testing.assert_close(resumed.adapter()[name], value, rtol=0, atol=1e-5)
    (there, told), (here, counted) = (
        (load_file(folder / "updater.safetensors"), json.loads((folder / "updater.json").read_text()))
        for folder in (run.folder / "checkpoints" / "global_step_2" / "retriever" for run in (resumed, both))
    )
    # where the adapter began, RNG and counters to the bit, moments (of gradients around 1e-7) to rounding
    assert told == counted and there.keys() == here.keys()
    assert sum("exp_avg" in name for name in here) == 2 * len(both.adapter())
    for name, value in here.items():
        rounding = 1e-4 * float(value.abs().max()) if "exp_avg" in name else 0.0
        torch.testing.assert_close(there[name], value, rtol=0, atol=rounding, msg=name)


def test_baseline_is_plain_verl_bit_for_bit(start):
    run = start("baseline", "baseline", 1)
    assert run.steps[1]["plain_largest"] > 0  # not all groups are of one reward
    assert run.steps[1]["plain_differs"] == 0 and run.steps[1]["actor_receives_it"]
    assert run.steps[1]["versions"] == [0] and run.steps[1]["now_version"] is None  # nothing learns
    assert not (run.folder / "adapter").exists()
    assert not any(key.startswith(("gca/", "bridge/")) for key in run.metrics[1])


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("grpo_vectorized", "vanilla"),
        ("rloo", "vanilla"),
        ("reinforce_plus_plus", "vanilla"),
        ("reinforce_plus_plus_baseline", "vanilla"),
        ("grpo", "gspo"),
    ],
)
def test_other_base_estimators_and_gspo(start, estimator, loss):
    """One step each: the residual sits on that estimator's own advantages, and the actor trains on the result."""
    run = start(
        f"{estimator}-{loss}",
        "gca",
        1,
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",
    )
    record = run.steps[1]
    assert record["rows"] == 16 and record["actor_receives_it"]
    assert record["grounding_moves"] > 0.01 and record["reference_differs"] < 1e-6
    assert 0 < run.metrics[1]["gca/residual_mean"] and run.metrics[1]["gca/residual_max"] <= 0.1
    assert run.metrics[1]["actor/grad_norm"] > 0


def test_ppo_with_a_critic_and_two_serving_replicas(start):
    policy = f"critic.model.path={embedded_assets().policy}"
    served, context = "verl_bridge.retriever.replicas=2", "verl_bridge.bridge.likelihood_context=prefix"
    run = start("critic", "bridge_gca", 1, "algorithm.adv_estimator=gae", "critic.enable=true", policy, served, context)
    assert run.metrics[1]["bridge/plan/turns_used"] > 0 and run.metrics[1]["bridge/plan/turns_without_room"] == 0
    assert run.metrics[1]["bridge/publish_seconds"] > 0
    record = run.steps[1]
    assert run.metrics[1]["critic/vf_loss"] > 0 and record["now_version"] == 1 and record["actor_receives_it"]
    # advantages of both signs in one rollout, and the residual follows each token's own
    assert record["signs_in_one_rollout"] > 0 and record["grounding_moves"] > 0.01
    assert record["reference_differs"] < 1e-6


@pytest.mark.skipif(not SHARED.is_dir(), reason="the Wikipedia passages of ../shared/data/2wiki are not here")
def test_a_corpus_of_ones_own(tmp_path):
    sizes = replace(demo.CUSTOM_SIZES, questions=2, rollouts=4, validation=8)
    summary = demo.run(
        steps=2,
        out=tmp_path / "out",
        corpus=SHARED / "corpus.jsonl.gz",
        questions=SHARED / "questions.jsonl.gz",
        sizes=sizes,
    )
    saved = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert saved == summary and saved["steps"] == 2 and 0 < saved["recall_start"] < 1
    for name in ("metrics.jsonl", "rollouts/step_000002.jsonl", "adapter/adapter_model.safetensors", "train.log"):
        assert (tmp_path / "out" / name).is_file(), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
