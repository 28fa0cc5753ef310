"""GCA token by token, straight from traces and METHODS' table: slow, and written without the package's maths."""

from __future__ import annotations

import re
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


def reference_advantages(traces, base, response_mask, uids, rewards, variance_gate=True):
    """Grounded advantages with the default settings as nested loops over tokens; no variance gate under a critic."""
    first_hit, correct = [], []
    for trace in traces:
        hits = [
            index
            for index, turn in enumerate(trace.turns)
            if turn.status == "ok" and any(holds(turn.observation, gold) for gold in trace.golden_answers)
        ]
        first_hit.append(hits[0] if hits else None)
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
        for index, turn in enumerate(trace.turns):
            if turn.status == "error":
                continue
            if turn.kind == "search" and hit and index <= first_hit[row]:
                route = TABLE[kind][0]
            elif turn.kind == "answer":
                route = TABLE[kind][2]
            else:
                route = TABLE[kind][1]
            for token in range(*turn.span):
                if response_mask[row, token] and not any(a <= token < b for a, b in turn.tag_spans):
                    value = float(base[row, token])
                    grounded[row, token] = value + abs(value) * 0.2 * route * 0.25
    return grounded
