"""The demo's corpus: German-English pairs of dates, times, numbers, prices and places in words.

Seeded: with the same num2words and Babel (CLDR), the same call writes the same bytes. No sentence, German or English,
occurs twice in the whole corpus, so no split shares one with another.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from babel import Locale
from babel.numbers import get_currency_name
from num2words import num2words

from recipes.steps.common import write_lines

SEED = 20200417
VALID, TEST = 500, 1000
"""Of 30,000 pairs."""

# Territories whose German name takes no article: "in Polen", but "in der Schweiz".
TERRITORIES = (
    "AR AT AU BE BG BR CA CL CN CU CY DE DK EE EG ES FI FR GH GR HR HU IE IL IN IS IT JO JP KE LT LU LV MA MT MX "
    "NO NP NZ PE PL PT RO SE SG SI TN UY VN"
).split()
CURRENCIES = "EUR USD GBP SEK PLN JPY INR MXN".split()
LOCALES = {language: Locale(language) for language in ("de", "en")}

# A phrase is (German, English). Nouns here carry their German article in the case the templates need.
Phrase = tuple[str, str]
GOODS: list[Phrase] = [
    ("Bücher", "books"), ("Äpfel", "apples"), ("Stühle", "chairs"), ("Karten", "tickets"), ("Flaschen", "bottles"),
    ("Lampen", "lamps"), ("Hefte", "notebooks"), ("Schlüssel", "keys"), ("Bilder", "pictures"), ("Uhren", "clocks"),
]  # fmt: skip
PEOPLE: list[Phrase] = [
    ("meine Schwester", "my sister"), ("mein Bruder", "my brother"), ("unsere Lehrerin", "our teacher"),
    ("der Arzt", "the doctor"), ("die Nachbarin", "the neighbour"), ("ihr Vater", "her father"),
    ("Anna", "Anna"), ("Peter", "Peter"), ("Maria", "Maria"), ("Jonas", "Jonas"),
]  # fmt: skip
EVENTS: list[Phrase] = [
    ("die Sitzung", "the meeting"), ("das Konzert", "the concert"), ("der Kurs", "the course"),
    ("die Messe", "the fair"), ("das Spiel", "the game"), ("die Vorlesung", "the lecture"),
]  # fmt: skip
PLACES: list[Phrase] = [
    ("das Museum", "the museum"), ("die Bibliothek", "the library"), ("das Rathaus", "the town hall"),
    ("die Post", "the post office"), ("der Markt", "the market"), ("das Theater", "the theatre"),
]  # fmt: skip

words = cache(num2words)


def number(draw: random.Random, low: int, high: int, to: str = "cardinal") -> Phrase:
    n = draw.randint(low, high)
    return words(n, lang="de", to=to), words(n, lang="en", to=to)


def month(draw: random.Random) -> Phrase:
    n = draw.randint(1, 12)
    return LOCALES["de"].months["format"]["wide"][n], LOCALES["en"].months["format"]["wide"][n]


def weekday(draw: random.Random) -> Phrase:
    n = draw.randrange(7)
    return LOCALES["de"].days["format"]["wide"][n], LOCALES["en"].days["format"]["wide"][n]


def territory(draw: random.Random) -> Phrase:
    code = draw.choice(TERRITORIES)
    return LOCALES["de"].territories[code], LOCALES["en"].territories[code]


def day(draw: random.Random) -> Phrase:
    """As in "dritten März", "the third of March"."""
    (day_de, day_en), (month_de, month_en) = number(draw, 1, 28, to="ordinal"), month(draw)
    return f"{day_de}n {month_de}", f"the {day_en} of {month_en}"


def date(draw: random.Random) -> Phrase:
    """To follow "am" and "on", as in "Montag, dem dritten März,", "Monday, the third of March,"."""
    (de, en), (weekday_de, weekday_en) = day(draw), weekday(draw)
    return draw.choice([(de, en), (f"{weekday_de}, dem {de},", f"{weekday_en}, {en},")])


def time(draw: random.Random) -> Phrase:
    """As in "halb neun", "half past eight": German counts the half towards the coming hour."""
    hour = draw.randint(1, 12)
    de, en = ([words(h, lang=lang) for h in (hour, hour % 12 + 1)] for lang in ("de", "en"))
    minutes = draw.choice([5, 10, 20])
    minutes_de, minutes_en = words(minutes, lang="de"), words(minutes, lang="en")
    return draw.choice([
        (f"{'ein' if hour == 1 else de[0]} Uhr", f"{en[0]} o'clock"),
        (f"halb {de[1]}", f"half past {en[0]}"),
        (f"Viertel nach {de[0]}", f"a quarter past {en[0]}"),
        (f"Viertel vor {de[1]}", f"a quarter to {en[1]}"),
        (f"{minutes_de} nach {de[0]}", f"{minutes_en} past {en[0]}"),
        (f"{minutes_de} vor {de[1]}", f"{minutes_en} to {en[1]}"),
    ])  # fmt: skip


def price(draw: random.Random) -> Phrase:
    (de, en), currency = number(draw, 2, 99), draw.choice(CURRENCIES)
    named = [get_currency_name(currency, count=2, locale=language) for language in ("de", "en")]
    return f"{de} {named[0]}", f"{en} {named[1]}"


SLOTS: dict[str, Callable[[random.Random], Phrase]] = {
    "who": lambda draw: draw.choice(PEOPLE),
    "goods": lambda draw: draw.choice(GOODS),
    "event": lambda draw: draw.choice(EVENTS),
    "place": lambda draw: draw.choice(PLACES),
    "n": lambda draw: number(draw, 2, 99),
    "big": lambda draw: number(draw, 101, 999),
    "year": lambda draw: number(draw, 1901, 1999, to="year"),
    **{"date": date, "day": day, "weekday": weekday, "month": month, "price": price},
    **{"time": time, "time2": time, "land": territory, "land2": territory},
}
# The orders differ: German closes a clause with its verb, puts time before place and inverts after an adverbial.
TEMPLATES: list[Phrase] = [
    ("Am {date} um {time}.", "At {time} on {date}."),
    ("Von {land} nach {land2}.", "From {land} to {land2}."),
    ("Von {time} bis {time2}.", "From {time} to {time2}."),
    ("{n} {goods} für {price}.", "{n} {goods} for {price}."),
    ("Im {month} {year} in {land}.", "In {land} in {month} {year}."),
    ("Bis {land} sind es {big} Kilometer.", "It is {big} kilometres to {land}."),
    ("{event} beginnt am {weekday} um {time}.", "{event} starts at {time} on {weekday}."),
    ("{place} ist am {weekday} ab {time} geöffnet.", "{place} is open from {time} on {weekday}."),
    ("{who} wurde {year} in {land} geboren.", "{who} was born in {land} in {year}."),
    ("{who} hat {n} {goods} gekauft.", "{who} bought {n} {goods}."),
    ("Am {day} kommt {who} aus {land}.", "{who} comes from {land} on {day}."),
    ("{who} möchte {n} Tage in {land} bleiben.", "{who} would like to stay in {land} for {n} days."),
    ("{who} sagt, dass es {time} ist.", "{who} says that it is {time}."),
    ("Das Zimmer kostet im {month} {price}.", "The room costs {price} in {month}."),
    ("Kann {who} {price} bezahlen?", "Can {who} pay {price}?"),
    ("Weil {event} um {time} beginnt, kommt {who} am {weekday}.",
     "{who} is coming on {weekday}, because {event} starts at {time}."),
]  # fmt: skip


def sentence(template: str, phrases: dict[str, str]) -> str:
    text = template.format_map(phrases).replace(",.", ".").replace(",?", "?")
    return text[0].upper() + text[1:]


def corpus(size: int, seed: int = SEED) -> list[Phrase]:
    """Draw `size` pairs, with no sentence twice on either side.

    Raises:
        ValueError: the templates ran out before `size` pairs.
    """
    draw = random.Random(seed)
    pairs: dict[str, str] = {}
    english: set[str] = set()
    for _ in range(10 * size):
        template = draw.choice(TEMPLATES)
        drawn = {name: SLOTS[name](draw) for name in re.findall(r"{(\w+)}", template[0])}
        de, en = (sentence(template[side], {name: drawn[name][side] for name in drawn}) for side in (0, 1))
        if de not in pairs and en not in english:
            pairs[de] = en
            english.add(en)
        if len(pairs) == size:
            return list(pairs.items())
    raise ValueError(f"PAIRS={size}: the templates gave {len(pairs)} distinct pairs. Ask for fewer.")


def write(split: str, languages: Sequence[str], prefix: Path, size: int) -> None:
    """Write one split of a corpus, PREFIX.de and PREFIX.en.

    Args:
        size: pairs in the whole corpus.
    """
    if size < 100:
        raise ValueError(f"PAIRS={size}: expected 100 pairs or more, or the test set has fewer than three.")
    pairs, test, valid = corpus(size), size * TEST // 30000, size * VALID // 30000
    splits = {"test": pairs[:test], "valid": pairs[test : test + valid], "train": pairs[test + valid :]}
    for language in languages:
        write_lines(f"{prefix}.{language}", (pair[language == "en"] for pair in splits[split]))
