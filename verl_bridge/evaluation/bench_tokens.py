"""``verl-bridge bench bridge --traces``: how many tokens the answer likelihoods of saved rollouts take.

With the question as context the same (question, document, answer) comes back across turns and rollouts of a group, and
is scored once. The ratio is of the tokens scored to those of scoring every (turn, candidate) in that same context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_bridge.bilevel.likelihood import LikelihoodPlan, RetrievalTurn, Tokenizer, plan_likelihoods
from verl_bridge.evaluation.rollouts import SavedRollout, read_rollouts
from verl_bridge.retrieval.corpus import Corpus

Prompt = Callable[[str], Sequence[int]]
"""A question to the token ids of the prompt that asks it."""


def load_tokenizer(folder: str | os.PathLike) -> tuple[Prompt, Tokenizer]:
    """The demo's prompt of a question, chat template included, and the tokenizer of a policy.

    Raises:
        ValueError: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {folder} ({error}); give a policy's folder or hub name") from error

    def prompt(question: str) -> Sequence[int]:
        messages = [{"role": "user", "content": f"Question: {question}\n"}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def tokenize(text: str) -> Sequence[int]:
        # control tokens spelt out in a passage stay text, as in a rollout
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    return prompt, tokenize


def plan_of(rollouts: Sequence[SavedRollout], corpus: Corpus, prompt: Prompt, tokenize: Tokenizer) -> LikelihoodPlan:
    """The likelihood plan of a step's rollouts with context ``question`` and the first gold.

    Raises:
        ValueError: a candidate is not in the corpus, or no search has two candidates.
    """
    turns = []
    for row, rollout in enumerate(rollouts):
        context = tuple(prompt(rollout.trace.question))
        for index, turn in enumerate(rollout.trace.searches):
            if turn.status == "none":  # the rollout ended before the search was carried out
                continue
            try:
                candidates = tuple(corpus.by_id(document) for document in turn.candidate_ids)
            except KeyError as error:
                raise ValueError(f"{error.args[0]}: give --corpus, the one that these rollouts searched") from None
            golds = rollout.trace.golden_answers[:1]
            turns.append(RetrievalTurn((row, index), context, candidates, golds, turn.status == "error"))
    plan = plan_likelihoods(turns, tokenize)
    if not plan.turn_keys:
        raise ValueError(f"none of {len(turns)} searches has two candidates: give a run's own rollouts/step_N.jsonl")
    return plan


def token_ratio(plan: LikelihoodPlan) -> float:
    """Tokens that are scored, over those of scoring every (turn, candidate)."""
    return plan.metrics["tokens"] / (plan.metrics["tokens"] + plan.metrics["tokens_saved"])


def measure_tokens(
    files: Sequence[str | os.PathLike], corpus: str | os.PathLike, tokenizer: str | os.PathLike
) -> dict[str, Any]:
    """Token ratio of every file and of all together.

    Args:
        files: a run's ``rollouts/step_N.jsonl``; each is a batch of its own.
        corpus: what the run searched.
        tokenizer: folder or hub name of the policy's.

    Returns:
        ``token_ratio``, ``by_step`` (file stem to ratio), ``tokens``, ``tokens_undeduplicated``, ``sequences``,
        ``turns`` (used), ``rollouts``, ``rollouts_a_group``.

    Raises:
        ValueError: two files of one name, and what reading, :func:`plan_of` and :func:`load_tokenizer` raise.
    """
    stems = [Path(file).stem for file in files]
    if len(set(stems)) < len(stems):
        raise ValueError(f"--traces: two files are named {max(stems, key=stems.count)}; give the steps of one run")
    prompt, tokenize = load_tokenizer(tokenizer)
    opened = Corpus.open(corpus)
    by_step: dict[str, float] = {}
    sums = dict.fromkeys(("tokens", "tokens_saved", "sequences", "turns_used"), 0)
    rollouts = groups = 0
    for stem, file in zip(stems, files, strict=True):
        saved = list(read_rollouts(file))
        plan = plan_of(saved, opened, prompt, tokenize)
        by_step[stem] = token_ratio(plan)
        sums = {key: value + int(plan.metrics[key]) for key, value in sums.items()}
        rollouts, groups = rollouts + len(saved), groups + len({rollout.group for rollout in saved})
    everything = sums["tokens"] + sums["tokens_saved"]
    return {
        "token_ratio": sums["tokens"] / everything,
        "by_step": by_step,
        "tokens": sums["tokens"],
        "tokens_undeduplicated": everything,
        "sequences": sums["sequences"],
        "turns": sums["turns_used"],
        "rollouts": rollouts,
        "rollouts_a_group": rollouts / groups,
    }
