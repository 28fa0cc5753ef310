import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.integrations.verl.cpu.generation import BatchGenerator, Request, request_seed, similar_lengths
from verl_bridge.integrations.verl.cpu.sampling import RowSampler, SamplingParams


@pytest.fixture
def generate(model, tokenizer):
    return BatchGenerator(model, tokenizer.pad_token_id, tokenizer.decode)


def requests(n, seed=0, **params):
    rng = random.Random(seed)
    made = []
    for i in range(n):
        prompt = tuple(rng.randrange(2, 64) for _ in range(rng.randrange(1, 12)))
        made.append(
            Request(prompt, SamplingParams(**{"max_tokens": rng.randrange(1, 15), **params}), request_seed(seed, i))
        )
    return made


@torch.no_grad()
def reference(model, request):
    """One row, no cache, no padding: the sampler over a full forward pass for each token."""
    uniforms = torch.rand(
        1, request.params.max_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(request.seed)
    )
    sampler, ids, log_probs = RowSampler([request.params], uniforms), list(request.prompt_ids), []
    for step in range(request.params.max_tokens):
        context = torch.tensor([ids])
        token, log_prob = sampler(step, context, model(context).logits[:, -1])
        ids.append(token.item())
        log_probs.append(log_prob.item())
        if ids[-1] in request.params.stop_token_ids:
            return ids[len(request.prompt_ids) :], log_probs, "stop"
    return ids[len(request.prompt_ids) :], log_probs, "length"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "stop_token_ids": tuple(range(1, 14))},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2},
    ],
)
def test_equals_a_row_by_row_reference(model, generate, params):
    batch = requests(13, **params)
    for request, got in zip(batch, generate(batch), strict=True):
        token_ids, log_probs, reason = reference(model, request)
        assert got.token_ids == token_ids
        assert got.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert got.finish_reason == reason


def test_greedy_is_argmax(model, generate):
    (request,) = requests(1, temperature=0.0, max_tokens=6)
    ids = list(request.prompt_ids)
    with torch.no_grad():
        for _ in range(6):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    assert generate([request])[0].token_ids == ids[len(request.prompt_ids) :]


def test_rows_of_one_batch_keep_their_own_parameters(model, generate):
    batch = requests(4, seed=1, temperature=0.0) + requests(4, seed=2, temperature=1.5) + requests(4, seed=3, top_k=2)
    for request, got in zip(batch, generate(batch), strict=True):
        assert got.token_ids == reference(model, request)[0]


def test_a_request_draws_the_same_alone_in_any_company_and_order(generate):
    batch = requests(9, temperature=1.0)
    together = [completion.token_ids for completion in generate(batch)]
    backwards = [completion.token_ids for completion in generate(batch[::-1])][::-1]
    alone = [generate([request])[0].token_ids for request in batch]
    assert together == backwards == alone


def test_another_seed_draws_something_else(generate):
    prompt, params = (5, 6, 7), SamplingParams(max_tokens=12)
    outputs = generate([Request(prompt, params, request_seed("x", i)) for i in range(8)])
    assert len({tuple(output.token_ids) for output in outputs}) == 8


def test_stop_token_is_the_last_one(generate):
    batch = requests(12, temperature=1.0, max_tokens=14, stop_token_ids=tuple(range(2, 6)))
    outputs = generate(batch)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output in outputs:
        assert not set(output.token_ids[:-1]) & set(range(2, 6))
        assert (output.token_ids[-1] in range(2, 6)) == (output.finish_reason == "stop")


def test_stop_string_may_span_tokens_but_not_begin_in_the_prompt(generate, tokenizer):
    free = generate(requests(1, seed=4, temperature=0.9, max_tokens=14))[0]
    text = tokenizer.decode(free.token_ids)
    stop = text[4:6]
    first = next(n for n in range(1, 15) if stop in tokenizer.decode(free.token_ids[:n]))
    assert 1 < first < 14
    (stopped,) = generate(requests(1, seed=4, temperature=0.9, max_tokens=14, stop=("@", stop)))
    assert stopped.token_ids == free.token_ids[:first]
    assert stopped.finish_reason == "stop"
    # The prompt ends with the string's first half: only the output counts.
    half, request = tokenizer.encode(stop)[0], requests(1, seed=4, temperature=0.0, max_tokens=3)[0]
    prompt = (*request.prompt_ids, half)
    (greedy,) = generate([Request(prompt, SamplingParams(max_tokens=3, temperature=0.0), 0)])
    spanning = tokenizer.decode([half, greedy.token_ids[0]])
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=(spanning,))
    if spanning not in tokenizer.decode(greedy.token_ids):
        assert generate([Request(prompt, params, 0)])[0].token_ids == greedy.token_ids


def test_abort_returns_what_there_is(generate):
    batch, asked = requests(6, temperature=1.0, max_tokens=14), []
    outputs = generate(batch, lambda: asked.append(None) or len(asked) > 3)
    whole = generate(batch)
    for output, complete in zip(outputs, whole, strict=True):
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 14
        assert output.token_ids == complete.token_ids[: len(output.token_ids)]


def test_defaults_of_the_checkpoint_do_not_leak_in(model, tokenizer):
    request = requests(1, temperature=0.0, max_tokens=10)[0]
    expected = reference(model, request)[0]
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = expected[0]
    assert BatchGenerator(model, 0, tokenizer.decode)([request])[0].token_ids == expected


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_similar_lengths_takes_the_first_and_pads_least(lengths, rows):
    chosen = similar_lengths(lengths, rows)
    assert 0 in chosen
    assert len(set(chosen)) == len(chosen) == min(rows, len(lengths))
    assert [lengths[i] for i in chosen] == sorted(lengths[i] for i in chosen)
    spread = lengths[chosen[-1]] - lengths[chosen[0]]
    ordered = sorted(lengths)
    windows = [ordered[s : s + len(chosen)] for s in range(len(ordered) - len(chosen) + 1)]
    assert spread == min(w[-1] - w[0] for w in windows if w[0] <= lengths[0] <= w[-1])
