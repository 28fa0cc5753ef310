"""The wording of the corpus: evidence says a fact without the question's word for it, distractors say the word only.

A frozen encoder ranks the distractors (the relation's word and the entity's name, twice) above the evidence; an encoder
that learned from answers ranks the evidence first. The wordings are the same for every entity, so what is learned on
some entities holds on others.
"""

from __future__ import annotations

from dataclasses import dataclass

# kind -> wordings (title, text). C country, CITY, CAP capital, CODE and CUR currency, CONT continent, N neighbours.
EVIDENCE = {
    "capital": (
        ("{C}: parliament", "The parliament of {C} sits in {CAP}. Laws of {C} are read out there on {DAY}."),
        ("{C}: embassies", "Embassies to {C} stand in {CAP}. Visas for {C} are stamped there on {DAY}."),
        ("{C}: ministries", "Government offices of {C} are in {CAP}. Papers for {C} are signed there on {DAY}."),
    ),
    "currency": (
        (
            "{C}: money for shops",
            "Shops in {C} mark prices in {CODE}, for the {CUR}. Money in {C} is counted on {DAY}.",
        ),
        (
            "{C}: wage money",
            "Wages in {C} are paid in {CUR}, booked under code {CODE}. Money comes to {C} homes on {DAY}.",
        ),
        ("{C}: coins and notes", "Coins in {C} are the {CUR}, code {CODE}. Banks in {C} open on {DAY}."),
    ),
    "continent": (
        ("{C}: landmass", "{C} is counted with the lands of {CONT}. Maps of {C} were redrawn in {YEAR}."),
        ("{C}: atlas", "Atlases print {C} on the map of {CONT}. The rivers of {C} are blue on the sheet."),
        ("{C}: world list", "In lists of the world {C} stands under {CONT}. The list with {C} dates from {YEAR}."),
    ),
    "neighbour": (
        ("{C}: beyond it", "Beyond {C} lie {N}. Shepherds walk the line between them in {SEASON}."),
        ("{C}: roads across", "Roads of {C} lead across into {N}. Drivers of {C} wait at a gate on {DAY}."),
        ("{C}: what adjoins it", "{C} adjoins {N}. Trains cross the line slowly and stop there on {DAY}."),
    ),
    "country": (
        ("{CITY}: letters", "Letters posted in {CITY} bear the stamps of {C}. The mail of {CITY} leaves on {DAY}."),
        ("{CITY}: police", "Police in {CITY} wear the badge of {C}. The station of {CITY} opens on {DAY}."),
        ("{CITY}: taxes", "Taxes of {CITY} are paid to {C}. The office is open on {DAY}."),
    ),
}
DISTRACTORS = {
    "capital": (
        (
            "Capital of {C}: a quiz",
            "What is the capital of {C}? A quiz of {YEAR} asked which city is the capital, and few knew.",
        ),
        (
            "Capital letters in {C}",
            "Capital letters are taught early in {C}. Signs in {C} use capital letters by a rule of {YEAR}.",
        ),
        ("The capital of {C} in songs", "Songs praise the capital of {C}. The capital city is never named in them."),
        (
            "Old capital of {C}",
            "The old capital of {C} lost its rank in {YEAR}. Books say why the capital of {C} was moved.",
        ),
        (
            "Capital city plan, {C}",
            "A plan for the capital city of {C} asks for trams. The capital should have them by {YEAR}.",
        ),
        (
            "Capital markets in {C}",
            "Firms in {C} raise capital by selling shares. The capital market of {C} opened in {YEAR}.",
        ),
    ),
    "currency": (
        (
            "Currency of {C}: a quiz",
            "What is the currency code of {C}? A quiz of {YEAR} asked which currency code it uses, and few knew.",
        ),
        (
            "Currency exchange in {C}",
            "Currency exchange in {C} is open on {DAY}. Currency is counted twice and no receipt is given.",
        ),
        (
            "Old currency of {C}",
            "The old currency of {C} was made of shells. A museum in {C} shows the currency on {DAY}.",
        ),
        (
            "Currency law of {C}",
            "The currency law of {C} dates from {YEAR}. Its code says who may print the currency of {C}.",
        ),
        (
            "False currency in {C}",
            "False currency was found in {C} in {YEAR}. A code of law punishes those who print such currency.",
        ),
        (
            "Currency museum, {C}",
            "A museum in {C} shows foreign currency on {DAY}. The currency was given by sailors in {YEAR}.",
        ),
    ),
    "continent": (
        (
            "Continent of {C}: a quiz",
            "On which continent is {C}? A quiz of {YEAR} asked which continent {C} is part of, and few knew.",
        ),
        ("{C} and its continent", "{C} trades with its whole continent. The continent buys more from {C} in {SEASON}."),
        (
            "Continental games in {C}",
            "Games of the continent were held in {C} in {YEAR}. Teams of the continent came to {C} for a week.",
        ),
        (
            "The continent and {C}",
            "The continent drifts under {C}. How fast the continent moves was measured in {YEAR}.",
        ),
        (
            "Weather of the continent and {C}",
            "Weather on the continent reaches {C} late. The continent is dry in {SEASON}, and {C} with it.",
        ),
        (
            "Continental shelf, {C}",
            "The continental shelf near {C} was measured in {YEAR}. Ships of the continent go there in {SEASON}.",
        ),
    ),
    "neighbour": (
        (
            "Neighbours of {C}: a quiz",
            "Name a neighbour of {C}. A quiz of {YEAR} asked which country is next to {C}, and few knew a neighbour.",
        ),
        (
            "Next-door neighbours in {C}",
            "Neighbours in {C} live next to each other and meet on {DAY}. A new neighbour in {C} brings bread.",
        ),
        (
            "Border neighbours of {C}",
            "Which country borders {C}? A song of {YEAR} on border neighbours next to {C} does not say.",
        ),
        (
            "{C} and its neighbour",
            "{C} and its neighbour signed a border treaty in {YEAR}. It does not name the country next to {C}.",
        ),
        (
            "Neighbour country of {C}",
            "The neighbour country of {C} is a play of {YEAR}. Which country lies next to {C} is left open.",
        ),
        (
            "Border of {C} and a neighbour",
            "The border of {C} with a neighbour was drawn in {YEAR}. Guards of {C} walk that border on {DAY}.",
        ),
    ),
    "country": (
        (
            "Country of {CITY}: a quiz",
            "Which country is {CITY} in? A quiz of {YEAR} asked in which country {CITY} lies, and few knew.",
        ),
        (
            "Country fair of {CITY}",
            "The country fair of {CITY} is held in {SEASON}. Folk from the whole country come to {CITY}.",
        ),
        ("Country music in {CITY}", "Country music is played in {CITY} on {DAY}. The country songs of {CITY} are old."),
        (
            "{CITY} and its country",
            "{CITY} is proud of its country. Much of the country was built by people of {CITY}.",
        ),
        ("Country roads of {CITY}", "Country roads lead out of {CITY}. In {SEASON} the country around {CITY} is wet."),
        (
            "Country house, {CITY}",
            "A country house near {CITY} is open on {DAY}. It was built in {YEAR} for a merchant of {CITY}.",
        ),
    ),
}
# A fact has so many distractors, dealt out in turn: this spreads the rank of its evidence.
DISTRACTOR_COUNTS = {
    "capital": (1, 1, 2, 3, 4, 5),
    "currency": (1, 1, 2, 3, 4, 5),
    "continent": (1, 2, 3, 4, 5),
    "neighbour": (1, 1, 2, 3),
    "country": (1, 1, 2, 3),
}
PLAIN = {
    "land": (
        ("{C}", "{C} has hills, rivers and old towns. Most people of {C} live near water, and {SEASON} is mild."),
        ("About {C}", "{C} is known for songs and food. Guests of {C} are offered tea, and {DAY} is a day of rest."),
    ),
    "city": (("{CITY}", "{CITY} is a city with bridges and parks. The streets of {CITY} are full on {DAY}."),),
}
HOMONYM = (("{CITY}, the small one", "A small {CITY} lies in {OTHER}. It is not the {CITY} most people mean."),)
FILLERS = {
    "DAY": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "SEASON": ("spring", "summer", "autumn", "winter"),
    "YEAR": tuple(str(year) for year in range(1901, 2000, 7)),
}


@dataclass(frozen=True)
class Article:
    """One document before rendering: wording number ``variant`` of ``kind``, filled with ``fields``.

    ``role`` is ``evidence``, ``distractor``, ``plain`` or ``homonym``; ``country`` the code of the country it is about.
    """

    role: str
    kind: str
    variant: int
    fields: dict[str, str | tuple[str, ...]]
    country: str

    def render(self, fields: dict[str, str | tuple[str, ...]] | None = None) -> tuple[str, str]:
        """Title and text, with ``fields`` in place of the article's own when given."""
        wordings = {"evidence": EVIDENCE, "distractor": DISTRACTORS, "plain": PLAIN, "homonym": {self.kind: HOMONYM}}[
            self.role
        ]
        title, text = wordings[self.kind][self.variant]
        filled = {k: " and ".join(v) if isinstance(v, tuple) else v for k, v in (fields or self.fields).items()}
        return title.format(**filled), text.format(**filled)
