import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.integrations.verl.cpu.sampling import RowSampler, SamplingParams, keep_likeliest

# Probabilities 1/2, 1/4, 1/8, 1/8 in an order that is not sorted.
LOGITS = torch.log(torch.tensor([[0.25, 0.125, 0.5, 0.125]]))
NOTHING_SEEN = torch.tensor([[3]])


def draw(uniform, context=NOTHING_SEEN, logits=LOGITS, **params):
    sampler = RowSampler([SamplingParams(max_tokens=1, **params)], torch.tensor([[uniform]], dtype=torch.float64))
    token, log_prob = sampler(0, context, logits)
    return token.item(), log_prob.item()


@pytest.mark.parametrize(
    ("uniform", "token", "probability"),
    [(0.0, 0, 0.25), (0.24, 0, 0.25), (0.26, 1, 0.125), (0.38, 2, 0.5), (0.99, 3, 0.125)],
)
def test_inverts_the_cumulative_distribution(uniform, token, probability):
    assert draw(uniform) == (token, pytest.approx(math.log(probability), abs=1e-6))


def test_temperature_scales_the_distribution_and_its_log_probs():
    # T = 1/2 squares the probabilities: 4/22, 1/22, 16/22, 1/22.
    assert draw(0.17, temperature=0.5) == (0, pytest.approx(math.log(4 / 22), abs=1e-6))
    assert draw(0.2, temperature=0.5) == (1, pytest.approx(math.log(1 / 22), abs=1e-6))
    assert draw(0.9, temperature=0.5) == (2, pytest.approx(math.log(16 / 22), abs=1e-6))


def test_top_k_keeps_the_likeliest_and_renormalises():
    # The two likeliest are ids 2 and 0 with 2/3 and 1/3.
    assert draw(0.32, top_k=2) == (0, pytest.approx(math.log(1 / 3), abs=1e-6))
    assert draw(0.34, top_k=2) == (2, pytest.approx(math.log(2 / 3), abs=1e-6))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {2}), (0.5, {2}), (0.6, {2, 0}), (0.8, {2, 0, 1}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    drawn = {draw(u / 100, top_p=top_p)[0] for u in range(100)}
    # Of the two ids with 1/8 one is enough for 0.8; which one does not matter.
    assert drawn == kept or (top_p == 0.8 and drawn == {2, 0, 3})


def test_greedy_takes_the_maximum_with_its_unscaled_log_prob():
    assert draw(0.1, temperature=0.0, top_k=1, top_p=0.3) == (2, pytest.approx(math.log(0.5), abs=1e-6))


def test_repetition_penalty_equals_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, context = torch.randn(1, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 2, 2]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(context, logits.clone()).log_softmax(-1)
    token, log_prob = draw(0.4, context=context, logits=logits, repetition_penalty=1.7)
    assert log_prob == pytest.approx(expected[0, token].item(), abs=1e-6)
    assert expected[0, :token].exp().sum() <= 0.4 < expected[0, : token + 1].exp().sum()


def test_frequencies_follow_the_truncated_distribution():
    n = 20000
    params = [SamplingParams(max_tokens=1, temperature=2.0, top_k=3)] * n
    uniforms = torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]]).expand(n, -1)
    token, _ = RowSampler(params, uniforms)(0, torch.zeros(n, 1, dtype=torch.long), logits)
    expected = torch.softmax(torch.tensor([1.0, 0.0, 0.5]), -1)
    observed = torch.bincount(token, minlength=4) / n
    assert observed[3] == 0
    # Four standard deviations of a frequency.
    assert torch.allclose(observed[:3], expected, atol=4 * math.sqrt(0.25 / n))


row = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 99]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)


@settings(deadline=None)
@given(st.lists(st.tuples(row, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=5), st.integers(0, 2**31))
def test_rows_are_independent_and_possible(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), 7, generator=generator)
    context = torch.randint(7, (len(rows), 4), generator=generator)
    params, uniforms = [p for p, _ in rows], torch.tensor([[u] for _, u in rows], dtype=torch.float64)
    token, log_prob = RowSampler(params, uniforms)(0, context, logits)
    assert torch.isfinite(log_prob).all()
    for i in range(len(rows)):
        alone, alone_log_prob = RowSampler(params[i : i + 1], uniforms[i : i + 1])(
            0, context[i : i + 1], logits[i : i + 1]
        )
        assert alone.item() == token[i].item()
        assert alone_log_prob.item() == pytest.approx(log_prob[i].item(), abs=1e-6)


@settings(deadline=None)
@given(st.integers(1, 9), st.floats(0.01, 1.0), st.integers(0, 2**31))
def test_keep_likeliest_against_a_loop(top_k, top_p, seed):
    scores = torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    kept = keep_likeliest(scores, torch.tensor([[top_k]]), torch.tensor([[top_p]]))
    order = scores[0].argsort(descending=True)[:top_k]
    probabilities = scores[0][order].softmax(-1)
    total, expected = 0.0, []
    for token, probability in zip(order.tolist(), probabilities.tolist(), strict=True):
        if expected and total >= top_p - 1e-6:
            break
        expected.append(token)
        total += probability
    assert set(torch.isfinite(kept[0]).nonzero().squeeze(-1).tolist()) == set(expected)
    assert torch.equal(kept[0][expected], scores[0][expected])


def test_reads_what_verl_sends():
    sent = dict(
        temperature=0.7, top_p=0.9, top_k=-1, repetition_penalty=1.0, logprobs=True, stop_token_ids=[5, 6], stop="x"
    )
    params = SamplingParams.from_dict(sent, max_tokens=20, eos_token_ids=(1,))
    assert params == SamplingParams(20, 0.7, -1, 0.9, 1.0, (5, 6, 1), ("x",), None, True)
    limits = [({"max_tokens": 7}, 7), ({"max_new_tokens": 8}, 8), ({"max_tokens": 99}, 20), ({}, 20)]
    assert [SamplingParams.from_dict(v, max_tokens=20, eos_token_ids=()).max_tokens for v, _ in limits] == [
        limit for _, limit in limits
    ]
    assert SamplingParams.from_dict({"ignore_eos": True}, max_tokens=1, eos_token_ids=(1,)).stop_token_ids == ()
    # vLLM's way of asking for the sampled token's log-prob alone.
    assert SamplingParams.from_dict({"logprobs": 0}, max_tokens=1, eos_token_ids=()).logprobs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 4}, "beam_width=4"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"stop": [""]}, "stop="),
    ],
)
def test_refuses_what_it_cannot_honour(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_dict(values, max_tokens=10, eos_token_ids=())
