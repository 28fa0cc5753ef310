"""GCA token by token, straight from traces and the method's table: slow, and written without the package's maths."""

from __future__ import annotations

import math
import re
import statistics
import string
import unicodedata

TABLE = {
    "A": (0.5, -0.5, 0.5),
    "B1": (0.5, -0.5, -1.0),
    "B2": (0.5, -0.25, 0.0),
    "C": (0.0, 0.0, 0.0),
    "D": (0.0, -0.25, -0.5),
}


def normalised(text):
    text = unicodedata.normalize("NFKC", text).lower()
    text = "".join(" " if c in string.punctuation else c for c in text)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def holds(text, alias):
    words, wanted = normalised(text), normalised(alias)
    return bool(wanted) and any(words[i : i + len(wanted)] == wanted for i in range(len(words)))


def cell_salience(margins, entropies, sign, c_max=0.5):
    """Salience of one cell's tokens from the definition, in Python's floats; the factor a by bisection."""
    median = statistics.median(margins)
    mad = statistics.median(abs(m - median) for m in margins)
    raw = [1.0] * len(margins)
    if sign and len(margins) >= 4 and mad >= 1e-6:
        for i, (m, h) in enumerate(zip(margins, entropies, strict=True)):
            z = min(3.0, max(-3.0, (m - median) / (1.4826 * mad)))
            u = 1 / (1 + math.exp(z))
            if sign < 0:
                u, h = 1 - u, 1 - h
            raw[i] = 0.6 * u + 0.3 * h + 0.1 * u * h
    low, high = 0.0, c_max / min(raw)
    for _ in range(200):
        a = (low + high) / 2
        enough = sum(min(c_max, a * value) for value in raw) >= len(raw) * c_max / 2
        low, high = (low, a) if enough else (a, high)
    return [min(c_max, high * value) for value in raw]


def reference_advantages(traces, base, response_mask, uids, rewards, variance_gate=True, margin=None, top_entropy=None):
    """Grounded advantages with the default settings as nested loops over tokens; no variance gate under a critic.

    Salience is uniform without margins and entropies.
    """
    first_hit, correct = [], []
    for trace in traces:
        hits = [
            index
            for index, turn in enumerate(trace.turns)
            if turn.status == "ok" and any(holds(turn.observation, gold) for gold in trace.golden_answers)
        ]
        first = hits[0] if hits else None
        while first is not None and first + 1 < len(trace.turns):  # the calls of one assistant turn are one segment
            call, after = trace.turns[first : first + 2]
            if after.kind == "answer" or after.span[0] > call.span[1]:
                break
            first += 1
        first_hit.append(first)
        answer = trace.answer
        right = answer is not None and any(normalised(answer) == normalised(gold) for gold in trace.golden_answers)
        correct.append(right)
    grounded = base.clone()
    for row, trace in enumerate(traces):
        group = [i for i, uid in enumerate(uids) if uid == uids[row]]
        if variance_gate and len({float(rewards[i]) for i in group}) == 1 and len(group) > 1:
            continue
        if any(normalised(gold) in (["yes"], ["no"]) for gold in trace.golden_answers):
            continue
        hit = first_hit[row] is not None
        if not hit and correct[row]:
            if not any(first_hit[i] is not None for i in group):
                grounded[row] = grounded[row] * 0
                continue
            kind = "D"
        elif hit:
            kind = "A" if correct[row] else "B1" if trace.answer is not None else "B2"
        else:
            kind = "C"
        cells = {}  # segment → its λ and tokens
        for index, turn in enumerate(trace.turns):
            if turn.status == "error":
                continue
            if turn.kind == "search" and hit and index <= first_hit[row]:
                segment = 0
            elif turn.kind == "answer":
                segment = 2
            else:
                segment = 1
            tokens = cells.setdefault(segment, [])
            for token in range(*turn.span):
                if response_mask[row, token] and not any(a <= token < b for a, b in turn.tag_spans):
                    tokens.append(token)
        for segment, tokens in cells.items():
            route, weights = TABLE[kind][segment], [0.25] * len(tokens)
            if margin is not None and tokens:
                weights = cell_salience(
                    [float(margin[row, t]) for t in tokens], [float(top_entropy[row, t]) for t in tokens], route
                )
            for token, weight in zip(tokens, weights, strict=True):
                value = float(base[row, token])
                grounded[row, token] = value + abs(value) * 0.2 * route * weight
    return grounded
