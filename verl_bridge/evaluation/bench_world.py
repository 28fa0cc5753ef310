"""A batch of search rollouts made from the embedded world's questions, with what the real retriever finds for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bridge.algorithms.bridge import standardised_outcome
from verl_bridge.bilevel.likelihood import Tokenizer
from verl_bridge.embedded.trajectories import STYLE_WEIGHTS
from verl_bridge.embedded.world import QUERY_STYLES, QUESTION_KINDS, World, WorldQuestion, build_world, query
from verl_bridge.evaluation.bench_tokens import Prompt
from verl_bridge.qa.actions import format_observation
from verl_bridge.retrieval.corpus import Document
from verl_bridge.retrieval.retriever import Retriever, open_retriever

GROUP = 8  # rollouts of one question
SHOWN = 3


@dataclass(frozen=True)
class Search:
    """One search: the rollout ``row`` it belongs to, the tokens of the response up to the query's end, the query
    and its candidates by descending score."""

    row: int
    end: int
    query: str
    candidates: tuple[Document, ...]


@dataclass(frozen=True)
class WorldRollouts:
    """Rollouts of one step as plain containers, one entry per rollout.

    Args:
        prompt_ids, response_ids: token ids.
        response_mask: 1 on what the policy sampled, as long as the response.
        advantages: of the whole trajectory, standardised over its group.
        golds: the gold answer to score.
        searches: of all rollouts, in order.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    response_ids: tuple[tuple[int, ...], ...]
    response_mask: tuple[tuple[int, ...], ...]
    advantages: tuple[float, ...]
    golds: tuple[str, ...]
    searches: tuple[Search, ...]


def world_rollouts(
    corpus: Path, index: Path, prompt: Prompt, tokenize: Tokenizer, *, rollouts: int, top_k: int, seed: int
) -> WorldRollouts:
    """Groups of GROUP rollouts of training questions; the frozen retriever answers every query.

    As in the demo's first steps a rollout searches once or twice per hop, in one of five wordings, and reads the SHOWN
    best of ``top_k`` candidates. It answers right when it was shown the last hop's evidence, and once in ten otherwise.

    Raises:
        ValueError: ``rollouts`` is not a multiple of GROUP.
    """
    import torch

    if rollouts % GROUP:
        raise ValueError(f"--rollouts {rollouts}: give a multiple of {GROUP}, the rollouts of one question")
    world, draw = build_world(), random.Random(seed)
    asked = draw.sample([question for question in world.questions if question.split == "train"], rollouts // GROUP)
    plans = [(question, _queries(world, question, draw)) for question in asked for _ in range(GROUP)]
    found = _search(
        open_retriever(corpus=corpus, index=index, top_k=top_k), [q for _, queries in plans for q in queries]
    )
    columns: dict[str, list[Any]] = {"prompt_ids": [], "response_ids": [], "response_mask": []}
    searches, rewards = [], []
    for row, (question, queries) in enumerate(plans):
        ids: list[int] = []
        mask: list[int] = []

        def write(text: str, sampled: int, ids: list[int] = ids, mask: list[int] = mask) -> None:
            tokens = tokenize(text)
            ids += tokens
            mask += [sampled] * len(tokens)

        shown: tuple[Document, ...] = ()
        for text in queries:
            write(f"<think> I need {text}. </think><search> {text} </search>", 1)
            searches.append(Search(row, len(ids), text, found[text]))
            shown = found[text][:SHOWN]
            write(format_observation(shown), 0)
        evidence = any(document.id in question.evidence_ids for document in shown)
        right = evidence or draw.random() < 0.1
        answer = question.golden_answers[0] if right else draw.choice(asked).entity
        write(f"<think> It is {answer}. </think><answer> {answer} </answer>", 1)
        rewards.append(float(right))
        for name, value in (("prompt_ids", prompt(question.question)), ("response_ids", ids), ("response_mask", mask)):
            columns[name].append(tuple(value))
    advantages = standardised_outcome(torch.tensor(rewards), torch.arange(rollouts) // GROUP)
    return WorldRollouts(
        **{name: tuple(values) for name, values in columns.items()},
        advantages=tuple(advantages.tolist()),
        golds=tuple(question.golden_answers[0] for question, _ in plans),
        searches=tuple(searches),
    )


def _queries(world: World, question: WorldQuestion, draw: random.Random) -> list[str]:
    """What one rollout asks: one or two queries per hop, never the same twice."""
    relation, first, _ = QUESTION_KINDS[question.kind]
    hops = [(relation, question.entity)]
    if first:
        hops = [(first, question.entity), (relation, world.countries[question.country].name)]
    out: list[str] = []
    for asked, entity in hops:
        for _ in range(draw.choice((1, 1, 2))):
            out.append(query(draw.choices(QUERY_STYLES, STYLE_WEIGHTS)[0], asked, entity))
    return list(dict.fromkeys(out))


def _search(retriever: Retriever, queries: Sequence[str]) -> dict[str, tuple[Document, ...]]:
    unique = list(dict.fromkeys(queries))
    return {text: hit.documents for text, hit in zip(unique, retriever.search(unique), strict=True)}
