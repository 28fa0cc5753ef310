"""The benchmarks of credit, small: real rollouts on both sides, the same batch, figures that belong together."""

import pytest
import torch

from verl_bridge.algorithms.grounding import RolloutType, Segment
from verl_bridge.credit import batch_signals
from verl_bridge.evaluation import bench_credit
from verl_bridge.evaluation.bench_credit import measure_gca, measure_salience, synthetic_rollouts
from verl_bridge.integrations.verl.reference_advantage import grpo_advantages


@pytest.fixture
def seen(monkeypatch):
    """The arguments of each call of the residual, which is made all the same."""
    calls, real = [], bench_credit.grounded_advantages

    def spy(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append((args, kwargs, result))
        return result

    monkeypatch.setattr(bench_credit, "grounded_advantages", spy)
    return calls


def test_the_rollouts_are_of_every_kind_and_hold_together():
    batch = synthetic_rollouts(64, 200, seed=1)
    assert batch.response_mask.shape == (64, 200)
    assert batch.response_mask.sum() == sum(
        turn.span[1] - turn.span[0] for trace in batch.traces for turn in trace.turns
    )
    signals = batch_signals(batch.traces, batch.group_index)
    assert {RolloutType.A, RolloutType.B1, RolloutType.B2, RolloutType.C, RolloutType.D_RETRIEVABLE} <= set(
        signals.types.tolist()
    )
    assert torch.equal(signals.correct.float(), batch.rewards)
    assert torch.equal(batch.token_level_rewards.sum(1), batch.rewards)
    last = batch.response_mask.shape[1] - 1 - batch.response_mask.flip(1).argmax(1)
    assert torch.equal(batch.token_level_rewards.gather(1, last[:, None]).squeeze(1), batch.rewards)
    assert [batch.uids.index(uid) // 8 for uid in batch.uids] == batch.group_index.tolist()
    assert synthetic_rollouts(64, 200, seed=1).traces == batch.traces
    with pytest.raises(ValueError, match="tokens=79: the made-up rollouts need at least 80"):
        synthetic_rollouts(8, 79)


def test_gca_is_measured_against_the_hosts_estimator_on_one_batch(seen):
    hosts = []

    def host(token_level_rewards, response_mask, uids):
        hosts.append((token_level_rewards, response_mask, uids))
        return grpo_advantages(token_level_rewards, response_mask, uids)

    report = measure_gca(host, rollouts=32, tokens=100, repeats=3, seed=2)
    assert report["ratio"] == report["gca_seconds"] / report["grpo_seconds"]
    names = ("gca", "grpo", "alias_matching", "segmentation", "salience")
    assert all(0 < report[f"{name}_seconds"] < 60 for name in names)
    assert (report["rollouts"], report["tokens"], report["threads"]) == (32, 100, 1)

    assert len(seen) == 3 and len(hosts) == 4  # one more: the base advantage
    batch = synthetic_rollouts(32, 100, seed=2)
    assert report["sampled_share"] == pytest.approx(batch.response_mask.double().mean().item())
    for rewards, mask, uids in hosts:
        assert torch.equal(rewards, batch.token_level_rewards)
        assert torch.equal(mask, batch.response_mask)
        assert uids == batch.uids
    for (advantages, mask, segments, _, groups, rewards), kwargs, result in seen:
        assert kwargs == {"group_relative": True}  # uniform salience
        assert torch.equal(mask, batch.response_mask)
        assert torch.equal(advantages, grpo_advantages(batch.token_level_rewards, mask, batch.uids))
        assert torch.equal(groups, batch.group_index) and torch.equal(rewards, batch.rewards)
        assert set(segments.unique().tolist()) == set(Segment)
        assert ((segments != 0) <= (mask == 1)).all()
        assert result.metrics["gca/token_share/active"] > 0.1


def test_the_salience_that_is_timed_is_that_of_every_routed_cell(monkeypatch):
    calls, real = [], bench_credit.token_salience
    monkeypatch.setattr(bench_credit, "token_salience", lambda *args: calls.append((args, real(*args))))
    measure_gca(grpo_advantages, rollouts=32, tokens=200, repeats=1, seed=2)
    ((_, _, segments, mask, signs), salience) = calls[0]
    assert signs.unique().tolist() == [-1, 0, 1]
    assert (salience[(segments != 0) & (mask == 1)] > 0).all()
    assert salience[signs != 0].std() > 0.02


def test_salience_is_measured_on_top_of_the_pass(monkeypatch):
    order = []

    def spy(name):
        real = getattr(bench_credit, name)
        monkeypatch.setattr(bench_credit, name, lambda *args: order.append((name, args)) or real(*args))

    spy("log_prob_and_entropy")
    spy("token_statistics")
    before = torch.get_num_threads()
    report = measure_salience(tokens=8, vocabulary=20_000, repeats=2, threads=1)
    assert torch.get_num_threads() == before
    assert [name for name, _ in order] == ["log_prob_and_entropy", "log_prob_and_entropy", "token_statistics"] * 2
    assert len({(id(logits), id(labels)) for _, (logits, labels) in order}) == 1
    logits = order[0][1][0]
    assert logits.shape == (8, 20_000) and logits.dtype == torch.float32
    assert report["overhead"] == report["with_seconds"] / report["base_seconds"] - 1
    assert report["base_seconds"] > 0
    assert (report["tokens"], report["vocabulary"], report["threads"]) == (8, 20_000, 1)


def test_the_peak_sees_memory_that_was_given_back():
    extra = measure_salience(tokens=64, vocabulary=151_936, repeats=1, threads=1)["extra_bytes"]
    # gathered blocks, a copy of them to find the largest in, and their indices: well under the 256 MiB allowed,
    # and not nothing
    assert 64 * 33 * 128 * 4 < extra < 64 * 2**20


def test_the_pass_is_the_definition():
    logits, labels = torch.randn(5, 40), torch.randint(0, 40, (5,))
    log_probs, entropy = bench_credit.log_prob_and_entropy(logits, labels)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs, expected.log_prob(labels))
    torch.testing.assert_close(entropy, expected.entropy())
