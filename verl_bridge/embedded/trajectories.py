"""Search trajectories to imitate: written from the world's facts, with names replaced so that copying is learned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from verl_bridge.embedded.articles import EVIDENCE, Article
from verl_bridge.embedded.facts import CONTINENTS
from verl_bridge.embedded.world import QUERY_STYLES, QUESTION_KINDS, World, WorldQuestion, query
from verl_bridge.qa.actions import format_observation
from verl_bridge.retrieval.corpus import Document

STYLE_WEIGHTS = (0.3, 0.25, 0.15, 0.2, 0.1)
# field -> pool its replacement comes from
_POOLS = {"C": "country", "OTHER": "country", "N": "country", "CAP": "place", "CITY": "place"}
_POOLS |= {"CUR": "currency", "CODE": "code", "CONT": "continent"}
_ASKED = {"capital": "CAP", "currency": "CODE", "continent": "CONT", "neighbour": "N", "country": "C"}


@dataclass(frozen=True)
class Segment:
    """A piece of a trajectory. ``weight`` is its weight in the loss, 0 for what the policy does not write."""

    text: str
    weight: float


@dataclass(frozen=True)
class Names:
    """Names to draw replacements from: ``pools`` of real ones, and word pieces to make up new ones."""

    pools: dict[str, tuple[str, ...]]
    starts: tuple[str, ...]
    endings: tuple[str, ...]

    @classmethod
    def of(cls, world: World, pieces: list[str]) -> Names:
        """The world's own names (facts are not given away: which goes with which is drawn) and a vocabulary's
        ``pieces``, those that begin a word with a leading space."""
        countries = world.countries.values()
        pools = {
            "country": tuple(sorted({c.name for c in countries} | {n for c in countries for n in c.neighbours})),
            "place": tuple(sorted({c.capital for c in countries} | {c.name for c in world.cities})),
            "currency": tuple(sorted({c.currency_name for c in countries})),
            "code": tuple(sorted({c.currency_code for c in countries})),
            "continent": tuple(CONTINENTS.values()),
        }
        words = [p for p in pieces if p.isascii() and p.strip().isalpha()]
        starts = tuple(w[1:] for w in words if w[0] == " ")
        return cls(pools, starts, tuple(w for w in words if w[0] != " "))


@dataclass
class _Renaming:
    """Consistent replacements within one trajectory; the identity when ``names`` is None."""

    names: Names | None
    rng: random.Random
    known: dict[tuple[str, str], str] = field(default_factory=dict)

    def __call__(self, pool: str, name: str) -> str:
        if self.names is None:
            return name
        if (pool, name) not in self.known:
            used = set(self.known.values())
            drawn = self._draw(pool)
            while pool != "continent" and drawn in used:
                drawn = self._draw(pool)
            self.known[pool, name] = drawn
        return self.known[pool, name]

    def _draw(self, pool: str) -> str:
        rng = self.rng
        if pool == "continent" or rng.random() < 0.5:
            return rng.choice(self.names.pools[pool])
        if pool == "code":
            return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(3))
        word = rng.choice(self.names.starts) + "".join(
            rng.choice(self.names.endings) for _ in range(rng.choice((0, 0, 1, 1, 2)))
        )
        return f"{word} {rng.choice(self.names.starts)}" if rng.random() < 0.25 else word

    def fields(self, fields: dict[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
        def swap(key: str, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
            if key not in _POOLS:
                return value
            if isinstance(value, tuple):
                return tuple(self(_POOLS[key], v) for v in value)
            return self(_POOLS[key], value)

        return {key: swap(key, value) for key, value in fields.items()}


Search = Callable[[str], list[int]]
"""The rows of the documents the frozen retriever shows for a query."""


class TrajectoryWriter:
    """Writes trajectories for questions of a world.

    Args:
        world: the world.
        names: replacement names.
        search: rows of the top documents for a query.
        shown: documents an observation holds.
    """

    def __init__(self, world: World, names: Names, search: Search, shown: int = 3) -> None:
        self.world, self.names, self.search, self.shown = world, names, search, shown
        self.evidence = [i for i, article in enumerate(world.articles) if article.role == "evidence"]
        self.of_country: dict[str, list[int]] = {}
        self.facts: dict[tuple[str, str], list[int]] = {}
        for i in self.evidence:
            article = world.articles[i]
            self.of_country.setdefault(article.country, []).append(i)
            if article.kind == "country":
                self.facts.setdefault(("country", article.fields["CITY"]), []).append(i)
            else:
                self.facts.setdefault((article.kind, article.fields["C"]), []).append(i)
            if article.kind == "capital":
                self.facts.setdefault(("country", article.fields["CAP"]), []).append(i)

    def write(self, question: WorldQuestion, rng: random.Random, mode: str, replace: bool) -> list[Segment]:
        """One trajectory.

        Args:
            question: one of the world's.
            rng: where all choices are drawn from.
            mode: ``first`` (only the first turn), ``reader`` (a document given up front, then the answer: the context
                of BRIDGE's answer likelihood), ``one`` (each search brings only its evidence), ``few`` (evidence among
                two or three documents) or ``full`` (what the frozen retriever shows, evidence added half of the time).
            replace: whether names are replaced.
        """
        return _Writing(self, question, rng, mode, replace).run()


class _Writing:
    """One trajectory in the making."""

    def __init__(
        self, writer: TrajectoryWriter, question: WorldQuestion, rng: random.Random, mode: str, replace: bool
    ) -> None:
        self.w, self.q, self.rng, self.mode = writer, question, rng, mode
        self.real = not replace
        self.rename = _Renaming(writer.names if replace else None, rng)
        self.relation, self.first, self.wordings = QUESTION_KINDS[question.kind]
        self.entity_pool = "place" if self.first or self.relation == "country" else "country"
        self.country = writer.world.countries[question.country].name
        self.searches = 0
        self.segments: list[Segment] = []

    def run(self) -> list[Segment]:
        entity = self.rename(self.entity_pool, self.q.entity)
        self.segments.append(Segment(f"Question: {self.rng.choice(self.wordings).format(E=entity)}\n", 0))
        if self.mode == "reader":
            last = self.q.entity if self.q.hops == 1 else self.country
            row = self.rng.choice(self.w.facts[self.relation, last])
            block = format_observation([self._document(row)]).removeprefix("\n\n")
            self.segments += [
                Segment(f"{block}<answer>", 0),
                Segment(f" {self._fact(row, self.relation)[1]} </answer>", 1),
            ]
            return self.segments
        known, pool, prefix = self.q.entity, self.entity_pool, ""
        if self.first:
            row = self._look_up(self.first, known, pool, prefix)
            if self.mode == "first":
                return self.segments
            if row is None:
                return self._give_up()
            known, pool, prefix = self.country, "country", self._fact(row, "country")[0] + " "
        row = self._look_up(self.relation, known, pool, prefix)
        if self.mode == "first":
            return self.segments
        if row is None:
            return self._give_up()
        sentence, answer = self._fact(row, self.relation)
        self.segments.append(Segment(f"<think> {sentence} </think><answer> {answer} </answer><eos>", 1))
        return self.segments

    def _look_up(self, relation: str, entity: str, pool: str, prefix: str) -> int | None:
        """Search once or twice; the row of the evidence when it was shown."""
        style = self.rng.choices(QUERY_STYLES, STYLE_WEIGHTS)[0]
        row = self._search(style, relation, entity, pool, prefix)
        again = 0.55 if self.q.hops == 1 else 0.4
        if row is None and self.mode == "full" and self.searches < 3 and self.rng.random() < again:
            style = self.rng.choice([other for other in QUERY_STYLES[:4] if other != style])
            row = self._search(style, relation, entity, pool, "Not stated. ")
        return row

    def _search(self, style: str, relation: str, entity: str, pool: str, prefix: str) -> int | None:
        name = self.rename(pool, entity)
        self.searches += 1
        thought = f"{prefix}I need the {relation} of {name}."
        self.segments.append(Segment(f"<think> {thought} </think><search> {query(style, relation, name)} </search>", 1))
        if self.mode == "first":
            return None
        evidence = self.w.facts[relation, entity]
        rows = self._shown(query(style, relation, entity), evidence)
        self.segments.append(Segment(format_observation([self._document(row) for row in rows]), 0))
        return next((row for row in rows if row in evidence), None)

    def _shown(self, asked: str, evidence: list[int]) -> list[int]:
        rng, row = self.rng, self.rng.choice(evidence)
        if self.mode == "one":
            return [row]
        rows = list(self.w.search(asked)[: self.w.shown])
        if self.mode == "few" or rng.random() < 0.5:
            if rng.random() < 0.35:  # what a better retriever shows: other facts of the country, or of other countries
                near = self.w.of_country[self.q.country] if rng.random() < 0.6 else self.w.evidence
                rows = rng.sample(near, min(len(near), self.w.shown))
            rows = [row, *(r for r in rows if r not in evidence)][
                : self.w.shown if self.mode == "full" else rng.choice((2, 3))
            ]
            rng.shuffle(rows)
        return rows

    def _document(self, row: int) -> Document:
        article = self.w.world.articles[row]
        title, text = article.render(self.rename.fields(article.fields))
        return Document(str(row), title, text)

    def _fact(self, row: int, relation: str) -> tuple[str, str]:
        """The sentence of a document that states a fact, and the answer in it."""
        article: Article = self.w.world.articles[row]
        fields = self.rename.fields(article.fields)
        sentence = EVIDENCE[article.kind][article.variant][1].split(". ")[0] + "."
        found = fields[_ASKED[relation]]
        answer = found[0] if isinstance(found, tuple) else found
        filled = {k: " and ".join(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        return sentence.format(**filled), answer

    def _give_up(self) -> list[Segment]:
        """Without evidence: the fact itself when it is one to remember, else a guess."""
        if self.real and (self.q.memory or self.rng.random() < 0.3):
            answer, weight = self.q.golden_answers[0], 1.0
        else:
            answer, weight = self.rng.choice(self.w.names.pools[_POOLS[_ASKED[self.relation]]]), 0.2
        self.segments += [
            Segment("<think> Not stated. </think><answer>", 1),
            Segment(f" {answer}", weight),
            Segment(" </answer><eos>", 1),
        ]
        return self.segments
