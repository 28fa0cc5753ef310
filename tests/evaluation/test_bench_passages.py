"""The updater alone on passages: who is held out, what it is told, and that it learns from that and not from noise."""

import hashlib
import json

import pytest

from verl_bridge.embedded.world import encoder_dir
from verl_bridge.evaluation import bench_passages
from verl_bridge.evaluation.bench_passages import (
    HIGH,
    LOW,
    PassageTask,
    Run,
    measure_passages,
    paired_interval,
    shuffle,
    summarise_runs,
)
from verl_bridge.qa.questions import Question, read_questions
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.retriever import open_retriever

PLACES = (
    "Avelin Borsk Caldra Dunmoor Elsberg Farsund Gorvia Hollin Istria Jarnow Kelmar Lorvik Mirova Norden Oskra Pelland "
    "Quarn Rastov Selvia Tarnow Ulmark Velden Wostok Yarrow"
).split()


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def material(tmp_path):
    """A passage a place that answers in other words than the question's, and three that repeat it and do not."""
    documents, questions = [], []
    for number, place in enumerate(PLACES):
        coin = f"{place[:3].lower()}ling"
        for title, text in (
            (f"Legal tender of {place}", f"All prices in {place} are quoted in {coin}."),
            (f"Money in {place}", f"A pop song about what money people use in {place}."),
            (f"What money do people use in {place}", f"A novel. What do people in {place} use as money?"),
            (f"People of {place}", f"A film on the money that people in {place} use."),
        ):
            documents.append({"id": f"{len(documents)}", "title": title, "text": text})
        questions.append(
            {"id": f"q{number}", "question": f"What money do people use in {place}?", "golden_answers": [coin]}
        )
    questions += [
        {"id": "verdict", "question": "Is there money in Borsk?", "golden_answers": ["yes"]},
        {"id": "nowhere", "question": "What is used in Rome?", "golden_answers": ["sesterces"]},
    ]
    return write_lines(tmp_path / "corpus.jsonl", documents), write_lines(tmp_path / "questions.jsonl", questions)


def test_a_third_is_held_out_by_id_and_what_cannot_be_asked_is_counted(material):
    corpus, questions = Corpus.open(material[0]), read_questions(material[1])
    task = PassageTask.of(corpus, questions)
    assert (task.yes_no, task.unanswerable) == (1, 1)
    names = sorted((f"q{i}" for i in range(24)), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert [q.id for q in task.held_out] == names[:8] and [q.id for q in task.train] == names[8:]
    assert {name: set(ids) for name, ids in task.bearing.items()} == {f"q{i}": {f"{4 * i}"} for i in range(24)}
    assert PassageTask.of(corpus, questions[::-1]).held_out == task.held_out
    assert task.likelihood("q2", ["8", "9", "0"]) == [HIGH, LOW, LOW]


def test_too_few_questions_and_repeated_ids_are_refused(material):
    corpus = Corpus.open(material[0])
    asked = [Question(f"{i}", "q", ("borling",)) for i in range(2)]
    with pytest.raises(ValueError, match="2 questions have their answer in a passage; give at least 3"):
        PassageTask.of(corpus, asked)
    with pytest.raises(ValueError, match="two questions share an id"):
        PassageTask.of(corpus, [*asked, asked[0]])


def test_the_interval_is_that_of_the_mean_difference():
    # half of 400 questions gain 1: a mean of .5 with a standard error of .025
    half = [[0.0, 1.0] * 200]
    low, high = paired_interval(half)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)
    assert paired_interval([[1.0] * 50] * 3) == (1.0, 1.0)
    # seeds that disagree about everything: with two of them, a quarter of the draws holds one alone
    assert paired_interval([[1.0] * 50, [0.0] * 50]) == (0.0, 1.0)
    # equal seeds add no certainty
    low3, high3 = paired_interval(half * 3)
    assert low3 == pytest.approx(low, abs=0.004) and high3 == pytest.approx(high, abs=0.004)
    assert paired_interval(half, seed=1) == paired_interval(half, seed=1)


def test_runs_are_averaged_over_seeds_and_the_control_stands_apart():
    runs = [Run([False, False], [True, True], 0.5), Run([True, False], [True, False], 1.0)]
    report = summarise_runs(runs, Run([False, False], [False, True], 0.0))
    assert (report["recall_before"], report["recall_after"], report["recall_difference"]) == (0.25, 0.75, 0.5)
    assert report["recall_after_by_seed"] == {"0": 1.0, "1": 0.5}
    assert (report["recall_after_shuffled"], report["train_answer_in_candidates"]) == (0.5, 0.75)
    assert (report["interval_low"], report["interval_high"]) == (0.0, 1.0)  # the seeds disagree


def test_dealt_values_are_the_same_ones_elsewhere():
    values = [HIGH, *[LOW] * 19]
    dealt = [shuffle(values, f"q{i}") for i in range(50)]
    assert all(sorted(row) == sorted(values) for row in dealt)
    assert shuffle(values, "q1") == dealt[1]
    assert len({row.index(HIGH) for row in dealt}) > 10


def test_it_learns_what_the_likelihood_says_and_nothing_from_noise(material, tmp_path, monkeypatch):
    task = PassageTask.of(Corpus.open(material[0]), read_questions(material[1]))
    asked, real = [], bench_passages.RetrieverBatch

    def spy(**columns):
        asked.append(columns)
        return real(**columns)

    monkeypatch.setattr(bench_passages, "RetrieverBatch", spy)
    lines = []
    report = measure_passages(
        corpus=material[0],
        questions=material[1],
        encoder=str(encoder_dir()),
        index=None,
        work=tmp_path / "work",
        seeds=2,
        top_k=12,
        epochs=4,
        batch_size=8,
        lr=2e-3,
        threads=1,
        say=lines.append,
    )
    assert report["recall_before"] < 0.3
    assert report["recall_after"] > 0.8
    assert report["recall_after_shuffled"] <= report["recall_before"] + 0.2
    assert report["interval_low"] > 0.3
    assert report["recall_difference"] == pytest.approx(report["recall_after"] - report["recall_before"])
    assert sum(report["recall_after_by_seed"].values()) / 2 == pytest.approx(report["recall_after"])
    assert (report["train_questions"], report["held_out_questions"]) == (16, 8)
    assert (report["yes_no_left_out"], report["without_passage_left_out"]) == (1, 1)
    index = next((tmp_path / "work").iterdir())
    retriever = open_retriever(corpus=material[0], index=index)
    found = [retriever.search([q.question], 12)[0].ids for q in task.train]
    with_answer = [not task.bearing[q.id].isdisjoint(ids) for q, ids in zip(task.train, found, strict=True)]
    assert report["train_answer_in_candidates"] == sum(with_answer) / 16

    # nothing of the held-out questions was seen, no advantage, two updates an epoch
    held_out = {q.question for q in task.held_out}
    assert len(asked) == 3 * 4 * 2
    for columns in asked:
        assert held_out.isdisjoint(columns["queries"])
        assert set(columns["advantages"]) == {0.0}
        assert {value for row in columns["answer_log_likelihood"] for value in row} <= {HIGH, LOW}
        assert all(len(ids) == 12 for ids in columns["candidate_ids"])
    assert asked[0]["adapter_version"] == [0] * 8 and asked[7]["adapter_version"] == [7] * 8  # what serves by then
    assert [c["queries"] for c in asked[:8]] != [c["queries"] for c in asked[8:16]]  # another seed, another order

    # that index says itself which encoder made it
    again = {"seeds": 1, "top_k": 4, "epochs": 1, "threads": 1, "say": lines.append, "work": tmp_path}
    again = measure_passages(corpus=material[0], questions=material[1], encoder=None, index=index, **again)
    assert again["recall_before"] == report["recall_before"]
    with pytest.raises(ValueError, match="neither --index nor --encoder: give one"):
        measure_passages(corpus=material[0], questions=material[1], encoder=None, index=None, work=tmp_path)

    documents = hashlib.sha256(material[0].read_bytes()).hexdigest()
    assert report["documents_sha256_before"] == report["documents_sha256_after"] == documents
    assert report["index_sha256_before"] == report["index_sha256_after"]
    (index / "manifest.json").write_text((index / "manifest.json").read_text() + " ")
    assert bench_passages._hashes(material[0], index)["index_sha256"] != report["index_sha256_before"]
    assert sum("encoding" in line for line in lines) == 1
