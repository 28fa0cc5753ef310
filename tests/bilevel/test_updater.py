"""One update: gradients against the formulas written out, versions, guards and figures."""

import math

import pytest
import torch

from tests.bilevel.places import (
    PLACES,
    TAU,
    batch_of,
    close,
    gradients,
    mixed_batch,
    naive_gradients,
    probabilities,
    question,
    take,
    warm,
)
from verl_bridge.bilevel import learner as learner_module
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.bilevel.updater import RetrieverUpdater


@pytest.mark.parametrize(
    ("objective", "weights"), [("penalised", (1.0, 0.25)), ("rag", (0.0, 1.0)), ("rl", (1.0, 0.0))]
)
def test_gradients_equal_the_formulas_written_out(encoder, index, objective, weights):
    warm(encoder)
    batch = mixed_batch()
    expected, loss = naive_gradients(encoder, index, batch, rl_weight=weights[0], gamma=weights[1])
    for at_once in (1, 2, 64) if objective == "penalised" else (64,):  # queries held at a time change memory alone
        got, metrics = gradients(RetrieverUpdater(encoder, index, objective=objective, queries_at_once=at_once), batch)
        close(expected, got)
        assert metrics["bridge/loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["bridge/unique_queries"] == 3
        norm = math.sqrt(sum(g.square().sum().item() for g in got.values()))
        assert metrics["bridge/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("minibatch_size", [None, 4])
def test_before_the_first_update_every_ratio_is_one(encoder, index, compute_dtype, minibatch_size):
    warm(encoder)
    updater = RetrieverUpdater(encoder, index, compute_dtype=compute_dtype, minibatch_size=minibatch_size, lr=1e-30)
    metrics = updater.update(batch_of(PLACES[:6])).metrics
    assert metrics["bridge/ratio_deviation_max"] < 1e-4
    # with ratio 1 the credit is the advantage itself
    assert metrics["bridge/loss_rl"] == pytest.approx(-1.0, abs=1e-5 if compute_dtype == "float32" else 1e-4)
    assert metrics["bridge/clip_share"] == 0.0
    assert all(p.dtype == torch.float32 for p in updater.parameters.values())


def test_bfloat16_moves_the_adapter_nearly_as_float32_does(encoder, index):
    warm(encoder)
    exact, _ = gradients(RetrieverUpdater(encoder, index), mixed_batch())
    short, _ = gradients(RetrieverUpdater(encoder, index, compute_dtype="bfloat16"), mixed_batch())
    assert {g.dtype for g in short.values()} == {torch.float32}
    one, two = (torch.cat([g.flatten() for g in each.values()]) for each in (exact, short))
    assert 0 < (one - two).norm() < 0.1 * one.norm()


def test_the_parts_of_the_gradient_are_told_apart(encoder, index):
    warm(encoder)
    batch = batch_of(PLACES[:4], advantage=[0.0] * 4)
    _, metrics = gradients(RetrieverUpdater(encoder, index), batch)
    assert metrics["bridge/grad_norm_rl"] == 0.0 and metrics["bridge/grad_norm_rag"] > 1e-3
    equal = RetrieverBatch(
        batch.queries, batch.candidate_ids, [[-2.0] * 4] * 4, [1.0] * 4, [True] * 4, batch.adapter_version
    )
    _, metrics = gradients(RetrieverUpdater(encoder, index), equal)
    assert metrics["bridge/grad_norm_rag"] < 1e-5 and metrics["bridge/grad_norm_rl"] > 1e-3
    _, metrics = gradients(RetrieverUpdater(encoder, index, objective="rl"), batch_of(PLACES[:4]))
    assert metrics["bridge/loss"] == metrics["bridge/loss_rl"]
    _, metrics = gradients(RetrieverUpdater(encoder, index, objective="rag"), batch_of(PLACES[:4]))
    assert metrics["bridge/loss"] == metrics["bridge/loss_rag"]


def test_order_of_turns_duplicates_and_padding_do_not_matter(encoder, index):
    warm(encoder)
    batch = mixed_batch()
    expected, _ = gradients(RetrieverUpdater(encoder, index), batch)
    close(expected, gradients(RetrieverUpdater(encoder, index), take(batch, [2, 0, 3, 1]))[0])
    close(expected, gradients(RetrieverUpdater(encoder, index), take(batch, [0, 1, 2, 3] * 2))[0])
    # documents of a turn in another order
    flipped = RetrieverBatch(
        batch.queries,
        [row[::-1] for row in batch.candidate_ids],
        [row[::-1] for row in batch.answer_log_likelihood],
        batch.advantages,
        batch.rl_mask,
        batch.adapter_version,
    )
    close(expected, gradients(RetrieverUpdater(encoder, index), flipped)[0])


def test_one_step_moves_every_b_and_nothing_outside_the_adapter(encoder, index, loaded):
    outside = {n: v.clone() for n, v in encoder.base.model.state_dict().items() if "lora_" not in n}
    folder = [p for p in index.corpus.path.parent.rglob("*") if p.is_file()]
    files = {p: p.read_bytes() for p in folder}
    assert any(p.name == "manifest.json" for p in folder) and len(folder) >= 3
    # the start serves what the base alone gives
    texts = [question(place) for place in PLACES[:3]]
    torch.testing.assert_close(encoder.encode_queries(texts), loaded[1].encode_documents(texts), atol=1e-6, rtol=0)
    updater = RetrieverUpdater(encoder, index, lr=1e-3)
    assert all(value.norm() == 0 for name, value in encoder.adapter_state().items() if "lora_B" in name)
    result = updater.update(batch_of(PLACES[:8]))
    assert all(value.norm() > 0 for name, value in encoder.adapter_state().items() if "lora_B" in name)
    assert all(torch.equal(encoder.base.model.state_dict()[name], value) for name, value in outside.items())
    assert {p: p.read_bytes() for p in folder} == files
    assert result.version == encoder.adapter_version == 1 and result.evidence_shift is None
    assert result.metrics["bridge/adapter_drift"] > 0 and updater.counters["steps"] == 1


def test_minibatches_and_epochs_keep_the_p_old_that_served(encoder, index):
    """Step by step against the formulas: before every step the ratio is measured from the start of the update."""
    warm(encoder)
    batch = batch_of(PLACES[:3], advantage=[1.0, -1.0, 0.5])
    turns = list(zip(batch.queries, batch.candidate_ids, strict=True))
    old = [probabilities(encoder, index, *turn) for turn in turns]
    updater = RetrieverUpdater(encoder, index, lr=3e-3, minibatch_size=2, epochs=2, seed=3)
    generator = torch.Generator().manual_seed(3)
    minibatches = [rows for _ in range(2) for rows in torch.randperm(3, generator=generator).split(2)]
    seen = []

    def step():
        """Compares and then really steps."""
        rows = minibatches[len(seen)].sort().values.tolist()
        seen.append({name: p.grad.clone() for name, p in updater.parameters.items()})
        part = take(batch, rows)
        expected, _ = naive_gradients(encoder, index, part, old=[old[row] for row in rows])
        close(expected, seen[-1], tolerance=1e-4)
        for name, p in updater.parameters.items():
            p.grad = seen[-1][name]
        true_step()

    true_step, updater.learner.optimizer.step = updater.learner.optimizer.step, step
    updater.learner.max_grad_norm = math.inf
    metrics = updater.update(batch).metrics
    assert len(seen) == 4 and metrics["bridge/ratio_deviation_max"] > 0.01  # later steps are off p_old


def test_a_negative_advantage_pushes_the_credited_document_away(encoder, index):
    scores = encoder.encode_queries([question(PLACES[0])]) @ index.vectors([f"{PLACES[0]}-true"]).T
    updater = RetrieverUpdater(encoder, index, lr=1e-3, objective="rl")
    for step in range(3):
        updater.update(batch_of(PLACES[:6], version=step, advantage=-1.0))
    after = encoder.encode_queries([question(PLACES[0])]) @ index.vectors([f"{PLACES[0]}-true"]).T
    assert after < scores - 1e-3


def test_turns_of_an_older_adapter_are_refused(encoder, index):
    updater = RetrieverUpdater(encoder, index, lr=1e-3)
    assert updater.known_versions() == [0]
    updater.update(batch_of(PLACES[:4], version=0))
    assert updater.known_versions() == [1]
    for version in (0, 7):
        with pytest.raises(
            ValueError, match=rf"turn 0 was served by adapter version {version} but the updater has \[1"
        ):
            updater.update(batch_of(PLACES[:4], version=version))


def test_staleness_one_scores_with_the_adapter_that_served(encoder, index):
    updater = RetrieverUpdater(encoder, index, lr=1e-2, max_staleness=1)
    batch = batch_of(PLACES[:2], version=0)
    documents = index.vectors(batch.candidate_ids[0])

    def log_probs():
        return (encoder.encode_queries([batch.queries[0]])[0] @ documents.T / TAU).log_softmax(-1)

    served = log_probs()
    updater.update(batch)
    assert updater.known_versions() == [0, 1]
    now, state = log_probs(), encoder.adapter_state()
    mixed = RetrieverBatch(
        batch.queries, batch.candidate_ids, batch.answer_log_likelihood, batch.advantages, batch.rl_mask, [0, 1]
    )
    data = BatchTensors.of(mixed, index, torch.device("cpu"))
    old = updater._served_log_probs(data, mixed.adapter_version, [torch.arange(2)])
    torch.testing.assert_close(old[0], served, atol=1e-5, rtol=0)
    assert (old[0] - now).abs().max() > 1e-3  # the step moved it, so the two can be told apart
    # the current adapter is back in place
    assert encoder.adapter_version == 1
    assert all(torch.equal(value, state[name]) for name, value in encoder.adapter_state().items())
    metrics = updater.update(mixed).metrics
    deviation = (now - served).exp().sub(1).abs().max().item()
    assert metrics["bridge/ratio_deviation_max"] == pytest.approx(deviation, abs=1e-4)
    assert encoder.adapter_version == 2 and updater.known_versions() == [1, 2]
    with pytest.raises(ValueError, match=r"version 0 but the updater has \[1, 2\]"):
        updater.update(batch)


@pytest.mark.parametrize("kind", ["loss", "gradient", "scores"])
def test_a_step_that_is_not_finite_is_dropped_and_counted(encoder, index, monkeypatch, kind):
    updater = RetrieverUpdater(encoder, index, lr=1e-3)
    updater.update(batch_of(PLACES[:4]))
    before = updater.state().tensors()
    batch = batch_of(PLACES[:4], version=1)
    if kind == "scores":
        original = BatchTensors.scores
        monkeypatch.setattr(BatchTensors, "scores", lambda *arguments: original(*arguments) * float("nan"))
    else:
        true_loss = learner_module.bridge_loss
        factor = float("nan") if kind == "loss" else float("inf")

        def bad_loss(scores, *args, **settings):
            result = true_loss(scores, *args, **settings)
            if kind == "loss":
                return type(result)(result.loss * factor, result.rl_loss, result.rag_loss, result.metrics)
            return type(result)(result.loss, result.rl_loss, result.rag_loss * factor, result.metrics)

        monkeypatch.setattr(learner_module, "bridge_loss", bad_loss)
    result = updater.update(batch)
    assert result.version == encoder.adapter_version == 1  # nothing new to serve
    assert result.metrics["bridge/steps_dropped"] == 1 and updater.counters["steps_dropped"] == 1
    after = updater.state().tensors()
    assert before.keys() == after.keys()
    # the order of the turns was drawn, all else is as it was
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == ["rng"]
    assert all(p.grad is None for p in updater.parameters.values())
    monkeypatch.undo()
    assert updater.update(batch).version == 2


AUDIT = (
    "zero_advantage_share credit_weight_max retrieval_prob_max hit_credit_weight retrieval_entropy distinct_top1_share "
    "adapter_drift clip_share loss_rl loss_rag grad_norm grad_norm_rl grad_norm_rag steps_dropped collapsed lr"
).split()


def test_every_audit_figure_is_there_and_right(encoder, index):
    batch = batch_of(PLACES[:8], advantage=[0.0] * 6 + [1.0, -1.0])
    rows = ([False, True, False, False] for _ in range(8))
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    batch = RetrieverBatch(**{**columns, "hits": list(rows)})
    vectors = encoder.encode_queries(batch.queries)
    scores = [vector @ index.vectors(ids).T for vector, ids in zip(vectors, batch.candidate_ids, strict=True)]
    for settings in ({}, {"minibatch_size": 3, "epochs": 2, "lr": 1e-30}):
        metrics = RetrieverUpdater(encoder, index, **settings).update(batch).metrics
        encoder.adapter_version = 0
        assert not [name for name in AUDIT if f"bridge/{name}" not in metrics]
        assert metrics["bridge/zero_advantage_share"] == 0.75
        top = [ids[row.argmax()] for ids, row in zip(batch.candidate_ids, scores, strict=True)]
        assert metrics["bridge/distinct_top1_share"] == len(set(top)) / 8
        probs = [(row / TAU).softmax(-1) for row in scores]
        entropy = sum(-(p * p.log()).sum().item() for p in probs) / 8
        assert metrics["bridge/retrieval_entropy"] == pytest.approx(entropy, abs=1e-3)
        assert metrics["bridge/retrieval_prob_max"] == pytest.approx(sum(p.max().item() for p in probs) / 8, abs=1e-3)
        weight = math.exp(-0.5 / 0.5) / (math.exp(-1) + math.exp(-12) + 2 * math.exp(-14))
        assert metrics["bridge/hit_credit_weight"] == pytest.approx(weight, abs=1e-6)
        assert metrics["bridge/credit_weight_max"] == pytest.approx(weight, abs=1e-6)
        assert metrics["bridge/hit_in_candidates"] == 1.0 and metrics["bridge/update_seconds"] > 0
        assert metrics["bridge/collapsed"] == 0.0
        assert all(math.isfinite(value) for value in metrics.values())


def test_bad_batches_and_settings_are_refused(encoder, index):
    updater = RetrieverUpdater(encoder, index)
    ids = [["Borsk-true", "Borsk-false"]]
    for likelihood, advantage in (([-1.0, -math.inf], 1.0), ([-1.0, -2.0], math.nan)):
        with pytest.raises(ValueError, match="turn 0 has a log-likelihood or advantage that is not finite"):
            updater.update(RetrieverBatch(["a"], ids, [likelihood], [advantage], [True], [0]))
    with pytest.raises(KeyError, match="'nowhere'"):
        updater.update(RetrieverBatch(["a"], [["nowhere", "Borsk-true"]], [[-1.0, -2.0]], [1.0], [True], [0]))
    assert updater.update(RetrieverBatch([], [], [], [], [], [])).version == 0
    for key in ("minibatch_size", "epochs", "queries_at_once", "lr", "max_grad_norm"):
        with pytest.raises(ValueError, match=f"{key} is 0"):
            RetrieverUpdater(encoder, index, **{key: 0})
    with pytest.raises(ValueError, match="objective='both' is not one of penalised, rag, rl"):
        RetrieverUpdater(encoder, index, objective="both")
    with pytest.raises(ValueError, match="compute_dtype='int8' is not one of"):
        RetrieverUpdater(encoder, index, compute_dtype="int8")
