"""One update of either arm: its gradients against slow references, its parts and what they change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.evaluation.bridge_world import SEED, build_part
from verl_bridge.embedded.policy import POLICY_DIR
from verl_bridge.evaluation import bench_update
from verl_bridge.evaluation.bench_tokens import load_tokenizer
from verl_bridge.evaluation.bench_update import (
    UpdateSettings,
    Updating,
    backward_answers,
    backward_rollouts,
    correction_weights,
    micro_batches,
    score,
)
from verl_bridge.evaluation.bench_world import GROUP, WorldRollouts, world_rollouts
from verl_bridge.retrieval.retriever import open_retriever

SEQUENCES = [((5, 6, 7, 8), (9, 10)), ((5, 6), (11,)), ((12, 13, 14, 15, 16, 17), (18, 19, 20)), ((5,), (6, 7))]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return build_part(tmp_path_factory.mktemp("part"))


@pytest.fixture(scope="module")
def batch(part):
    return world_rollouts(*part, *load_tokenizer(POLICY_DIR), rollouts=2 * GROUP, top_k=4, seed=SEED)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def close(ours, theirs):
    scale = max(value.abs().max().item() for value in theirs.values())
    assert scale > 1e-7
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5 * scale)


def slow_log_likelihood(model, context, scored):
    """One sequence, all logits, its scored tokens one by one."""
    ids = torch.tensor([[*context, *scored]])
    log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(log_probs[len(context) - 1 + i, token] for i, token in enumerate(scored))


def test_micro_batches_by_hand():
    assert list(micro_batches([5, 3, 9, 2], 10)) == [[2], [0, 1], [3]]
    assert list(micro_batches([20], 10)) == [[0]]
    assert list(micro_batches([], 10)) == []


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60))
def test_micro_batches_hold_everything_once_and_keep_to_the_budget(lengths, budget):
    groups = list(micro_batches(lengths, budget))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget for group in groups)


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_scores_are_those_of_one_sequence_at_a_time(model, budget):
    found = score(model, SEQUENCES, budget)
    with torch.no_grad():
        expected = [slow_log_likelihood(model, *sequence).item() for sequence in SEQUENCES]
    assert found == pytest.approx(expected, abs=1e-4)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_the_answers_gradient_is_that_of_the_weighted_sum(model, budget, monkeypatch):
    weights = [0.5, 0.0, -2.0, 0.25]
    seen, real = [], bench_update.log_probs
    monkeypatch.setattr(bench_update, "log_probs", lambda m, rows, masks: seen.extend(rows) or real(m, rows, masks))
    backward_answers(model, SEQUENCES, weights, budget)
    ours = gradients(model)
    sum(w * slow_log_likelihood(model, *sequence) for w, sequence in zip(weights, SEQUENCES, strict=True)).backward()
    close(ours, gradients(model))
    assert sorted(seen) == sorted([*a, *b] for (a, b), w in zip(SEQUENCES, weights, strict=True) if w)


@pytest.mark.parametrize("budget", [1, 1000])
def test_the_rollouts_gradient_is_that_of_reinforce_over_sampled_tokens(model, budget):
    rollouts = WorldRollouts(
        prompt_ids=((5, 6), (7,)),
        response_ids=((8, 9, 10, 11), (12, 13)),
        response_mask=((1, 0, 0, 1), (1, 1)),
        advantages=(1.5, -0.5),
        golds=("g", "g"),
        searches=(),
    )
    backward_rollouts(model, rollouts, budget)
    ours = gradients(model)
    sampled = [((5, 6), (8,), 1.5), ((5, 6, 8, 9, 10), (11,), 1.5), ((7,), (12, 13), -0.5)]
    (-sum(a * slow_log_likelihood(model, c, s) for c, s, a in sampled) / 4).backward()
    close(ours, gradients(model))


def test_the_corrections_weights_are_the_slope_of_the_two_lower_losses():
    generator = torch.Generator().manual_seed(0)
    likelihood = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    high, low = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).log_softmax(-1)

    def lower(log_probs):
        return -(log_probs + likelihood).logsumexp(-1).mean()

    (slope,) = torch.autograd.grad(0.25 * (lower(high) - lower(low)), likelihood)
    shift = ((high + likelihood).softmax(-1) - (low + likelihood).softmax(-1)).detach()
    torch.testing.assert_close(torch.tensor(correction_weights(shift.tolist(), 0.25), dtype=torch.float64), slope)


def test_the_rollouts_are_what_the_retriever_found(part, batch):
    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR)
    retriever = open_retriever(corpus=part[0], index=part[1], top_k=4)
    assert len(batch.prompt_ids) == 2 * GROUP and len(set(batch.prompt_ids)) == 2
    for search in batch.searches:
        ids = batch.response_ids[search.row]
        assert tokenizer.decode(ids[: search.end]).endswith(f"<search> {search.query} </search>")
        (hit,) = retriever.search([search.query])
        assert search.candidates == hit.documents
        shown = tokenizer.decode(ids[search.end :]).partition("</information>")[0]
        assert all(d.text in shown for d in search.candidates[:3]) and search.candidates[3].text not in shown
    for row, (ids, mask) in enumerate(zip(batch.response_ids, batch.response_mask, strict=True)):
        assert len(ids) == len(mask)
        sampled = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
        read = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m])
        count = sum(search.row == row for search in batch.searches)
        assert sampled.count("<search>") == count and "information" not in sampled
        assert read.count("<information>") == count and "<think>" not in read
        right = sampled.endswith(f"<answer> {batch.golds[row]} </answer>")
        group = batch.advantages[row - row % GROUP :][:GROUP]
        assert sum(group) == pytest.approx(0, abs=1e-5)
        if any(group):
            assert (batch.advantages[row] > 0) == right
    assert any(batch.advantages)
    with pytest.raises(ValueError, match="--rollouts 12: give a multiple of 8"):
        world_rollouts(*part, *load_tokenizer(POLICY_DIR), rollouts=12, top_k=4, seed=SEED)


@pytest.fixture
def caught(monkeypatch):
    """The policy's gradient of each update as its optimiser gets it, which takes no step."""
    found = []

    def step(optimizer):
        found.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    monkeypatch.setattr(bench_update.Updating, "_step", lambda self: step(self.optimizer))
    return found


@pytest.mark.parametrize("context", ["question", "prefix"])
def test_two_state_adds_the_correction_and_nothing_else(part, batch, caught, context):
    settings = UpdateSettings(*part, str(POLICY_DIR), context, micro_batch_tokens=2048)
    plain = Updating("bridge", settings, batch)
    before = plain.encoder.adapter_state()
    cost = plain.run()
    assert list(cost.seconds) == list(cost.cpu_seconds) == list(cost.peak_bytes)
    assert list(cost.seconds) == ["plan", "likelihood", "retriever", "policy"]
    assert plain.encoder.adapter_version == 1
    assert any((before[name] != p).any() for name, p in plain.encoder.lora_parameters().items())
    lengths = [len(sequence[0]) for sequence in plain.plan.sequences]
    assert len(plain.plan.turn_keys) == len(batch.searches)
    assert (max(lengths) > 120) == (context == "prefix")

    both = Updating("two_state", settings, batch)
    results, real = [], both.updater.update
    both.updater.update = lambda update: results.append((update, real(update))) or results[-1][1]
    cost = both.run()
    assert list(cost.seconds) == ["plan", "likelihood", "retriever", "correction", "policy"]
    assert both.plan.sequences == plain.plan.sequences

    # the correction turn by turn and document by document
    (update, result) = results[0]
    assert max(abs(value) for row in result.evidence_shift for value in row) > 1e-6
    policy, turns = both.policy, len(result.evidence_shift)
    slopes = {}
    for row, shifts in zip(both.plan.index, result.evidence_shift, strict=True):
        for (sequence,), shift in zip(row, shifts, strict=True):
            slopes[sequence] = slopes.get(sequence, 0.0) - 0.25 * shift / turns
    policy.zero_grad()
    sum(w * slow_log_likelihood(policy, *both.plan.sequences[i]) for i, w in slopes.items()).backward()
    expected = [p.grad for p in policy.parameters()]
    difference = [two - one for one, two in zip(caught[0], caught[1], strict=True)]
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected))
    wrong = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(difference, expected, strict=True)))
    assert norm > 1e-5 and wrong < 0.01 * norm
    assert update.advantages == [batch.advantages[search.row] for search in batch.searches]


def test_an_update_changes_the_policy(part, batch):
    updating = Updating("two_state", UpdateSettings(*part, str(POLICY_DIR)), batch)
    before = [p.detach().clone() for p in updating.policy.parameters()]
    updating.run(exact_memory=True)
    updating.run()  # of the version that the first one made
    assert updating.encoder.adapter_version == 2
    assert any(not torch.equal(one, two) for one, two in zip(before, updating.policy.parameters(), strict=True))
