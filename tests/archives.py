"""Miniature archives of IWSLT'14 and WMT'14 under their real names, with sentences that a tiny model can learn.

    make(folder, pairs=600)     writes them all, the same bytes each time
contents(pairs=600)         returns {archive: {member: bytes}}
write_tar(path, members)    writes one archive with the given members

The members are the files that fairseq's examples/translation/prepare-{iwslt14,wmt14en2de,wmt14en2fr}.sh read, and some
that they do not read. German and English come from the demo; "French" is English with the letters of every word
reversed, so a model can learn it too. `pairs` is the number of training pairs of IWSLT. Each WMT language pair has as
many in all its corpora together.

As in the real texts, some training pairs are odd: one side empty, both empty, 300 words, characters that some programs
treat as line ends (U+2028, U+0085), control characters, all kinds of quotes, and |, <, &, which Moses escapes.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import tarfile
from pathlib import Path

from recipes.demo.generate_corpus import Phrase, corpus

Members = dict[str, bytes]

HELD_OUT = 12
"""Sentences of each development and test set."""
IWSLT_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TALK = 40
"""Sentences of one talk."""

LONG = 300
ODDITIES: list[Phrase] = [
    ("", "One side is empty."),
    ("Eine Seite ist leer.", ""),
    ("", ""),
    ("  ", " "),
    (" ".join(["lang"] * LONG), " ".join(["long"] * LONG)),
    (" ".join(["viel"] * 40), "Forty words against three."),
    ("Ein Trenner\u2028im Satz.", "A separator\u2028in the sentence."),
    ("Ein Umbruch\x85im Satz.", "A next line\x85in the sentence."),
    ("Ein Steuerzeichen \x01 hier.", "A control character \x01 here."),
    ("a | b, 3 < 4 & 5 > 4, [x]", "a | b, 3 < 4 & 5 > 4, [x]"),
    ("Anna\u2019s \u201eKaffee\u201c \u2013 3\xa0%", "Anna\u2019s \u201ccoffee\u201d \u2013 3\xa0%"),
    ("R&amp;D hei\u00dft so.", "R&amp;D is its name."),
    ("  Leerzeichen   am Rand  ", "  Spaces   at the ends  "),
    ("Ein\tTabulator", "A\ttab"),
]
"""Odd (German, English) pairs. Every training text contains each of them."""


def french(words: str) -> str:
    """Reverse the letters of each word, so that it is not an English word. `the ` becomes l + U+2019."""
    turned = re.sub(r"(?<![&\w])[^\W\d_]+", lambda word: word[0][::-1].lower(), words)
    turned = re.sub(r"\beht ", "l\u2019", turned).replace("?", "\xa0?")
    return turned[:1].upper() + turned[1:]


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def side(pairs: list[Phrase], language: str) -> list[str]:
    if language == "fr":
        # For an odd pair, make the French from the German, so that the French has the same oddity.
        return [french(pair[0] if pair in ODDITIES else pair[1]) for pair in pairs]
    return [pair[language == "en"] for pair in pairs]


def parallel(prefix: str, pairs: list[Phrase], source: str) -> Members:
    return {f"{prefix}.{language}": text(side(pairs, language)) for language in (source, "en")}


def with_oddities(pairs: list[Phrase]) -> list[Phrase]:
    """The pairs, with the odd ones spread evenly among them. The first odd pair is not at the start."""
    mixed, step = list(pairs), max(1, len(pairs) // (len(ODDITIES) + 1))
    for number, odd in enumerate(ODDITIES):
        mixed.insert((number + 1) * step + number, odd)
    return mixed


def talks(pairs: list[Phrase], language: str) -> bytes:
    """Text in the format of IWSLT's train.tags files: each talk between lines of metadata."""
    lines = []
    for number, start in enumerate(range(0, len(pairs), TALK)):
        lines += [
            f"<url>http://www.ted.com/talks/lang/{language}/talk_{number}.html</url>",
            *side(pairs[start : start + TALK], language),
            f"<talkid>{1000 + number}</talkid>",
            f"<title>Talk number {number}</title>",
            f"<description>TED talk: {number} & more.</description>",
            "<keywords>talks,numbers</keywords>",
        ]
    return text(lines)


def segments(pairs: list[Phrase], language: str, space: str = "") -> bytes:
    """A set between lines of markup, as in IWSLT's xml files, with spaces in the segments, and in WMT's sgm files."""
    lines = [f'<seg id="{n}">{space}{line}{space}</seg>' for n, line in enumerate(side(pairs, language), start=1)]
    return text(['<doc docid="69">', "<url>http://www.ted.com/talks/x.html</url>", *lines, "</doc>"])


def contents(pairs: int = 600) -> dict[str, Members]:
    """The members of all archives. No sentence is in two sets of one task.

    Args:
        pairs: number of training pairs of IWSLT and of each WMT pair, 50 or more. Oddities are not counted.
    """
    sets = len(IWSLT_SETS) + 3
    drawn = corpus(pairs + sets * HELD_OUT, 1)
    train = drawn[sets * HELD_OUT :]
    # The sets are odd too: characters that fairseq replaces or Moses escapes, and white space at the ends.
    odd = ("Anna\u2019s R&amp;D | x", "Anna\u2019s R&amp;D | x")
    held = [[*drawn[n * HELD_OUT : (n + 1) * HELD_OUT - 1], odd] for n in range(sets)]
    third, fifth = len(train) // 3, len(train) // 5
    of_german = [with_oddities(train[n * third : (n + 1) * third if n < 2 else None]) for n in range(3)]
    of_french = [with_oddities(train[n * fifth : (n + 1) * fifth if n < 4 else None]) for n in range(5)]
    iwslt: Members = {}
    for language in ("de", "en"):
        iwslt[f"de-en/train.tags.de-en.{language}"] = talks(with_oddities(train), language)
        for name, some in zip(IWSLT_SETS, held):
            iwslt[f"de-en/IWSLT14.{name}.de-en.{language}.xml"] = segments(some, language, " ")
    test: Members = {}
    for name, some, source in (("deen", held[-2], "de"), ("fren", held[-1], "fr")):
        for kind, language in itertools.product(("src", "ref"), (source, "en")):
            test[f"test-full/newstest2014-{name}-{kind}.{language}.sgm"] = segments(some, language)

    def both(name: str, number: int) -> Members:
        return {
            **parallel(f"{name}.de-en", of_german[number], "de"),
            **parallel(f"{name}.fr-en", of_french[number], "fr"),
        }

    giga = parallel("giga-fren.release2.fixed", of_french[4], "fr")
    return {
        "de-en.tgz": iwslt,
        "training-parallel-europarl-v7.tgz": both("training/europarl-v7", 0),
        "training-parallel-commoncrawl.tgz": both("commoncrawl", 1),
        "training-parallel-nc-v12.tgz": parallel("training/news-commentary-v12.de-en", of_german[2], "de"),
        "training-parallel-nc-v9.tgz": both("training/news-commentary-v9", 2),
        "training-parallel-un.tgz": parallel("un/undoc.2000.fr-en", of_french[3], "fr"),
        "training-giga-fren.tar": {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in giga.items()},
        "dev.tgz": {f"dev/newstest2013.{language}": text(side(held[-3], language)) for language in ("de", "en", "fr")},
        "test-full.tgz": test,
    }


def write_tar(path: Path, members: Members) -> Path:
    """Write an archive, compressed if its name ends in gz. The same members give the same bytes."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    data = plain.getvalue()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix in (".tgz", ".gz") else data)
    return path


def make(folder: Path, pairs: int = 600) -> Path:
    """Write all archives into `folder`, under their real names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, members in contents(pairs).items():
        write_tar(folder / name, members)
    return folder
