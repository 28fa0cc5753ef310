"""Token salience: the statistics of logits by hand and at scale, the cells by hand and against a slow reference."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.residual import with_residual
from tests.e2e.reference import cell_salience
from verl_bridge.algorithms.gca import grounded_advantages
from verl_bridge.algorithms.grounding import RolloutType, Segment
from verl_bridge.algorithms.salience import TokenStatistics, token_salience, token_statistics

N, V, R, S = Segment
C_MAX = 0.5


def slow_statistics(logits, label, k, m):
    """Margin and entropy of one token from the definition, in Python's floats."""
    peak = max(logits)
    normaliser = peak + math.log(sum(math.exp(x - peak) for x in logits))
    log_probs = [x - normaliser for x in logits]
    others = sorted((p for token, p in enumerate(log_probs) if token != label), reverse=True)
    margin = log_probs[label] - sum(others[:k]) / k
    top = [math.exp(p) for p in sorted(log_probs, reverse=True)[:m]]
    entropy = -sum(p / sum(top) * math.log(p / sum(top)) for p in top if p > 0)
    return margin, entropy / math.log(len(top))


def random_logits(tokens, vocabulary, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocabulary, generator=generator) * spread
    return logits, torch.randint(0, vocabulary, (tokens,), generator=generator)


def test_statistics_of_four_words_by_hand():
    # probabilities 1/2, 1/4, 1/8, 1/8; K = 2, M = 2
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(4, 1) + torch.tensor([[0.0], [7.0], [0.0], [-3.0]])
    result = token_statistics(logits, torch.arange(4), margin_k=2, entropy_m=2)
    log2 = math.log(2)
    # others of word 0: 1/4, 1/8: -1 - (-2-3)/2 in bits; of word 1: 1/2, 1/8; of words 2 and 3: 1/2, 1/4
    assert result.margin.tolist() == pytest.approx([1.5 * log2, 0.0, -1.5 * log2, -1.5 * log2], abs=1e-6)
    # the two likeliest, renormalised: 2/3, 1/3
    two_thirds = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)) / log2
    assert result.entropy.tolist() == pytest.approx([two_thirds] * 4, abs=1e-6)


def test_the_whole_vocabulary_gives_the_full_entropy():
    # 1/2·1 + 1/4·2 + 2·1/8·3 bits of at most 2; an M beyond the vocabulary is the vocabulary
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for m in (4, 32):
        entropy = token_statistics(logits, torch.tensor([0]), margin_k=2, entropy_m=m).entropy
        assert entropy.item() == pytest.approx(1.75 / 2)
    logits, labels = random_logits(20, 300)
    full = torch.distributions.Categorical(logits=logits).entropy()
    result = token_statistics(logits, labels, entropy_m=300)
    torch.testing.assert_close(result.entropy * math.log(300), full, rtol=0, atol=7e-6)
    torch.testing.assert_close(result.margin, token_statistics(logits, labels).margin)


def test_ties_leave_out_one_word_only():
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0, 0.0], [2.0, 1.0, 1.0, 1.0, 1.0]])
    result = token_statistics(logits, torch.tensor([1, 4]), margin_k=3, entropy_m=4)
    assert result.margin.tolist() == pytest.approx([0.0, 1.0 - (2.0 + 1.0 + 1.0) / 3])
    assert result.entropy[0].item() == pytest.approx(1.0)  # of four equal words
    uniform = token_statistics(torch.zeros(1, 500), torch.tensor([123]))
    assert uniform.margin.item() == 0.0
    assert uniform.entropy.item() == pytest.approx(1.0)
    for m in range(2, 40):  # not above 1 by rounding either
        assert token_statistics(torch.zeros(1, 500), torch.tensor([1]), entropy_m=m).entropy <= 1.0


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.integers(0, 2**31), st.integers(1, 8), st.integers(2, 50), st.integers(1, 4))
def test_statistics_equal_the_slow_reference(vocabulary, seed, k, m, chunk):
    logits, labels = random_logits(6, vocabulary, seed)
    logits = (logits * 2).round() / 2  # with ties
    k = min(k, vocabulary - 1)
    result = token_statistics(logits, labels, margin_k=k, entropy_m=m, chunk_tokens=chunk)
    for row, label in enumerate(labels.tolist()):
        margin, entropy = slow_statistics(logits[row].tolist(), label, k, m)
        assert result.margin[row].item() == pytest.approx(margin, abs=5e-6)
        assert result.entropy[row].item() == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("vocabulary", [128 * 70, 128 * 70 + 1, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_blocks_of_a_large_vocabulary_find_what_a_full_sort_finds(vocabulary, dtype):
    logits, labels = random_logits(40, vocabulary, seed=3)
    logits = logits.to(dtype)
    top = logits.float().topk(33).values
    logits[0, -40:] = 20.0  # the largest at the end, which fills no block
    logits[1, :33] = 20.0  # all in one block
    logits[2, 5::200] = 20.0  # one a block, in more blocks than are needed
    labels[3] = logits[3].argmax()
    labels[4] = logits[4].argmin()
    top[:3] = 20.0
    result = token_statistics(logits, labels, chunk_tokens=7)
    ordered = logits.float().sort(descending=True).values[:, :32].log_softmax(-1)
    torch.testing.assert_close(result.entropy, -(ordered.exp() * ordered).sum(-1) / math.log(32), rtol=0, atol=1e-6)
    sampled = logits.float().gather(1, labels[:, None]).squeeze(1)
    rest = logits.float().scatter(1, labels[:, None], -torch.inf)
    torch.testing.assert_close(result.margin, sampled - rest.topk(3).values.mean(1), rtol=0, atol=1e-5)
    assert result.margin.dtype == result.entropy.dtype == torch.float32
    assert (result.margin[3] > 0) and (result.margin[4] < -10)


@pytest.mark.parametrize("vocabulary", [6, 9000])
def test_words_masked_out_leave_everything_finite(vocabulary):
    logits = torch.full((4, vocabulary), -torch.inf)
    logits[0, :2] = 0.0  # fewer words than K + 1
    logits[1, 5] = 3.0  # one word alone, and sampled
    logits[2, :5] = 0.0  # the sampled word is masked out
    logits[3] = 1.0
    result = token_statistics(logits, torch.tensor([0, 5, 5, 1]), entropy_m=4)
    # a masked word counts as 87 nats below the likeliest
    assert result.margin.tolist() == pytest.approx([(0 + 87 + 87) / 3, 87.0, -87.0, 0.0])
    assert result.entropy.tolist() == pytest.approx([0.5, 0.0, 1.0, 1.0])
    full = token_statistics(logits, torch.tensor([0, 5, 5, 1]), entropy_m=vocabulary).entropy
    words = [2, 1, 5, vocabulary]
    assert full.tolist() == pytest.approx([math.log(n) / math.log(vocabulary) for n in words])


@pytest.mark.parametrize("vocabulary", [6, 9000])
@pytest.mark.parametrize("position", [0, 5, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_breaks_no_other(vocabulary, position, bad):
    logits, labels = random_logits(5, vocabulary)
    clean = token_statistics(logits, labels)
    logits[2, position] = bad
    result = token_statistics(logits, labels)
    kept = torch.tensor([0, 1, 3, 4])
    for name in ("margin", "entropy"):
        assert getattr(result, name)[2].isnan()
        assert torch.equal(getattr(result, name)[kept], getattr(clean, name)[kept])


def test_no_tokens_and_no_gradient():
    empty = token_statistics(torch.zeros(0, 50), torch.zeros(0, dtype=torch.int64))
    assert empty.margin.shape == empty.entropy.shape == (0,)
    logits = torch.randn(3, 50, requires_grad=True)
    assert not token_statistics(logits, torch.tensor([0, 1, 2])).margin.requires_grad


@pytest.mark.parametrize(
    ("shape", "kwargs", "message"),
    [
        ((2, 3), {}, "gca.margin_k=3 must be at least 1 and less than the vocabulary's 3 tokens"),
        ((2, 9), {"margin_k": 0}, "gca.margin_k=0"),
        ((2, 9), {"entropy_m": 1}, "gca.entropy_m=1 must be at least 2"),
        ((2, 9), {"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
        ((3, 9), {}, r"logits \(3, 9\) and labels \(2,\) are not"),
        ((1, 2, 9), {}, r"logits \(1, 2, 9\) and labels"),
    ],
)
def test_statistics_refuse(shape, kwargs, message):
    with pytest.raises(ValueError, match=message):
        token_statistics(torch.zeros(shape), torch.zeros(2, dtype=torch.int64), **kwargs)


def salience(margin, entropy, segments, sign, mask=None, **kwargs):
    margin = torch.as_tensor(margin, dtype=torch.float32)
    return token_salience(
        margin,
        torch.as_tensor(entropy, dtype=torch.float32),
        torch.as_tensor(segments, dtype=torch.int8),
        torch.ones_like(margin) if mask is None else torch.as_tensor(mask),
        torch.as_tensor(sign),
        **kwargs,
    )


def test_a_cell_by_hand():
    # median 2.5, deviations 1.5 .5 .5 1.5, MAD 1, z = ±1.5/1.4826 and ±.5/1.4826
    z = [-1.5 / 1.4826, -0.5 / 1.4826, 0.5 / 1.4826, 1.5 / 1.4826]
    u = [1 / (1 + math.exp(x)) for x in z]
    assert u[0] == pytest.approx(0.73336, abs=1e-5)
    entropy = [0.0, 1.0, 0.5, 0.25]
    for sign, raw in (
        (1, [0.6 * a + 0.3 * h + 0.1 * a * h for a, h in zip(u, entropy, strict=True)]),
        (-1, [0.6 * (1 - a) + 0.3 * (1 - h) + 0.1 * (1 - a) * (1 - h) for a, h in zip(u, entropy, strict=True)]),
    ):
        a = 4 * 0.25 / sum(raw)
        assert a * max(raw) < 0.5  # nothing is capped here
        result = salience([[1.0, 2.0, 3.0, 4.0]], [entropy], [[V] * 4], [[sign] * 4])
        assert result[0].tolist() == pytest.approx([a * value for value in raw], abs=1e-7)


def test_a_capped_cell_by_hand():
    # median 0, MAD 1, z clipped to -3 for the first and within ±.675 for the rest; all entropies 0
    margin = [-100.0, -1.0, -1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert statistics.median(margin) == 0.0
    u = [1 / (1 + math.exp(max(-3.0, x / 1.4826))) for x in margin]
    raw = [0.6 * a for a in u]
    assert 9 * 0.25 / sum(raw) * raw[0] < 0.5  # u = .953 against .5: not yet
    entropy = [1.0] + [0.0] * 8
    raw[0] = 0.6 * u[0] + 0.3 + 0.1 * u[0]
    assert 9 * 0.25 / sum(raw) * raw[0] > 0.5
    a = (9 * 0.25 - 0.5) / sum(raw[1:])
    result = salience([margin], [entropy], [[R] * 9], [[1.0] * 9])
    assert result[0].tolist() == pytest.approx([0.5] + [a * value for value in raw[1:]], abs=1e-7)


def test_small_and_even_cells_are_uniform_and_the_rest_has_none():
    margin = [[1.0, 2.0, 9.0, 5.0, 5.0, 5.0, 5.0, 8.0, 0.0, 1.0]]
    entropy = torch.rand(1, 10)
    result = salience(margin, entropy, [[V] * 3 + [R] * 5 + [N, S]], [[1] * 3 + [-1] * 5 + [1, 1]], c_max=0.3)
    expected = torch.full((1, 10), 0.15)  # three tokens; MAD 0; one token
    expected[0, 8] = 0.0
    assert torch.equal(result, expected)
    unrouted = salience([[1.0, 2.0, 3.0, 4.0, 5.0, 7.0]], torch.rand(1, 6), [[S] * 6], [[0.0] * 6], [[1] * 5 + [0]])
    assert unrouted.tolist() == [[0.25] * 5 + [0.0]]


def test_garbage_outside_the_cells_is_harmless():
    margin, entropy = torch.randn(2, 12), torch.rand(2, 12)
    segments = torch.tensor([[V] * 6 + [N] * 6, [R] * 8 + [S] * 4])
    sign = torch.tensor([[1] * 12, [-1] * 8 + [0] * 4])
    mask = torch.ones(2, 12)
    mask[0, 2] = 0
    clean = salience(margin, entropy, segments, sign, mask)
    for row, token in ((0, 2), (0, 9), (1, 10)):  # not sampled, gated, without a route
        margin[row, token], entropy[row, token] = math.nan, math.inf
    assert torch.equal(salience(margin, entropy, segments, sign, mask), clean)
    assert clean[0, 2] == clean[0, 9] == 0.0
    margin[1, 3] = math.nan
    with pytest.raises(ValueError, match="not finite on a sampled token of rollout 1"):
        salience(margin, entropy, segments, sign, mask)


@pytest.mark.parametrize("c_max", [0.0, -1.0, math.nan, math.inf])
def test_the_cap_must_be_positive(c_max):
    with pytest.raises(ValueError, match=r"gca\.c_max="):
        salience([[1.0]], [[1.0]], [[V]], [[1]], c_max=c_max)


@st.composite
def batches(draw):
    rows, length = draw(st.integers(0, 5)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    margin = torch.randn(rows, length, generator=generator) * 10 ** draw(st.integers(-3, 2))
    if draw(st.booleans()):
        margin = margin.round()  # ties, and cells without spread
    lam = torch.randint(-1, 2, (rows, 4), generator=generator)
    segments = torch.randint(0, draw(st.integers(2, 4)), (rows, length), generator=generator)
    return dict(
        margin=margin,
        entropy=torch.rand(rows, length, generator=generator) ** draw(st.integers(1, 6)),
        segments=segments,
        sign=lam.gather(1, segments),
        mask=torch.rand(rows, length, generator=generator) < 0.8,
    )


def slow_salience(batch):
    """From the definition, one cell at a time."""
    result = torch.zeros(batch["margin"].shape, dtype=torch.float64)
    for row in range(len(result)):
        for code in (V, R, S):
            tokens = [t for t in range(result.shape[1]) if batch["mask"][row, t] and batch["segments"][row, t] == code]
            margins = [batch["margin"][row, t].item() for t in tokens]
            entropies = [batch["entropy"][row, t].item() for t in tokens]
            if not tokens:
                continue
            cell = cell_salience(margins, entropies, batch["sign"][row, tokens[0]], C_MAX)
            result[row, tokens] = torch.tensor(cell, dtype=torch.float64)
    return result


@settings(deadline=None, max_examples=60)
@given(batches())
def test_salience_equals_the_slow_reference(batch):
    torch.testing.assert_close(salience(**batch).double(), slow_salience(batch), rtol=0, atol=1e-6)


def test_a_batch_in_parts_is_the_batch(monkeypatch):
    rows, generator = 7, torch.Generator().manual_seed(0)
    segments = torch.randint(0, 4, (rows, 30), generator=generator)
    sign = torch.randint(-1, 2, (rows, 4), generator=generator).gather(1, segments)
    batch = torch.randn(rows, 30, generator=generator), torch.rand(rows, 30, generator=generator), segments, sign
    whole = salience(*batch)
    monkeypatch.setattr("verl_bridge.algorithms.salience._TOKENS", 60)  # 2 rows at a time
    assert torch.equal(salience(*batch), whole)
    assert torch.equal(salience(*(x.T.contiguous().T for x in batch)), whole)  # another order in memory
    batch[0][5, (sign[5] != 0) & (segments[5] != N)] = math.nan
    with pytest.raises(ValueError, match="rollout 5"):
        salience(*batch)


@settings(deadline=None)
@given(batches(), st.floats(0.01, 1.0))
def test_equal_budgets_under_the_cap(batch, c_max):
    result = salience(**batch, c_max=c_max)
    assert ((result >= 0) & (result <= torch.tensor(c_max))).all()
    for code in (V, R, S):
        cell = batch["mask"] & (batch["segments"] == code)
        assert (result[cell] > 0).all()
        budget = torch.where(cell, result, 0.0).double().sum(1)
        torch.testing.assert_close(budget, cell.sum(1).double() * (c_max / 2), rtol=1e-6, atol=0)
    assert (result[~batch["mask"] | (batch["segments"] == N)] == 0).all()


@settings(deadline=None)
@given(batches(), st.integers(0, 2**31))
def test_rows_and_tokens_may_come_in_any_order(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, length = batch["margin"].shape
    order, tokens = torch.randperm(rows, generator=generator), torch.randperm(length, generator=generator)
    assert torch.equal(salience(**{k: x[order] for k, x in batch.items()}), salience(**batch)[order])
    shuffled = salience(**{k: x[:, tokens] for k, x in batch.items()})
    torch.testing.assert_close(shuffled, salience(**batch)[:, tokens], rtol=0, atol=1e-7)


@settings(deadline=None)
@given(batches())
def test_open_and_unsure_tokens_get_more_praise_and_less_blame(batch):
    result, cells = salience(**batch).double(), batch["segments"] * 10 + batch["sign"]
    for row in range(len(result)):
        for sign in (1, -1):
            for code in (V, R, S):
                cell = (cells[row] == code * 10 + sign) & batch["mask"][row]
                c, m, h = (x[cell].double() for x in (result[row], batch["margin"][row], batch["entropy"][row]))
                dominates = (m[:, None] <= m) & (h[:, None] >= h)  # at most the margin, at least the entropy
                assert (sign * (c[:, None] - c))[dominates].ge(-1e-7).all()


def test_what_it_gives_is_what_the_residual_takes():
    statistic = token_statistics(*random_logits(200, 400))
    assert isinstance(statistic, TokenStatistics)
    segments = torch.tensor([[V] * 40 + [R] * 30 + [S] * 30, [V] * 10 + [R] * 80 + [N] * 10])
    types = torch.tensor([RolloutType.A, RolloutType.B1])
    sign = torch.tensor([[1] * 40 + [-1] * 30 + [1] * 30, [1] * 10 + [-1] * 90])
    c = salience(statistic.margin.view(2, 100), statistic.entropy.view(2, 100), segments, sign)
    rest = (torch.ones(2, 100), segments, types, torch.tensor([0, 0]), torch.tensor([1.0, 0.0]))
    base = torch.tensor([[1.0], [-1.0]]).expand(2, 100)
    weighed, uniform = (
        with_residual(base, grounded_advantages(base, *rest, group_relative=True, salience=x)) for x in (c, None)
    )
    for code in (V, R, S):  # another spread, the same sum
        cell = segments == code
        assert not torch.allclose(weighed.residual[cell], uniform.residual[cell])
        sums = (torch.where(cell, x.residual, 0.0).sum(1) for x in (weighed, uniform))
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-7)
