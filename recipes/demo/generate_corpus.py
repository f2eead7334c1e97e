"""Write one split of the demo's corpus: German-English pairs of dates, times, numbers, prices and places in words.

    python -m recipes.demo.generate_corpus train de en runs/demo/data/raw/train

writes train.de and train.en. Seeded: with the same num2words and Babel (CLDR), the same call writes the same bytes.
No sentence, German or English, occurs twice in the whole corpus, so no split shares one with another.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from functools import cache

from babel import Locale
from babel.numbers import get_currency_name
from num2words import num2words

from recipes.steps.common import run, write_lines

SEED = 20200417
VALID, TEST = 500, 1000

# Territories whose German name takes no article: "in Polen", but "in der Schweiz".
TERRITORIES = (
    "AR AT AU BE BG BR CA CL CN CU CY DE DK EE EG ES FI FR GH GR HR HU IE IL IN IS IT JO JP KE LT LU LV MA MT MX "
    "NO NP NZ PE PL PT RO SE SG SI TN UY VN"
).split()
CURRENCIES = "EUR USD GBP SEK PLN JPY INR MXN".split()
GERMAN, ENGLISH = Locale("de"), Locale("en")

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


class Phrases:
    """Draws phrases from one random stream. Every method returns the same phrase in German and in English."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def number(self, low: int, high: int) -> Phrase:
        n = self.random.randint(low, high)
        return words(n, lang="de"), words(n, lang="en")

    def ordinal_date(self) -> Phrase:
        """As in "dritten März", "the third of March"."""
        day, month = self.random.randint(1, 28), self.random.randint(1, 12)
        return (
            f"{words(day, lang='de', to='ordinal')}n {GERMAN.months['format']['wide'][month]}",
            f"the {words(day, lang='en', to='ordinal')} of {ENGLISH.months['format']['wide'][month]}",
        )

    def year(self) -> Phrase:
        n = self.random.randint(1901, 1999)
        return words(n, lang="de", to="year"), words(n, lang="en", to="year")

    def weekday(self) -> Phrase:
        day = self.random.randrange(7)
        return GERMAN.days["format"]["wide"][day], ENGLISH.days["format"]["wide"][day]

    def month(self) -> Phrase:
        month = self.random.randint(1, 12)
        return GERMAN.months["format"]["wide"][month], ENGLISH.months["format"]["wide"][month]

    def date(self) -> Phrase:
        """To follow "am" and "on", as in "Montag, dem dritten März,", "Monday, the third of March,"."""
        (de, en), (weekday_de, weekday_en) = self.ordinal_date(), self.weekday()
        return self.random.choice([(de, en), (f"{weekday_de}, dem {de},", f"{weekday_en}, {en},")])

    def time(self) -> Phrase:
        """As in "halb neun", "half past eight": German counts the half towards the coming hour."""
        hour = self.random.randint(1, 12)
        de, en = ([words(h, lang=lang) for h in (hour, hour % 12 + 1)] for lang in ("de", "en"))
        minutes = self.random.choice([5, 10, 20])
        minutes_de, minutes_en = words(minutes, lang="de"), words(minutes, lang="en")
        return self.random.choice([
            (f"{'ein' if hour == 1 else de[0]} Uhr", f"{en[0]} o'clock"),
            (f"halb {de[1]}", f"half past {en[0]}"),
            (f"Viertel nach {de[0]}", f"a quarter past {en[0]}"),
            (f"Viertel vor {de[1]}", f"a quarter to {en[1]}"),
            (f"{minutes_de} nach {de[0]}", f"{minutes_en} past {en[0]}"),
            (f"{minutes_de} vor {de[1]}", f"{minutes_en} to {en[1]}"),
        ])  # fmt: skip

    def price(self) -> Phrase:
        (de, en), currency = self.number(2, 99), self.random.choice(CURRENCIES)
        return (
            f"{de} {get_currency_name(currency, count=2, locale='de')}",
            f"{en} {get_currency_name(currency, count=2, locale='en')}",
        )

    def territory(self) -> Phrase:
        code = self.random.choice(TERRITORIES)
        return GERMAN.territories[code], ENGLISH.territories[code]

    def one_of(self, phrases: list[Phrase]) -> Phrase:
        return self.random.choice(phrases)


SLOTS: dict[str, Callable[[Phrases], Phrase]] = {
    "who": lambda p: p.one_of(PEOPLE),
    "goods": lambda p: p.one_of(GOODS),
    "event": lambda p: p.one_of(EVENTS),
    "place": lambda p: p.one_of(PLACES),
    "n": lambda p: p.number(2, 99),
    "big": lambda p: p.number(101, 999),
    "date": Phrases.date,
    "day": Phrases.ordinal_date,
    "weekday": Phrases.weekday,
    "month": Phrases.month,
    "year": Phrases.year,
    "time": Phrases.time,
    "time2": Phrases.time,
    "price": Phrases.price,
    "land": Phrases.territory,
    "land2": Phrases.territory,
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
    phrases = Phrases(seed)
    pairs: dict[str, str] = {}
    english: set[str] = set()
    for _ in range(10 * size):
        if len(pairs) == size:
            break
        template = phrases.one_of(TEMPLATES)
        drawn = {name: SLOTS[name](phrases) for name in re.findall(r"{(\w+)}", template[0])}
        de, en = (sentence(template[side], {name: drawn[name][side] for name in drawn}) for side in (0, 1))
        if de not in pairs and en not in english:
            pairs[de] = en
            english.add(en)
    if len(pairs) < size:
        raise ValueError(f"the templates gave {len(pairs)} distinct pairs, expected {size}. Ask for fewer.")
    return list(pairs.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("split", choices=("train", "valid", "test"))
    parser.add_argument("languages", nargs=2, choices=("de", "en"), help="source and target")
    parser.add_argument("prefix", help="where to write: PREFIX.de and PREFIX.en")
    parser.add_argument("--size", type=int, default=30000, help="pairs in the whole corpus (default: %(default)s)")
    args = parser.parse_args()
    if args.size < 100:
        raise ValueError(f"--size {args.size}: expected 100 pairs or more, or the test set has fewer than three.")
    pairs = corpus(args.size)
    test = args.size * TEST // 30000
    valid = args.size * VALID // 30000
    splits = {"test": pairs[:test], "valid": pairs[test : test + valid], "train": pairs[test + valid :]}
    for language in args.languages:
        write_lines(f"{args.prefix}.{language}", (pair[language == "en"] for pair in splits[args.split]))


if __name__ == "__main__":
    run(main)
