"""The shipped policy loads, its tokenizer loses nothing, and its rollouts are searches that end in an answer."""

from __future__ import annotations

import random
import unicodedata
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_bridge.embedded.policy import POLICY_DIR, new_policy
from verl_bridge.embedded.tokenizer import EOS, TAGS
from verl_bridge.embedded.trajectories import Names, TrajectoryWriter
from verl_bridge.embedded.warm_start import warm_start
from verl_bridge.embedded.world import QUESTION_KINDS, build_world
from verl_bridge.qa.actions import format_observation, parse_action
from verl_bridge.qa.answers import exact_match

TURNS = 5


@cache
def shipped_tokenizer():
    return AutoTokenizer.from_pretrained(POLICY_DIR)


@pytest.fixture
def tokenizer():
    return shipped_tokenizer()


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def world():
    return build_world(0)


def test_checkpoint_is_small_and_of_the_expected_kind(policy, tokenizer):
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) <= 6_000_000
    config = policy.config
    assert config.model_type == "qwen2" and config.tie_word_embeddings
    assert config.hidden_size // config.num_attention_heads >= 32
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id and config.pad_token_id == tokenizer.pad_token_id
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in policy.parameters())


@given(st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(text):
    """Up to Unicode's composed form, which the tokenizers of this model family normalise to."""
    tokenizer = shipped_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == unicodedata.normalize("NFC", text)


def test_tags_are_single_ordinary_tokens(tokenizer):
    text = "<think> a </think><search> b </search>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    for tag in TAGS:
        assert tokenizer.encode(tag) == [tokenizer.convert_tokens_to_ids(tag)]
        assert tag not in tokenizer.all_special_tokens
    assert tokenizer.eos_token == EOS


def test_chat_template_joins_contents(tokenizer):
    messages = [{"role": "user", "content": "Question: Where?\n"}, {"role": "assistant", "content": "<think> x"}]
    expected = tokenizer.encode("Question: Where?\n") + tokenizer.encode("<think> x")
    assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) == expected


@torch.no_grad()
def rollouts(policy, tokenizer, world, questions, shown):
    """Texts of greedy rollouts; ``shown(question, query)`` gives the documents of an observation."""
    stops = [tokenizer.convert_tokens_to_ids(t) for t in ("</search>", "</answer>")] + [tokenizer.eos_token_id]
    texts = {q.id: f"Question: {q.question}\n" for q in questions}
    ids = {q.id: tokenizer.encode(texts[q.id]) for q in questions}
    results = {q.id: {"searches": 0, "answer": None, "bad": False, "tokens": 0} for q in questions}
    live = list(questions)
    for _ in range(TURNS):
        if not live:
            break
        tokenizer.padding_side = "left"
        batch = tokenizer.pad({"input_ids": [ids[q.id] for q in live]}, return_tensors="pt")
        new = policy.generate(
            **batch, max_new_tokens=80, do_sample=False, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
        )[:, batch["input_ids"].shape[1] :].tolist()
        following = []
        for question, tokens in zip(live, new, strict=True):
            end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
            result, action = results[question.id], parse_action(tokenizer.decode(tokens[:end]))
            ids[question.id] = ids[question.id] + tokens[:end]
            if action.kind == "search":
                observation = format_observation(shown(question, action.content))
                ids[question.id] = ids[question.id] + tokenizer.encode(observation)
                result["searches"] += 1
                following.append(question)
            elif action.kind == "answer":
                result["answer"] = action.content
            else:
                result["bad"] = True
        live = following
    for question in questions:
        results[question.id]["tokens"] = len(ids[question.id])
    return results


def test_rollouts_are_well_formed_and_use_their_evidence(policy, tokenizer, world):
    """With a retriever that always shows the evidence of the hop asked for, among two other documents."""
    rng = random.Random(1)
    questions = rng.sample([q for q in world.questions if q.split == "validation"], 48)
    stated: dict[str, list] = {}
    for article, document in zip(world.articles, world.documents, strict=True):
        if article.role == "evidence" and article.kind == "country":
            stated.setdefault(article.fields["CITY"], []).append(document)

    def shown(question, query):
        first_hop = QUESTION_KINDS[question.kind][1] and question.entity in query
        evidence = stated[question.entity][0] if first_hop else world.documents[int(question.evidence_ids[0])]
        documents = [evidence, *rng.sample(world.documents, 2)]
        rng.shuffle(documents)
        return documents

    results = rollouts(policy, tokenizer, world, questions, shown)
    well_formed = [not r["bad"] and r["answer"] is not None and r["searches"] > 0 for r in results.values()]
    assert sum(well_formed) / len(well_formed) >= 0.95
    assert sum(r["searches"] for r in results.values()) / len(results) <= 2
    right = [exact_match(results[q.id]["answer"], q.golden_answers) for q in questions]
    assert sum(right) / len(right) >= 0.6


def test_answer_likelihood_favours_the_document_that_states_it(policy, tokenizer, world):
    """In BRIDGE's context: a document up front, then the answer."""
    rng = random.Random(2)
    questions = rng.sample([q for q in world.questions if q.split == "validation" and q.hops == 1], 24)
    answer_ids, weights = {}, []
    for question in questions:
        rows = [int(question.evidence_ids[0])]
        about = [
            i
            for i, article in enumerate(world.articles)
            if article.role in ("distractor", "plain") and question.entity in article.fields.values()
        ]
        rows += rng.sample(about, min(3, len(about))) + rng.sample(range(len(world.documents)), 9 - min(3, len(about)))
        answer_ids[question.id] = tokenizer.encode(f" {question.golden_answers[0]}")
        scores = []
        for row in rows:
            block = format_observation([world.documents[row]]).removeprefix("\n\n")
            context = tokenizer.encode(f"Question: {question.question}\n") + tokenizer.encode(f"{block}<answer>")
            ids = torch.tensor([context + answer_ids[question.id]])
            with torch.no_grad():
                log_probs = policy(input_ids=ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
            scores.append(log_probs.gather(1, ids[0, len(context) :, None]).sum())
        weights.append(float(torch.softmax(torch.stack(scores) / 0.5, 0)[0]))
    assert sum(weights) / len(weights) >= 0.7  # a tenth would be uniform


def test_trajectories_replace_names_consistently(world, tokenizer):
    pieces = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    rows = {i for i, article in enumerate(world.articles) if article.country == "KE"}
    writer = TrajectoryWriter(world, Names.of(world, pieces), lambda query: sorted(rows)[:3])
    question = next(q for q in world.questions if q.kind == "currency_of_capital" and q.entity == "Nairobi")
    for seed in range(20):
        segments = writer.write(question, random.Random(seed), "few", replace=True)
        text = "".join(segment.text for segment in segments)
        assert segments[0].text.startswith("Question: ") and segments[0].weight == 0
        assert text.endswith(" </answer><eos>") and text.count("<search>") == text.count("<information>") == 2
        answer = text.rsplit("<answer> ", 1)[1].split(" </answer>")[0]
        assert answer in segments[-2].text, "the answer stands in the last observation"
        assert all("<search>" not in s.text for s in segments if s.weight == 0)
    plain = "".join(s.text for s in writer.write(question, random.Random(0), "few", replace=False))
    assert "Nairobi" in plain and plain.rsplit("<answer> ", 1)[1].startswith("KES")


def test_warm_start_repeats_itself(tmp_path, monkeypatch):
    """Two steps from the same seed give the same weights; the tokenizer is that of the shipped policy."""
    from verl_bridge.embedded import warm_start as module

    monkeypatch.setattr(module, "frozen_search", lambda world: defaultdict(lambda: [0, 1, 2]))
    made = []
    for name in ("one", "two"):
        warm_start(tmp_path / name, seed=0, steps=2, tokens=256)
        made.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])
    shipped = (POLICY_DIR / "tokenizer.json").read_text(encoding="utf-8")
    assert (tmp_path / "one" / "tokenizer.json").read_text(encoding="utf-8") == shipped


def test_samples_are_padded_with_their_weights():
    from verl_bridge.embedded.warm_start import _stack

    ids, weights = _stack([([5, 6], [0, 1]), ([7, 8, 9], [1, 0.2, 0.0])])
    assert ids.tolist() == [[5, 6, 0], [7, 8, 9]] and ids.dtype == torch.long
    assert torch.equal(weights, torch.tensor([[0.0, 1.0, -1.0], [1.0, 0.2, 0.0]]))


def test_a_policy_is_saved_whole_or_not_at_all(policy, tokenizer, tmp_path, monkeypatch):
    from verl_bridge.embedded.warm_start import _save

    _save(policy, tokenizer, tmp_path / "policy")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= kept.keys()

    def full(*arguments, **settings):
        raise OSError("no space left")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="no space left"):
        _save(new_policy(tokenizer), tokenizer, tmp_path / "policy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == kept
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_new_policy_is_prepared_for_copying(tokenizer):
    """On a repeated random sequence: layer 0 looks at the previous token, layer 1 at what followed the same token."""
    torch.manual_seed(0)
    policy = new_policy(tokenizer).eval()
    policy.set_attn_implementation("eager")
    half = torch.randint(10, len(tokenizer), (8, 30))
    with torch.no_grad():
        first, second, *_ = policy.model(
            input_ids=torch.cat([half, half], 1), output_attentions=True
        ).attentions  # (batch, head, query, key)
    assert torch.stack([first[:, 0, i, i - 1] for i in range(1, 60)]).mean() > 0.9
    matched = torch.stack([second[:, :2, i, i - 29] for i in range(30, 59)]).mean(dim=(0, 1))
    others = torch.stack([second[:, 2:, i, i - 29] for i in range(30, 59)]).mean()
    assert (matched > 2 * others).all()  # the two prepared heads against the two that are not
