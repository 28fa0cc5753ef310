"""Make the policy that ships with the package: ``python -m verl_bridge.embedded.warm_start --out DIR``.

Supervised search trajectories on training questions (and on the held-out facts marked ``memory``), names replaced in
most of them. About ten minutes on one free CPU core; the run is fixed by its seed and number of steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.embedded.policy import new_policy
from verl_bridge.embedded.tokenizer import train_tokenizer
from verl_bridge.embedded.trajectories import Names, Segment, TrajectoryWriter
from verl_bridge.embedded.world import (
    QUERY_STYLES,
    QUESTION_KINDS,
    World,
    WorldQuestion,
    build_world,
    encoder_dir,
    query,
)
from verl_bridge.files import new_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

ONE_UNTIL, FEW_UNTIL = 0.12, 0.3  # shares of the steps: only evidence, evidence among few, then as retrieved
REPLACED = 0.75
MEMORY_SHARE = 0.09
DOCUMENT_WEIGHT = 0.2  # of document tokens in the loss until then: copying inside documents is practice too
LOG_EVERY = 50  # steps
SHORT_MODES = {"first": 0.35, "reader": 0.2}  # shares of the samples; they are short, about a tenth of the tokens
Batch = tuple["torch.Tensor", "torch.Tensor"]


def tokenizer_texts(world: World) -> Iterator[str]:
    """What the tokenizer learns from: documents as shown, questions, queries and thoughts."""
    for document in world.documents:
        yield f"Doc 1(Title: {document.title}) {document.text}\n"
    for question in world.questions:
        yield f"Question: {question.question}\n"
        relation, first, _ = QUESTION_KINDS[question.kind]
        yield f" Not stated. I need the {first or relation} of {question.entity}. \n\n"
        if question.hops == 1:
            for style in QUERY_STYLES:
                yield f" {query(style, relation, question.entity)} "


def frozen_search(world: World, shown: int = 3) -> dict[str, list[int]]:
    """Rows of the top documents of the frozen encoder for every query a trajectory may ask."""
    import numpy as np
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(encoder_dir()), device="cpu")
    asked = sorted(
        {
            query(style, QUESTION_KINDS[q.kind][1] or QUESTION_KINDS[q.kind][0], q.entity)
            for q in world.questions
            for style in QUERY_STYLES
        }
        | {
            query(style, QUESTION_KINDS[q.kind][0], world.countries[q.country].name)
            for q in world.questions
            if q.hops == 2
            for style in QUERY_STYLES
        }
    )
    documents = encoder.encode([d.contents for d in world.documents], batch_size=64, normalize_embeddings=True)
    queries = encoder.encode(asked, batch_size=128, normalize_embeddings=True)
    top = np.argsort(-(queries @ documents.T), axis=1)[:, :shown]
    return {text: rows.tolist() for text, rows in zip(asked, top, strict=True)}


class _Sampler:
    """Batches of about ``tokens`` tokens, made from the run's random stream."""

    def __init__(
        self, world: World, tokenizer: PreTrainedTokenizerFast, writer: TrajectoryWriter, tokens: int, seed: int
    ) -> None:
        self.tokenizer, self.writer, self.tokens = tokenizer, writer, tokens
        self.rng = random.Random(f"warm-start-{seed}")
        self.by_kind: dict[str, list[WorldQuestion]] = {}
        for question in world.questions:
            if question.split == "train":
                self.by_kind.setdefault(question.kind, []).append(question)
        self.memory = [question for question in world.questions if question.memory]
        self.pool: list[Batch] = []
        self.pool_mode = ""

    def batch(self, progress: float) -> Batch:
        mode = "one" if progress < ONE_UNTIL else "few" if progress < FEW_UNTIL else "full"
        if not self.pool or self.pool_mode != mode:
            self.pool_mode, self.pool = mode, self._fill(mode)
        return self.pool.pop()

    def _fill(self, mode: str, batches: int = 12) -> list[Batch]:
        samples = []
        size = 0
        while size < batches * self.tokens:
            sample = self._sample(mode)
            samples.append(sample)
            size += len(sample[0])
        samples.sort(key=lambda sample: len(sample[0]))
        out, chunk = [], []
        for sample in samples:
            if chunk and (len(chunk) + 1) * len(sample[0]) > self.tokens:
                out.append(_stack(chunk))
                chunk = []
            chunk.append(sample)
        out.append(_stack(chunk))
        self.rng.shuffle(out)
        return out

    def _sample(self, mode: str) -> tuple[list[int], list[float]]:
        rng = self.rng
        if mode == "full" and rng.random() < MEMORY_SHARE:
            return self._encode(self.writer.write(rng.choice(self.memory), rng, "full", replace=False))
        question = rng.choice(self.by_kind[rng.choice(list(self.by_kind))])
        draw = rng.random()
        for short, share in SHORT_MODES.items():
            if draw < share:
                return self._encode(self.writer.write(question, rng, short, replace=rng.random() < REPLACED))
            draw -= share
        return self._encode(self.writer.write(question, rng, mode, replace=rng.random() < REPLACED))

    def _encode(self, segments: list[Segment]) -> tuple[list[int], list[float]]:
        encoded = self.tokenizer([s.text for s in segments], add_special_tokens=False)["input_ids"]
        ids = [i for piece in encoded for i in piece]
        return ids, [s.weight for s, piece in zip(segments, encoded, strict=True) for _ in piece]


def _stack(samples: list[tuple[list[int], list[float]]]) -> Batch:
    """Right-padded ids and loss weights, -1 at padding: (batch, length)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(ids) for ids, _ in samples], batch_first=True)
    weights = pad_sequence(
        [torch.tensor(weights, dtype=torch.float32) for _, weights in samples], batch_first=True, padding_value=-1.0
    )
    return ids, weights


def warm_start(
    out: Path, *, seed: int = 0, steps: int = 1400, tokens: int = 3072, save_every: int = 0
) -> dict[str, Any]:
    """Train the policy and save it with its tokenizer as ``out``. Returns step count, tokens, loss and seconds."""
    import torch

    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    world = build_world(seed)
    tokenizer = train_tokenizer(tokenizer_texts(world))
    policy = new_policy(tokenizer).train()
    shown = frozen_search(world)
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    writer = TrajectoryWriter(world, Names.of(world, pieces), shown.__getitem__)
    sampler = _Sampler(world, tokenizer, writer, tokens, seed)
    matrices = [p for name, p in policy.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in policy.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    started, seen, losses = time.monotonic(), 0, []
    for step in range(steps):
        progress = step / steps
        factor = min(1.0, (step + 1) / 60)
        if progress > 0.4:
            factor *= max(0.02, 0.5 * (1 + math.cos(math.pi * (progress - 0.4) / 0.6)))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = 3e-3 * factor
        ids, weights = sampler.batch(progress)
        weight = weights[:, 1:].clone()
        weight[weight == 0] = DOCUMENT_WEIGHT if progress < FEW_UNTIL else 0.0
        chosen = weight > 0
        with torch.autocast("cpu", dtype=torch.bfloat16):  # weights and optimiser stay in fp32
            hidden = policy.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][chosen]  # (tokens, hidden)
            logits = policy.lm_head(hidden).float()
        per_token = torch.nn.functional.cross_entropy(logits, ids[:, 1:][chosen], reduction="none")
        loss = (per_token * weight[chosen]).sum() / weight[chosen].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        seen += ids.numel()
        losses.append(float(loss.detach()))
        if (step + 1) % LOG_EVERY == 0:
            recent = sum(losses[-LOG_EVERY:]) / LOG_EVERY
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {recent:.3f} tokens {seen:,} seconds {seconds:.0f}", flush=True)
        if save_every and (step + 1) % save_every == 0:
            _save(policy, tokenizer, out.with_name(f"{out.name}-{step + 1}"))
    _save(policy, tokenizer, out)
    return {"steps": steps, "tokens": seen, "loss": losses[-1], "seconds": time.monotonic() - started}


def _save(policy: Any, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    with new_folder(out) as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder, save_jinja_files=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint; replaced if there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens per batch")
    parser.add_argument("--save-every", type=int, default=0, help="also save OUT-<step> that often")
    arguments = parser.parse_args()
    print(
        json.dumps(
            warm_start(
                arguments.out,
                seed=arguments.seed,
                steps=arguments.steps,
                tokens=arguments.tokens,
                save_every=arguments.save_every,
            )
        )
    )


if __name__ == "__main__":
    main()
