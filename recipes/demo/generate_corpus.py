"""The demo's corpus: German-English pairs of dates, times, numbers, prices and places in words.

The templates and nouns are in phrases.tsv. The corpus is seeded: with the same num2words and Babel (CLDR), the same
call writes the same bytes. No sentence, German or English, occurs twice in the corpus, so splits share no sentence.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from babel import Locale
from babel.numbers import get_currency_name
from num2words import num2words

from recipes.steps.common import read_lines, write_lines

SEED = 20200417
VALID, TEST = 500, 1000
"""Sizes of the validation and test sets in a corpus of 30,000 pairs."""

# Territories whose German name has no article: "in Polen", but "in der Schweiz".
TERRITORIES = (
    "AR AT AU BE BG BR CA CL CN CU CY DE DK EE EG ES FI FR GH GR HR HU IE IL IN IS IT JO JP KE LT LU LV MA MT MX "
    "NO NP NZ PE PL PT RO SE SG SI TN UY VN"
).split()
CURRENCIES = "EUR USD GBP SEK PLN JPY INR MXN".split()
LOCALES = Locale("de"), Locale("en")

Phrase = tuple[str, str]
"""German and English."""


@functools.cache
def phrases(kind: str) -> list[Phrase]:
    """The phrases of a kind, such as ("die Sitzung", "the meeting")."""
    rows = [line.split("\t") for line in read_lines(Path(__file__).with_name("phrases.tsv"))]
    return [(row[1], row[2]) for row in rows if row[0] == kind]


@functools.cache
def words(n: int, to: str = "cardinal") -> Phrase:
    return num2words(n, lang="de", to=to), num2words(n, lang="en", to=to)


def calendar(names: str, n: int) -> Phrase:
    """The name of a day or month."""
    de, en = (getattr(locale, names)["format"]["wide"][n] for locale in LOCALES)
    return de, en


def day(draw: random.Random) -> Phrase:
    """A day, such as "dritten März", "the third of March"."""
    (day_de, day_en), (month_de, month_en) = words(draw.randint(1, 28), "ordinal"), SLOTS["month"](draw)
    return f"{day_de}n {month_de}", f"the {day_en} of {month_en}"


def date(draw: random.Random) -> Phrase:
    """A date after "am" and "on", such as "Montag, dem dritten März,", "Monday, the third of March,"."""
    (de, en), (weekday_de, weekday_en) = day(draw), SLOTS["weekday"](draw)
    return draw.choice([(de, en), (f"{weekday_de}, dem {de},", f"{weekday_en}, {en},")])


def time(draw: random.Random) -> Phrase:
    """A time, such as "halb neun", "half past eight": German names the coming hour."""
    hour = draw.randint(1, 12)
    (de, en), (next_de, next_en) = words(hour), words(hour % 12 + 1)
    minutes_de, minutes_en = words(draw.choice([5, 10, 20]))
    return draw.choice([
        (f"{'ein' if hour == 1 else de} Uhr", f"{en} o'clock"),
        (f"halb {next_de}", f"half past {en}"),
        (f"Viertel nach {de}", f"a quarter past {en}"),
        (f"Viertel vor {next_de}", f"a quarter to {next_en}"),
        (f"{minutes_de} nach {de}", f"{minutes_en} past {en}"),
        (f"{minutes_de} vor {next_de}", f"{minutes_en} to {next_en}"),
    ])  # fmt: skip


def price(draw: random.Random) -> Phrase:
    amount, currency = words(draw.randint(2, 99)), draw.choice(CURRENCIES)
    de, en = (f"{n} {get_currency_name(currency, 2, locale)}" for n, locale in zip(amount, LOCALES))
    return de, en


def territory(draw: random.Random) -> Phrase:
    code = draw.choice(TERRITORIES)
    return LOCALES[0].territories[code], LOCALES[1].territories[code]


SLOTS: dict[str, Callable[[random.Random], Phrase]] = {
    "n": lambda draw: words(draw.randint(2, 99)),
    "big": lambda draw: words(draw.randint(101, 999)),
    "year": lambda draw: words(draw.randint(1901, 1999), "year"),
    "month": lambda draw: calendar("months", draw.randint(1, 12)),
    "weekday": lambda draw: calendar("days", draw.randrange(7)),
    **{"land": territory, "date": date, "day": day, "time": time, "price": price},
    "goods": lambda draw: draw.choice(phrases("goods")),
    "who": lambda draw: draw.choice(phrases("who")),
    "event": lambda draw: draw.choice(phrases("event")),
    "place": lambda draw: draw.choice(phrases("place")),
}


def sentence(template: str, filled: dict[str, str]) -> str:
    text = template.format_map(filled).replace(",.", ".").replace(",?", "?")
    return text[0].upper() + text[1:]


def corpus(size: int, seed: int = SEED) -> list[Phrase]:
    """Draw `size` pairs. No sentence occurs twice on either side.

    Raises:
        ValueError: the templates do not give `size` different pairs.
    """
    draw = random.Random(seed)
    pairs: dict[str, str] = {}
    english: set[str] = set()
    for _ in range(10 * size):
        template = draw.choice(phrases("template"))
        drawn = {name: SLOTS[name.rstrip("2")](draw) for name in re.findall(r"{(\w+)}", template[0])}
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
        size: number of pairs in the whole corpus.
    """
    pairs, test, valid = corpus(size), size * TEST // 30000, size * VALID // 30000
    splits = {"test": pairs[:test], "valid": pairs[test : test + valid], "train": pairs[test + valid :]}
    for language in languages:
        write_lines(f"{prefix}.{language}", (pair[language == "en"] for pair in splits[split]))
