"""A small world for the updaters: two passages a place, of which the frozen retriever prefers the wrong one."""

import json
import math

import torch

from verl_bridge.bilevel.batch import RetrieverBatch

TAU = 0.4
PLACES = (
    "Avelin Borsk Caldra Dunmoor Elsberg Farsund Gorvia Hollin Istria Jarnow Kelmar Lorvik Mirova Norden Oskra Pelland "
    "Quarn Rastov Selvia Tarnow Ulmark Velden Wostok Yarrow"
).split()


def corpus_lines():
    lines = []
    for place in PLACES:
        lines.append((f"{place}-true", f"Legal tender of {place}", f"All prices in {place} are quoted in crowns."))
        lines.append((f"{place}-false", f"Money in {place}", f"A pop song about what money people use in {place}."))
    return "".join(json.dumps({"id": i, "title": title, "text": text}) + "\n" for i, title, text in lines)


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


def mixed_batch():
    """Ragged candidates, repeated queries, both signs of advantage, one turn outside the RL credit."""
    base = batch_of([PLACES[0], PLACES[1], PLACES[0], PLACES[2]], advantage=[1.0, -0.5, -0.5, 2.0])
    ids = [base.candidate_ids[0], base.candidate_ids[1][:2], base.candidate_ids[2][:3], base.candidate_ids[3]]
    likelihood = [row[: len(d)] for row, d in zip(base.answer_log_likelihood, ids, strict=True)]
    return RetrieverBatch(base.queries, ids, likelihood, base.advantages, [True, True, False, True], [0] * 4)


def take(batch, rows):
    """Some turns of a batch, in that order."""
    names = ("queries", "candidate_ids", "answer_log_likelihood", "advantages", "rl_mask", "adapter_version")
    return RetrieverBatch(*([getattr(batch, name)[row] for row in rows] for name in names))


def differing(one, two, tolerance=0.0):
    """Of two saved states: names of tensors that are not the same, and numbers that differ."""
    first, second = one.tensors(), two.tensors()
    assert first.keys() == second.keys()
    names = [n for n, v in first.items() if (v.double() - second[n].double()).abs().max() > tolerance]
    return names + [key for key in one.numbers | two.numbers if one.numbers.get(key) != two.numbers.get(key)]


def warm(encoder, scale=0.03):
    """An adapter off its start, so that A has gradients as well."""
    generator = torch.Generator().manual_seed(2)
    state = encoder.adapter_state()
    encoder.set_adapter_state({n: v + scale * torch.randn(v.shape, generator=generator) for n, v in state.items()}, 0)


def gradients(updater, batch):
    """Gradients of one full-batch step, which is not taken, and the update's metrics."""
    caught = {}

    def catch():
        caught.update({name: p.grad.clone() for name, p in updater.parameters.items()})

    updater.learner.optimizer.step = catch
    updater.learner.max_grad_norm = math.inf
    version = updater.encoder.adapter_version
    result = updater.update(batch)
    updater.encoder.adapter_version = version
    return caught, result.metrics


def close(one, two, tolerance=1e-5):
    assert one.keys() == two.keys()
    scale = max(value.abs().max().item() for value in one.values())
    assert scale > 1e-6
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=tolerance * scale, rtol=0)


def probabilities(encoder, index, query, ids):
    """p(d|q) of one turn, from the formula."""
    scores = [sum(encoder.encode_queries([query])[0] * index.vectors([d])[0]).item() / TAU for d in ids]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def naive_loss(encoder, index, batch, old=None, gamma=0.25, rl_weight=1.0, tau_p=0.5, clip=0.2):
    """The formulas of algorithms/README.md turn by turn and document by document; p_old None is p itself, detached."""
    rl, rag = [], []
    for t, query in enumerate(batch.queries):
        embedding = encoder.encode_queries([query], training=True)[0]
        scores = [sum(embedding * index.vectors([d])[0]) for d in batch.candidate_ids[t]]
        exps = [torch.exp(s / TAU) for s in scores]
        probs = [e / sum(exps) for e in exps]
        weights = [math.exp(v / tau_p) for v in batch.answer_log_likelihood[t]]
        weights = [w / sum(weights) for w in weights]
        advantage, credit = batch.advantages[t], 0.0
        for d, (w, p) in enumerate(zip(weights, probs, strict=True)):
            ratio = p / (p.detach() if old is None else old[t][d])
            bound = min(max(ratio.item(), 1 - clip), 1 + clip) * advantage
            credit = credit + w * (ratio * advantage if (ratio * advantage).item() <= bound else bound)
        if batch.rl_mask[t]:
            rl.append(credit)
        rag.append(torch.log(sum(p * math.exp(v) for p, v in zip(probs, batch.answer_log_likelihood[t], strict=True))))
    loss = -rl_weight * sum(rl) / max(len(rl), 1) - gamma * sum(rag) / len(rag)
    return loss / (rl_weight + gamma)


def naive_gradients(encoder, index, batch, **settings):
    parameters = encoder.lora_parameters()
    for p in parameters.values():
        p.grad = None
    loss = naive_loss(encoder, index, batch, **settings)
    loss.backward()
    out = {n: p.grad.clone() for n, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    return out, loss.item()
