"""The token budget: how many turns depends on lengths, which turns never does."""

import math
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.bilevel.likelihood import RetrievalTurn, plan_likelihoods
from verl_bridge.bilevel.sample import sample_turns
from verl_bridge.retrieval.corpus import Document

LENGTHS = [10, 10, 10, 10, 10, 10, 50, 60, 200, 400]  # a turn each, nothing shared
NEEDS = [[i] for i in range(10)]
SEEDS = 4000


def tokens_of(drawn, needs, tokens):
    return sum(tokens[position] for position in {p for turn in drawn for p in needs[turn]})


def test_every_turn_is_drawn_equally_often_whatever_its_length():
    """And means over the sample are unbiased: here of a value that grows with the length, as ℓ_d does."""
    drawn = [sample_turns(NEEDS, LENGTHS, 250, seed) for seed in range(SEEDS)]
    sizes = Counter(map(len, drawn))
    assert len(sizes) > 1  # the number itself varies with the seed
    expected = sum(size * count for size, count in sizes.items()) / 10
    spread = math.sqrt(sum(count * (s / 10) * (1 - s / 10) for s, count in sizes.items()))
    times = Counter(turn for turns in drawn for turn in turns)
    assert all(abs(times[turn] - expected) < 4.5 * spread for turn in range(10)), times

    means = [sum(LENGTHS[turn] for turn in turns) / len(turns) for turns in drawn]
    centre = sum(means) / SEEDS
    error = math.sqrt(sum((m - centre) ** 2 for m in means) / (SEEDS - 1) / SEEDS)
    assert abs(centre - sum(LENGTHS) / 10) < 4.5 * error

    # filling the budget with what still fits, which is what this avoids, fails the same check
    filled = []
    for seed in range(SEEDS):
        taken, spent = [], 0
        for turn in random.Random(seed).sample(range(10), 10):
            if spent + LENGTHS[turn] <= 250:
                taken.append(turn)
                spent += LENGTHS[turn]
        filled.append(sum(LENGTHS[turn] for turn in taken) / len(taken))
    assert abs(sum(filled) / SEEDS - sum(LENGTHS) / 10) > 4.5 * error


def test_the_budget_is_kept_in_nearly_all_draws():
    generator = random.Random(0)
    needs = [[i, 200 + i % 7] for i in range(200)]  # a sequence of its own, and one shared by many
    tokens = [generator.randint(20, 60) for _ in range(200)] + [100] * 7
    spent = [tokens_of(sample_turns(needs, tokens, 3000, seed), needs, tokens) for seed in range(300)]
    assert sum(value > 3000 for value in spent) < 300 / 9 + 4.5 * math.sqrt(300 / 9)
    assert max(spent) < 1.1 * 3000 and sum(spent) / 300 > 0.9 * 3000


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), max_size=8),
    st.lists(st.integers(1, 30), min_size=10, max_size=10),
    st.integers(1, 200),
    st.integers(0, 5),
)
def test_a_draw_is_seeded_ascending_and_never_empty(needs, tokens, budget, seed):
    needs = [sorted(turn) for turn in needs]
    drawn = sample_turns(needs, tokens, budget, seed)
    assert drawn == sample_turns(needs, tokens, budget, seed) == sorted(set(drawn))
    assert set(drawn) <= set(range(len(needs))) and bool(drawn) == bool(needs)
    if tokens_of(range(len(needs)), needs, tokens) <= budget:
        assert drawn == list(range(len(needs)))
    if needs and budget < min(sum(tokens[p] for p in turn) for turn in needs):
        assert len(drawn) == 1


def characters(text):
    return [ord(c) for c in text]


def test_a_plan_under_a_budget_counts_shared_sequences_once():
    """Thirty rollouts of one question share their sequences, so all fit where thirty times the tokens would not."""
    documents = tuple(Document(str(i), f"T{i}", "x" * 40) for i in range(4))
    shared = [RetrievalTurn(("same", i), (1, 2, 3), documents, ("Rome",)) for i in range(30)]
    one = plan_likelihoods(shared[:1], characters).metrics["tokens"]
    plan = plan_likelihoods(shared, characters, token_budget=one)
    assert plan.metrics["turns_used"] == 30 and plan.metrics["budget_share"] == 1.0

    apart = [RetrievalTurn(("own", i), (1, 2, i), documents, ("Rome",)) for i in range(30)]
    plan = plan_likelihoods(apart, characters, token_budget=7 * one + 5, seed=3)
    assert plan.metrics["turns_used"] == 7 and plan.metrics["turn_share"] == pytest.approx(7 / 30)
    assert plan.metrics["budget_share"] == pytest.approx(7 * one / (7 * one + 5))
    assert len(plan.sequences) == 7 * 4 == plan.metrics["sequences"] and len(plan.index) == 7
    assert plan.turn_keys == plan_likelihoods(apart, characters, token_budget=7 * one + 5, seed=3).turn_keys
    assert plan.turn_keys != plan_likelihoods(apart, characters, token_budget=7 * one + 5, seed=4).turn_keys
    # what is sampled is what would be scored without a budget
    whole = plan_likelihoods(apart, characters)
    score = {sequence: -float(i) for i, sequence in enumerate(whole.sequences)}
    every = dict(zip(whole.turn_keys, whole.gather([score[s] for s in whole.sequences]), strict=True))
    assert plan.gather([score[s] for s in plan.sequences]) == [every[key] for key in plan.turn_keys]
    with pytest.raises(ValueError, match="token_budget is 0"):
        plan_likelihoods(apart, characters, token_budget=0)


def test_the_work_grows_with_the_turns_and_not_with_their_square():
    def seconds(count):
        generator = random.Random(1)
        documents = [Document(str(i), "t", f"text {i} " * 10) for i in range(count)]
        turns = [
            RetrievalTurn(i, tuple(range(i // 8, i // 8 + 60)), tuple(generator.sample(documents, 10)), ("a", "b"))
            for i in range(count)
        ]
        started = time.process_time()
        plan_likelihoods(turns, characters, token_budget=count * 300)
        return time.process_time() - started

    small = min(seconds(300) for _ in range(3))
    assert seconds(2400) < 8 * small * 3  # the square would be 64 times
