"""Tokens of the answer likelihoods of saved rollouts: counted by hand, and with the policy's own tokenizer."""

import json
import re

import pytest

from verl_bridge.bilevel.likelihood import document_context
from verl_bridge.embedded.policy import POLICY_DIR
from verl_bridge.evaluation import bench_tokens
from verl_bridge.evaluation.bench_tokens import load_tokenizer, measure_tokens
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.trace import SearchTrace, SearchTurn


def trace(question, gold, *searches, status="ok"):
    turns = []
    for position, ids in enumerate(searches):
        scores = tuple(0.9 - 0.1 * i for i in range(len(ids)))
        turns.append(
            SearchTurn("search", (position, position + 1), query="q", status=status, candidate_ids=ids)
            if status != "ok"
            else SearchTurn(
                "search", (position, position + 1), (), "q", "ok", ids, scores, min(3, len(ids)), adapter_version=0
            )
        )
    return SearchTrace(question, (gold, "another alias"), tuple(turns), None, None, "max_turns", len(turns))


def save(path, *groups):
    rows = [
        {"step": 1, "uid": f"{number}", "reward": 0.0, "trace": rollout.to_dict()}
        for number, group in enumerate(groups)
        for rollout in group
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path):
    rows = [{"id": i, "title": "t", "text": " ".join(["w"] * n)} for i, n in (("a", 1), ("b", 2), ("c", 3))]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(monkeypatch):
    """A tokenizer of words: a prompt has two, so that a document of n words makes a sequence of n + 7."""
    numbers = {}

    def tokenize(text):
        return [numbers.setdefault(word, len(numbers)) for word in text.split()]

    monkeypatch.setattr(bench_tokens, "load_tokenizer", lambda folder: (lambda q: tokenize(f"Q: {q}"), tokenize))


def test_the_ratio_counted_by_hand(words, corpus, tmp_path):
    # two rollouts of one question: a, b and again b, a and b, c; a rollout of another question: a, b
    one = save(
        tmp_path / "step_000001.jsonl",
        [trace("x", "g", ("a", "b")), trace("x", "g", ("b", "a"), ("b", "c"))],
        [trace("y", "g", ("a", "b"))],
    )
    # a failed search, one candidate and none carried out say nothing; two equal searches count once
    two = save(
        tmp_path / "step_000002.jsonl",
        [trace("x", "g", ("a", "c"), ("a", "c"), ("b",)), trace("x", "g", (), status="error")],
        [trace("x", "g", (), status="none")],
    )
    report = measure_tokens([one, two], corpus, "unused")
    of_one, of_two = (8 + 9 + 10) + (8 + 9), 8 + 10
    all_of_one, all_of_two = 4 * 9 + 3 * 8 + 10, 2 * (8 + 10)
    assert report == {
        "token_ratio": (of_one + of_two) / (all_of_one + all_of_two),
        "by_step": {"step_000001": of_one / all_of_one, "step_000002": 0.5},
        "tokens": of_one + of_two,
        "tokens_undeduplicated": all_of_one + all_of_two,
        "sequences": 5 + 2,
        "turns": 4 + 2,
        "rollouts": 6,
        "rollouts_a_group": 1.5,
    }


def test_eight_equal_rollouts_take_an_eighth(words, corpus, tmp_path):
    file = save(tmp_path / "step_000001.jsonl", [trace("x", "g", ("a", "b", "c"))] * 8)
    report = measure_tokens([file], corpus, "unused")
    assert report["token_ratio"] == 1 / 8 and report["rollouts_a_group"] == 8


def test_with_the_policys_tokenizer_it_is_what_scoring_everything_would_take(corpus, tmp_path):
    groups = [[trace("which town?", "Lima", ("a", "b"), ("c", "a")), trace("which town?", "Lima", ("c", "b"))]]
    report = measure_tokens([save(tmp_path / "step_000001.jsonl", *groups)], corpus, POLICY_DIR)
    prompt, tokenize = load_tokenizer(POLICY_DIR)
    assert list(prompt("which town?")) == list(tokenize("Question: which town?\n"))
    assert len(tokenize("<eos>")) > 1 and len(tokenize("</information>")) == 1  # a control token stays text
    opened = Corpus.open(corpus)
    length = {
        i: len(prompt("which town?")) + len(tokenize(document_context(opened.by_id(i)))) + len(tokenize(" Lima"))
        for i in "abc"
    }
    assert report["tokens"] == sum(length.values())
    assert report["tokens_undeduplicated"] == 2 * sum(length.values())


def test_what_cannot_be_measured_says_so(words, corpus, tmp_path):
    file = save(tmp_path / "step_000001.jsonl", [trace("x", "g", ("a", "z"))])
    with pytest.raises(ValueError, match=r"'z' is not in corpus .*give --corpus, the one that these rollouts searched"):
        measure_tokens([file], corpus, "unused")
    alone = save(tmp_path / "step_000002.jsonl", [trace("x", "g", ("a",))])
    with pytest.raises(ValueError, match="none of 1 searches has two candidates"):
        measure_tokens([alone], corpus, "unused")
    with pytest.raises(ValueError, match="two files are named step_000002"):
        measure_tokens([file, alone, alone], corpus, "unused")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"no tokenizer at {tmp_path}")):
        load_tokenizer(tmp_path)
