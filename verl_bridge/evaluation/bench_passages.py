"""``verl-bridge bench bridge --corpus --questions``: only BRIDGE's updater, on real passages, without a policy.

Every query is a question itself. The policy's likelihood of the answer is stood in for by two values, high for a
candidate that holds a gold alias and low for any other, and every advantage is zero: what is learnt comes only from the
RAG loss. A third of the questions is held out, the same for every seed; neither they nor their answers are seen in
training. Recall is over the whole corpus.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.files import sha256
from verl_bridge.qa.answers import alias_hit, is_yes_no
from verl_bridge.qa.questions import Question, read_questions
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.retriever import Retriever, open_retriever

HIGH, LOW = -1.0, -8.0  # nats, about what a policy that reads well gives the answer with and without its evidence
SHOWN = 3
RESAMPLES, RESAMPLES_AT_ONCE = 10_000, 500

Likelihood = Callable[[str, Sequence[str]], list[float]]
"""A question's id and its candidates' ids to the stand-in for ℓ_d of each candidate, in nats."""


@dataclass(frozen=True)
class PassageTask:
    """Questions and the passages that hold their answers.

    Args:
        train, held_out: the questions.
        bearing: by question id, ids of the documents with a gold alias in title or text.
        yes_no: questions left out because a verdict is in no passage.
        unanswerable: questions left out because no passage holds a gold alias.
    """

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]
    bearing: dict[str, frozenset[str]]
    yes_no: int
    unanswerable: int

    @classmethod
    def of(cls, corpus: Corpus, questions: Sequence[Question]) -> PassageTask:
        """Sorts the questions out and holds back the third whose ids have the lowest SHA-256.

        Raises:
            ValueError: fewer than three questions are left, or two share an id.
        """
        asked = [question for question in questions if not is_yes_no(question.golden_answers)]
        if len({question.id for question in asked}) < len(asked):
            raise ValueError("--questions: two questions share an id; make ids unique")
        found: dict[str, set[str]] = {question.id: set() for question in asked}
        for document in corpus:  # passages outside, so that each is normalised once
            text = f"{document.title} {document.text}"
            for question in asked:
                if alias_hit(text, question.golden_answers):
                    found[question.id].add(document.id)
        left = sorted(
            (question for question in asked if found[question.id]),
            key=lambda question: hashlib.sha256(question.id.encode()).digest(),
        )
        if len(left) < 3:
            raise ValueError(f"--questions: {len(left)} questions have their answer in a passage; give at least 3")
        third = len(left) // 3
        bearing = {question.id: frozenset(found[question.id]) for question in left}
        return cls(
            tuple(left[third:]), tuple(left[:third]), bearing, len(questions) - len(asked), len(asked) - len(left)
        )

    def likelihood(self, question_id: str, ids: Sequence[str]) -> list[float]:
        """``HIGH`` for candidates that hold the answer, ``LOW`` for the others."""
        return [HIGH if document in self.bearing[question_id] else LOW for document in ids]

    def dealt_at_random(self, question_id: str, ids: Sequence[str]) -> list[float]:
        """The control: the same values, each on any candidate."""
        return shuffle(self.likelihood(question_id, ids), question_id)


def recall(
    retriever: Retriever, questions: Sequence[Question], bearing: dict[str, frozenset[str]], depth: int
) -> list[bool]:
    """Whether a passage with the answer is among the first ``depth`` over the whole corpus, per question."""
    found = retriever.search([question.question for question in questions], depth)
    return [not bearing[question.id].isdisjoint(hit.ids) for question, hit in zip(questions, found, strict=True)]


def train(
    retriever: Retriever,
    questions: Sequence[Question],
    likelihood: Likelihood,
    *,
    seed: int,
    top_k: int,
    epochs: int,
    batch_size: int,
    lr: float,
) -> None:
    """Trains the retriever's adapter in place, each batch on what the adapter of that moment finds.

    Args:
        retriever: opened with the float32 encoder.
        questions: what to ask, in another order every epoch.
        likelihood: stand-in for the policy.
        seed: of the order.
        top_k: candidates of a question.
        epochs: passes over the questions.
        batch_size: questions of one update.
        lr: learning rate, falling to 0 linearly.
    """
    from verl_bridge.bilevel.updater import RetrieverUpdater

    rng = random.Random(seed)
    per_epoch = -(-len(questions) // batch_size)
    updater = RetrieverUpdater(
        retriever.encoder.queries,
        retriever.index,
        lr=lr,
        objective="rag",
        lr_schedule="linear",
        total_updates=epochs * per_epoch,
        seed=seed,
    )
    for _ in range(epochs):
        order = rng.sample(list(questions), len(questions))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            found = retriever.search([question.question for question in batch], top_k)
            updater.update(
                RetrieverBatch(
                    queries=[question.question for question in batch],
                    candidate_ids=[hit.ids for hit in found],
                    answer_log_likelihood=[
                        likelihood(question.id, hit.ids) for question, hit in zip(batch, found, strict=True)
                    ],
                    advantages=[0.0] * len(batch),
                    rl_mask=[True] * len(batch),
                    adapter_version=[hit.adapter_version for hit in found],
                )
            )


@dataclass(frozen=True)
class Run:
    """One seed's run.

    Args:
        before, after: :func:`recall` at SHOWN of the held-out questions, before and after training.
        within: share of the training questions with the answer among their candidates, before training.
    """

    before: list[bool]
    after: list[bool]
    within: float


def run(
    retriever: Retriever, task: PassageTask, likelihood: Likelihood, *, seed: int, top_k: int, **settings: Any
) -> Run:
    """Trains the retriever in place and measures it; arguments and settings as for :func:`train`."""
    before = recall(retriever, task.held_out, task.bearing, SHOWN)
    within = recall(retriever, task.train, task.bearing, top_k)
    train(retriever, task.train, likelihood, seed=seed, top_k=top_k, **settings)
    return Run(before, recall(retriever, task.held_out, task.bearing, SHOWN), _mean(within))


def paired_interval(differences: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean difference, questions and seeds both drawn anew.

    Args:
        differences: after less before, ``(seeds, questions)``; the questions are the same for every seed.
        seed: of the draws.
    """
    import numpy as np

    values = np.asarray(differences, dtype=np.float64)
    seeds, questions = values.shape
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(RESAMPLES // RESAMPLES_AT_ONCE):
        # how often each seed and each question is drawn
        drawn_seeds = rng.multinomial(seeds, [1 / seeds] * seeds, size=RESAMPLES_AT_ONCE)
        drawn_questions = rng.multinomial(questions, [1 / questions] * questions, size=RESAMPLES_AT_ONCE)
        means.append(((drawn_seeds @ values) * drawn_questions).sum(axis=1) / values.size)
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def measure_passages(
    *,
    corpus: Path,
    questions: Path,
    encoder: str | None,
    index: Path | None,
    work: Path,
    seeds: int = 3,
    top_k: int = 40,
    epochs: int = 4,
    batch_size: int = 32,
    lr: float = 3e-4,
    threads: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Recall of passages that hold the answer, on held-out questions, before and after training.

    A seed sets the adapter's start and the order of the training questions; the held-out third is the same for all, so
    that differences pair by question.

    Args:
        corpus, questions: the material; see :func:`~verl_bridge.qa.questions.read_questions`.
        encoder: sentence-transformers folder or hub name; None for the one that made ``index``.
        index: of the corpus; None builds one in ``work`` and keeps it.
        seeds: runs, from seed 0 on.
        top_k, epochs, batch_size, lr: of :func:`train`.
        threads: of torch; None leaves it as it is.
        say: told what goes on.

    Returns:
        ``recall_before`` and ``recall_after`` (at SHOWN, means over seeds), ``recall_difference`` with its 95%
        ``interval_low`` and ``interval_high`` (:func:`paired_interval`), ``recall_after_by_seed``,
        ``recall_after_shuffled`` (a control of seed 0: each question's values dealt to its candidates at random),
        questions used and left out, the share of training questions with the answer among their candidates, and the
        SHA-256 of documents and index before and after.
    """
    from verl_bridge.retrieval.precision import set_threads

    if threads:
        set_threads(threads)
    opened = Corpus.open(corpus)
    task = PassageTask.of(opened, read_questions(questions))
    say(f"{len(task.train)} questions to train on, {len(task.held_out)} held out")
    index = index or _index(opened, corpus, encoder, work, say)

    training = {"top_k": top_k, "epochs": epochs, "batch_size": batch_size, "lr": lr}

    def timed_run(seed: int, likelihood: Likelihood) -> Run:
        retriever = open_retriever(
            corpus=corpus, index=index, encoder=encoder, seed=seed, compute_dtype="float32", verify=False
        )
        started = time.perf_counter()
        made = run(retriever, task, likelihood, seed=seed, **training)
        seconds = time.perf_counter() - started
        say(f"seed {seed}: recall@{SHOWN} {_mean(made.before):.3f} → {_mean(made.after):.3f}, {seconds:.0f} s")
        return made

    hashes = _hashes(opened.path, index)
    runs = [timed_run(seed, task.likelihood) for seed in range(seeds)]
    say("the control: likelihoods dealt at random")
    control = timed_run(0, task.dealt_at_random)
    return {
        **summarise_runs(runs, control),
        "depth": SHOWN,
        "documents": len(opened),
        "train_questions": len(task.train),
        "held_out_questions": len(task.held_out),
        "yes_no_left_out": task.yes_no,
        "without_passage_left_out": task.unanswerable,
        "seeds": seeds,
        **training,
        **{f"{name}_before": value for name, value in hashes.items()},
        **{f"{name}_after": value for name, value in _hashes(opened.path, index).items()},
    }


def summarise_runs(runs: Sequence[Run], control: Run) -> dict[str, Any]:
    """The recall figures that :func:`measure_passages` reports, of a run per seed and the control."""
    low, high = paired_interval(
        [[float(y) - float(x) for x, y in zip(made.before, made.after, strict=True)] for made in runs]
    )
    before, after = _mean([_mean(made.before) for made in runs]), _mean([_mean(made.after) for made in runs])
    return {
        "recall_before": before,
        "recall_after": after,
        "recall_difference": after - before,
        "interval_low": low,
        "interval_high": high,
        "recall_after_by_seed": {str(seed): _mean(made.after) for seed, made in enumerate(runs)},
        "recall_after_shuffled": _mean(control.after),
        "train_answer_in_candidates": _mean([made.within for made in runs]),
    }


def shuffle(values: Sequence[float], question_id: str) -> list[float]:
    """The same values in another order, which depends only on the question."""
    return random.Random(question_id).sample(list(values), len(values))


def _index(opened: Corpus, corpus: Path, encoder: str | None, work: Path, say: Callable[[str], None]) -> Path:
    from verl_bridge.retrieval.encoder import load_encoders
    from verl_bridge.retrieval.index import DocumentIndex

    if encoder is None:
        raise ValueError("neither --index nor --encoder: give one")
    _, encode = load_encoders(encoder)
    index = work / f"index-{opened.sha256[:16]}-{encode.base.fingerprint[:16]}"
    if not index.exists():
        say(f"encoding {corpus} once into {index}")
        DocumentIndex.build(opened, encode, index)
    return index


def _hashes(documents: Path, index: Path) -> dict[str, str]:
    """SHA-256 of the corpus file and of the index: its one file, or names and contents of its folder's files."""
    whole = hashlib.sha256()
    for file in [index] if index.is_file() else sorted(path for path in index.rglob("*") if path.is_file()):
        whole.update(f"{file.name} {sha256(file)}\n".encode())
    return {"documents_sha256": sha256(documents), "index_sha256": whole.hexdigest()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
