"""The BRIDGE step on made-up rollouts: what is scored, what the learner gets, and what comes back for the policy."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch

from verl_bridge.bilevel.updater import UpdateResult
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations import retriever_step
from verl_bridge.integrations.retriever_step import RetrieverStep, correction_of
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.trace import SearchTrace, SearchTurn

DOCUMENTS = {i: {"id": i, "title": i, "text": f"{i} Lima" if i == "b" else i} for i in "abc"}
QUESTION, GOLDS = "?", ("Lima", "Lima, Peru")


class Retrieval:
    """TrainerRetrieval's place: version 3 is served, and the learner still knows version 2."""

    def __init__(self, shift=None):
        self.events, self.shift, self.stale, self.not_finite = [], shift, None, 0.0

    def check_served(self, versions, *, older):
        self.events.append(("check_served", list(versions), older))
        if self.stale:
            raise self.stale

    def known_versions(self):
        return {2, 3}

    def documents(self, ids):
        self.events.append(("documents", ids))
        return [DOCUMENTS[i] for i in ids]

    def publish(self):
        self.events.append(("publish",))

    def update(self, batch):
        self.events.append(("update", batch))
        return UpdateResult(4, {"bridge/loss": 0.5, "bridge/turns_not_finite": self.not_finite}, self.shift)


def search(version, candidates=("a", "b"), query="q", start=0):
    scores = tuple(0.5 - 0.1 * i for i in range(len(candidates)))
    found = {"candidate_ids": candidates, "candidate_scores": scores, "shown": 1, "adapter_version": version}
    return SearchTurn("search", (start, start + 4), query=query, status="ok", **found)


def rollouts(*turns_of_rows):
    """Rollouts of one prompt, each a list of turns."""
    traces = [
        SearchTrace(QUESTION, GOLDS, tuple(turns), None, None, "max_turns", max(turn.span[1] for turn in turns))
        for turns in turns_of_rows
    ]
    n = len(traces)
    return RolloutBatch(
        keys=[str(i) for i in range(n)],
        uids=["u"] * n,
        traces=traces,
        prompt_ids=[[1]] * n,
        response_ids=[[10 * (i + 1) + t for t in range(1, 9)] for i in range(n)],
        response_mask=torch.ones(n, 8),
        advantages=torch.zeros(n, 8),
        rewards=torch.zeros(n),
        group_index=torch.zeros(n, dtype=torch.int64),
        columns={},
    )


FAILED = SearchTurn("search", (0, 4), query="q", status="error")
FAILED_LATER = SearchTurn("search", (8, 12), query="q", status="error")


def step(retrieval, scored, **changes):
    """A step whose policy gives ``scored(text of context, text of answer)`` as the answer's log-prob per token."""

    def score(sequences):
        return [
            torch.full((len(answer),), scored(bytes_of(context), bytes_of(answer))) for context, answer in sequences
        ]

    settings = {
        "synchronous": True,
        "prefix": False,
        "all_golds": False,
        "length_normalize": False,
        "token_budget": None,
        "max_tokens": 512,
        "max_tokens_key": "the.key",
        "query_input": "query",
        "unicode": False,
        "correction_scale": 0.25,
    }
    return RetrieverStep(
        retrieval=retrieval, score=score, tokenize=lambda text: list(text.encode()), **{**settings, **changes}
    )


def bytes_of(ids):
    return bytes(i for i in ids if i >= 32).decode()


def contains_b(context):
    return "(Title: b) b Lima" in context


def run(made, batch, advantages=None, rl_mask=None):
    n = len(batch.keys)
    timing: dict = {}
    result = made(
        batch,
        torch.linspace(-1, 1, n) if advantages is None else torch.tensor(advantages),
        torch.ones(n, dtype=torch.bool) if rl_mask is None else torch.tensor(rl_mask),
        seed=0,
        timing=timing,
    )
    return result, timing


def test_the_learner_gets_each_answered_search_with_its_own_version_and_credit():
    retrieval = Retrieval()
    batch = rollouts([search(3), search(3, ("b", "c"), "r", start=4)], [FAILED], [search(3)])
    made = step(retrieval, lambda context, answer: -0.5 if "Lima" in context else -2.0)
    result, timing = run(made, batch, [0.7, 0.1, -0.7], [True, True, False])
    assert [event[0] for event in retrieval.events] == ["check_served", "documents", "update"]
    assert retrieval.events[0] == ("check_served", [3, 3, 3], False) and retrieval.events[1][1] == ["a", "b", "c"]
    given = retrieval.events[2][1]
    assert given.queries == ["q", "r", "q"] and given.candidate_ids == [("a", "b"), ("b", "c"), ("a", "b")]
    assert given.adapter_version == [3, 3, 3] and given.hits == [[False, True], [True, False], [False, True]]
    assert given.advantages == pytest.approx([0.7, 0.7, -0.7]) and given.rl_mask == [True, True, False]
    # " Lima" has five tokens
    assert given.answer_log_likelihood == [[-10.0, -2.5], [-2.5, -10.0], [-10.0, -2.5]]
    assert result.metrics["bridge/plan/turns_failed"] == 1 and result.metrics["bridge/plan/turns_used"] == 3
    assert result.metrics["bridge/loss"] == 0.5 and result.correction is None
    assert result.metrics["bridge/turns_not_finite"] == 0 and timing.keys() == {"likelihood", "retriever_update"}


def test_rollouts_of_another_version_stop_a_synchronous_run_before_anything_is_scored():
    retrieval = Retrieval()
    retrieval.stale = RuntimeError("answered by adapter version 0")
    with pytest.raises(RuntimeError, match="answered by adapter version 0"):
        run(step(retrieval, lambda *_: pytest.fail("scored")), rollouts([search(0)]))


def test_searches_by_versions_the_learner_no_longer_keeps_are_left_out_and_counted():
    retrieval = Retrieval()
    batch = rollouts([search(1), search(2, start=4)], [search(3)], [FAILED])
    result, _ = run(step(retrieval, lambda *_: -1.0, synchronous=False), batch)
    assert retrieval.events[0] == ("check_served", [1, 2, 3], True)  # one that nobody published stops the run
    assert retrieval.events[-1][1].adapter_version == [2, 3] and result.metrics["bridge/turns_stale"] == 1
    assert result.metrics["bridge/plan/turns_failed"] == 1
    # one version behind and none
    assert (result.metrics["bridge/staleness_mean"], result.metrics["bridge/staleness_max"]) == (0.5, 1.0)


def test_servers_that_answer_with_none_of_the_learners_versions_get_its_adapter_again(caplog):
    """One that was started again serves version 0, and without an update nobody would ever publish to it."""
    for turns in ([search(0)], [search(0), search(1, start=4), FAILED_LATER]):
        caplog.clear()
        nothing = Retrieval()
        result, _ = run(step(nothing, lambda *_: -1.0, synchronous=False), rollouts(turns))
        assert [event[0] for event in nothing.events] == ["check_served", "publish"]
        assert result.metrics["bridge/turns_stale"] == len(turns) - (FAILED_LATER in turns)
        assert "bridge/staleness_max" not in result.metrics
        assert "none of which the learner keeps (2 to 3): its adapter is published again" in caplog.text
    for turns in ([search(0)], [search(2)]), ([FAILED],):  # one is enough to learn from; nobody answered
        made = Retrieval()
        run(step(made, lambda *_: -1.0, synchronous=False), rollouts(*turns))
        assert ("publish",) not in made.events


@pytest.mark.parametrize(("prefix", "before"), [(False, (1,)), (True, (1, 11, 12, 13, 14))])
def test_what_precedes_the_document(prefix, before):
    """The question's prompt, or the trajectory up to and including the query: the first turn's span is 0 to 4."""
    seen = []
    made = step(Retrieval(), None, prefix=prefix)
    object.__setattr__(made, "score", lambda sequences: seen.extend(sequences) or [torch.zeros(5)] * len(sequences))
    run(made, rollouts([search(3)]))
    assert {context[: len(before) + 1][:-1] for context, _ in seen} == {before}
    assert all(chr(context[len(before)]) == ("\n" if prefix else "<") for context, _ in seen)


def test_the_learner_encodes_what_the_rollouts_searched_for():
    retrieval = Retrieval()
    run(step(retrieval, lambda *_: -1.0, query_input="question_query"), rollouts([search(3)]))
    assert retrieval.events[-1][1].queries == ["? q"]


def test_the_likeliest_gold_counts_per_document_and_by_length():
    def scored(context, answer):
        # the longer alias is likelier under document b alone
        return (-0.1 if contains_b(context) else -3.0) if "Peru" in answer else -1.0

    for length_normalize, expected in ((False, [-5.0, -1.1]), (True, [-1.0, -0.1])):
        retrieval = Retrieval()
        made = step(retrieval, scored, all_golds=True, length_normalize=length_normalize)
        run(made, rollouts([search(3)]))
        (values,) = retrieval.events[-1][1].answer_log_likelihood
        assert values == pytest.approx(expected)
    first = Retrieval()
    run(step(first, scored), rollouts([search(3)]))
    assert first.events[-1][1].answer_log_likelihood == [[-5.0, -5.0]]


def test_a_budget_leaves_turns_out_and_says_how_much_it_used():
    retrieval = Retrieval()
    batch = rollouts(*([search(3, pair)] for pair in (("a", "b"), ("b", "c"), ("a", "c"))))
    result, _ = run(step(retrieval, lambda *_: -1.0, token_budget=150), batch)
    assert 0 < result.metrics["bridge/plan/turns_used"] < 3
    assert len(retrieval.events[-1][1].queries) == result.metrics["bridge/plan/turns_used"]
    assert result.metrics["bridge/plan/turn_share"] == pytest.approx(result.metrics["bridge/plan/turns_used"] / 3)
    assert result.metrics["bridge/plan/budget_share"] == result.metrics["bridge/plan/tokens"] / 150


def test_a_budget_below_a_single_turn_is_warned_of_once(caplog):
    retriever_step._warn_of_budget.cache_clear()
    batch = rollouts([search(3)], [search(3, ("b", "c"))])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            result, _ = run(step(Retrieval(), lambda *_: -1.0, token_budget=150), batch)
            assert result.metrics["bridge/plan/turns_used"] == 1 and result.metrics["bridge/plan/budget_share"] < 1
        assert caplog.text == ""
        for _ in range(3):
            result, _ = run(step(Retrieval(), lambda *_: -1.0, token_budget=20), batch)
            assert result.metrics["bridge/plan/turns_used"] == 1 and result.metrics["bridge/plan/budget_share"] > 1
    assert caplog.text.count("verl_bridge.bridge.token_budget=20 is less than a single retrieval turn takes") == 1


def test_turns_whose_likelihood_is_not_finite_are_left_out_and_counted():
    retrieval = Retrieval(shift=[[0.5, -0.5]])
    retrieval.not_finite = 3.0  # of those that the learner got, by its own scores
    batch = rollouts([search(3)], [search(3, ("a", "c"))])
    made = step(retrieval, lambda context, _: -math.inf if "(Title: c)" in context else -1.0)
    result, _ = run(made, batch)
    assert result.metrics["bridge/turns_not_finite"] == 1 + 3 and len(retrieval.events[-1][1].queries) == 1
    assert [contains_b(bytes_of(context)) for context, _ in result.correction.sequences] == [False, True]
    assert result.correction.coefficients == [0.125, -0.125]  # a mean over the one turn that is left
    nothing = Retrieval()
    result, _ = run(step(nothing, lambda *_: -math.inf), batch)
    assert [event[0] for event in nothing.events] == ["check_served", "documents"]
    assert result.metrics["bridge/turns_not_finite"] == 2 and result.correction is None


def test_the_shift_of_two_states_becomes_weights_on_the_sequences_scored():
    """Two turns over a, b and b, c: what both say about b adds up; c's shift is 0, so it is no row."""
    retrieval = Retrieval(shift=[[0.4, -0.4], [0.1, 0.0]])
    batch = rollouts([search(3)], [search(3, ("b", "c"))])
    made = step(retrieval, lambda context, _: -0.5 if contains_b(context) else -1.0, correction_scale=2.0)
    result, _ = run(made, batch)
    texts = [bytes_of(context) for context, _ in result.correction.sequences]
    assert [contains_b(text) for text in texts] == [False, True]
    # γ/τ_l = 2, a mean over two turns: a 2·0.4/2, b 2·(−0.4 + 0.1)/2
    assert result.correction.coefficients == pytest.approx([0.4, -0.3])
    assert [row.tolist() for row in result.correction.log_probs] == [[-1.0] * 5, [-0.5] * 5]
    assert result.metrics["bridge/correction/sequences"] == 2
    assert result.metrics["bridge/correction/weight"] == pytest.approx(0.7)


def test_the_shift_falls_on_the_winning_gold_by_length():
    retrieval = Retrieval(shift=[[0.3, -0.3]])
    made = step(
        retrieval,
        lambda context, answer: -0.1 if "Peru" in answer and contains_b(context) else -1.0 - ("Peru" in answer),
        all_golds=True,
        length_normalize=True,
    )
    result, _ = run(made, rollouts([search(3)]))
    answers = [bytes_of(answer) for _, answer in result.correction.sequences]
    assert answers == [" Lima", " Lima, Peru"]
    assert result.correction.coefficients == pytest.approx([0.25 * 0.3 / 5, -0.25 * 0.3 / 11])


def test_a_prompt_that_leaves_no_room_names_the_setting_to_raise():
    made = step(Retrieval(), lambda *_: -1.0, max_tokens=20, max_tokens_key="actor.some_tokens")
    with pytest.raises(
        ConfigError, match=r"max_tokens=20 .*; max_tokens comes from actor\.some_tokens: raise it .*, or lower data"
    ):
        run(made, rollouts([search(3)]))


@pytest.mark.parametrize("prefix", [False, True])
def test_a_question_with_one_long_alias_costs_its_own_turns(prefix):
    batch = rollouts([search(3)], [search(3)])
    batch.traces[1] = dataclasses.replace(batch.traces[1], golden_answers=("Lima", "x" * 600))
    retrieval = Retrieval()
    result, _ = run(step(retrieval, lambda *_: -1.0, all_golds=True, prefix=prefix), batch, [0.5, -0.5])
    assert result.metrics["bridge/plan/turns_without_room"] == 1 and retrieval.events[-1][1].advantages == [0.5]


def test_sequences_without_a_weight_give_no_correction():
    sequences, log_probs = [([1], [2, 3]), ([1], [4])], [torch.zeros(2), torch.zeros(1)]
    assert correction_of(sequences, log_probs, [0.0, 0.0], scale=0.5) is None
    assert correction_of(sequences, log_probs, [1.0, 1.0], scale=0.0) is None
