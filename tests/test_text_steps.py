"""The recipes' text steps: tokens and cleaning match Moses, merges match subword-nmt, and files are whole or absent."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import archives
import pytest
from conftest import names

from fairseq_admin.text.bpe import BPE
from fairseq_admin.text.tokens import Text
from recipes.steps import bpe, cleaning, common, pairs, streaming
from recipes.steps.common import read_lines, write_lines

PLAIN = Text("de", "en")
PERL = Text("de", "en", escape=True, perl=True)
ACCENTS = [
    "Élève, où est l'été ? « Ça va »",
    "Łódź — naïve façade",
    "Größe: 3,5 m²",
    "Привет, мир!",
    "日本語の文です。",
]


def refused(step, *given: object) -> str:
    """The error message that tells the user what to fix."""
    with pytest.raises(ValueError) as refusal:
        step(*given)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def pair(prefix: Path, german: list, english: list) -> Path:
    write_lines(f"{prefix}.de", german)
    write_lines(f"{prefix}.en", english)
    return prefix


@pytest.fixture
def many(tmp_path):
    """A text of a few thousand pairs, and its text settings."""
    random_ = random.Random(1)
    words = "Haus Hund, lief. \"schnell\" z.B. U.S. 3,5 l'eau it's & | e\u0301 😀".split()
    lines = [" ".join(random_.choices(words, k=random_.randrange(30))) for _ in range(6000)]
    PERL.write(tmp_path / "text.json")
    return pair(tmp_path / "raw", lines, lines[::-1])


VERSIONS = [
    (2, "a4747996bf43a486623fec9c9cca04056c0a2d29dce601ddbfa46764014ad6c1"),
    (1, "b6ed6037864e5c6851fd7589494fb5cd2972e68a8d1af2e9e3ecff37e3dab541"),
]
"""pairs.VERSION and bpe.VERSION, each with the SHA-256 of what it makes from odd lines."""


def test_another_tokenisation_or_bpe_has_another_version(tmp_path):
    """If this fails, raise the VERSION of that file and change VERSIONS. Older texts are then prepared again."""
    odd = [
        *ACCENTS,
        *(line for pair in archives.ODDITIES for line in pair),
        "ZWNJ \u200c, ZWJ \u200d, VT \x0b, FF \x0c.",
    ]
    ways = [Text("de", "en"), PERL, Text("de", "en", lowercase=True, normalise=True, aggressive_dashes=True)]
    tokens = [text.tokenise(line, language) for text in ways for line in odd for language in ("de", "en")]
    write_lines(tmp_path / "codes", bpe.learn(tokens, 100))
    units = [*read_lines(tmp_path / "codes"), *BPE(tmp_path / "codes").apply(tokens)]
    made = [(pairs.VERSION, tokens), (bpe.VERSION, units)]
    assert [(version, hashlib.sha256("\n".join(lines).encode()).hexdigest()) for version, lines in made] == VERSIONS


# -- lines -----------------------------------------------------------------------------------------------------------


def test_lines_end_at_newlines_only(tmp_path):
    lines = ["a\u2028b", "c\x85d", "", "e\rf", "g\x0bh"]
    write_lines(tmp_path / "text", lines)
    assert read_lines(tmp_path / "text") == lines
    (tmp_path / "text").write_bytes(b"one\ntwo")
    assert read_lines(tmp_path / "text") == ["one", "two"]


# -- workers ---------------------------------------------------------------------------------------------------------


def _slow_square(number: int) -> int:
    time.sleep(0.02 * (number % 3))
    if number == 99:
        raise ValueError("99 is too much")
    if number == 98:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_order_and_items_are_read_as_needed(count, monkeypatch):
    monkeypatch.setattr(streaming, "cores", lambda: count)
    read = []

    def items():
        for number in range(30):
            read.append(number)
            yield number

    for done, result in enumerate(streaming.parallel(_slow_square, items()), 1):
        assert result == (done - 1) ** 2
        assert len(read) < done + streaming.AHEAD * count, "memory grows with what is read ahead"
    assert done == 30


@pytest.mark.parametrize(("number", "message"), [(99, "99 is too much"), (98, "a worker process ended")])
def test_a_workers_end_is_told(number, message):
    with pytest.raises(ValueError, match=message):
        list(streaming.parallel(_slow_square, [1, 2, number, 3, 4, 5]))


# -- tokenise --------------------------------------------------------------------------------------------------------


def test_with_several_workers_the_tokens_are_those_of_each_line(many, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BYTES", 1 << 14)
    monkeypatch.setattr(streaming, "cores", lambda: 3)
    pairs.tokenise(tmp_path / "text.json", many, tmp_path / "tok/x")
    for language in ("de", "en"):
        expected = [PERL.tokenise(line, language) for line in read_lines(f"{many}.{language}")]
        assert read_lines(tmp_path / f"tok/x.{language}") == expected
    assert names(tmp_path / "tok") == {"x.de", "x.en"}


@pytest.mark.parametrize(
    ("german", "english", "clean", "message"),
    [
        (b"eins\nzwei\n", b"one\n", "", "x.de has 2 lines, .*x.en has 1 lines; expected the same"),
        (b"\n\n", b"\n\n", "drop-empty", "no pair is left of 2: 2 with an empty side"),
        (b"eins\n" * 9 + b"f\xfcnf\n", b"one\n" * 10, "", r"x.de: line 10 is not UTF-8 \(byte 0xfc at column 2\)"),
        (b"a\n", b"a\n", "ratio 2", "--clean-bpe is ratio 2; expected drop-empty, or lengths MIN MAX"),
        (b"a\n", b"a\n", "lengths 3 2", "is lengths 3 2; expected"),
    ],
)
def test_bad_text_is_refused_and_nothing_written(tmp_path, monkeypatch, german, english, clean, message):
    monkeypatch.setattr(streaming, "BYTES", 20)
    (tmp_path / "x.de").write_bytes(german)
    (tmp_path / "x.en").write_bytes(english)
    PLAIN.write(tmp_path / "text.json")
    arguments = (tmp_path / "text.json", tmp_path / "x", tmp_path / "out/x", clean.split())
    assert re.search(message, refused(pairs.tokenise, *arguments))
    assert not names(tmp_path / "out")


def test_removed_characters_are_counted_and_said(tmp_path, caplog):
    caplog.set_level("INFO")
    pair(tmp_path / "x", ["نمی\u200cداند\tاو", "\ufeffb\u200bc\u200b"], ["a", "b"])
    Text("de", "en", normalise=True).write(tmp_path / "text.json")
    pairs.tokenise(tmp_path / "text.json", tmp_path / "x", tmp_path / "out/x")
    assert read_lines(tmp_path / "out/x.de") == ["نمی\u200cداند او", "bc"]
    notes = [message for message in caplog.messages if "characters are not in" in message]
    assert notes == [f"{tmp_path}/x.de: 3 control or format characters are not in the tokens: U+200B (2), U+FEFF (1)."]


# -- cleaning: the expected outcomes come from clean-corpus-n.perl ---------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("a b c", "a b", ""),
        ("a b c d", "a b c", ""),
        ("", "a", "with an empty side"),
        ("a b c d e", "a b c d e", "too long"),
        ("a", "a b", "too short"),
        ("a b c d", "a b", "of too different lengths"),
        ("a b", "a b c d", "of too different lengths"),
        ("x" * 1000 + " x", "a a", ""),
        ("a a", "a " + "x" * 1001, "with a word over 1000 characters"),
    ],
)
def test_pairs_are_kept_as_moses_keeps_them(source, target, reason):
    assert cleaning.rule("lengths 2 4 ratio 1.5".split())(source, target) == reason


def test_cleaning_happens_to_tokens_and_is_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    pair(tmp_path / "x", ["a, b", "", "viel zu lang fuer das", "eins zwei", "drei vier"], ["A b", "b", "c", "d e", "f"])
    Text("de", "en", lowercase=True, escape=True, perl=True).write(tmp_path / "text.json")
    clean = "lengths 1 4 ratio 1.5".split()
    pairs.tokenise(tmp_path / "text.json", tmp_path / "x", tmp_path / "out/x", clean)
    assert read_lines(tmp_path / "out/x.de") == ["a , b", "eins zwei"]
    assert read_lines(tmp_path / "out/x.en") == ["a b", "d e"]
    expected = "kept 2 pairs, dropped 3: 1 with an empty side, 1 too long, 1 of too different lengths"
    assert caplog.messages[-1].endswith(expected)


# -- split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [((), range(1, 13)), ((5, "nth"), [5, 10]), ((4, "rest"), [1, 2, 3, 5, 6, 7, 9, 10, 11])],
)
def test_every_nth_pair_of_all_parts_is_split_off(tmp_path, options, kept):
    for name, numbers in (("p", range(1, 8)), ("q", range(8, 13))):
        pair(tmp_path / name, [f"d{n}" for n in numbers], [f"e{n}" for n in numbers])
    pairs.split([tmp_path / "p", tmp_path / "q"], ["de", "en"], tmp_path / "out/x", *options)
    assert read_lines(tmp_path / "out/x.de") == [f"d{n}" for n in kept]
    assert read_lines(tmp_path / "out/x.en") == [f"e{n}" for n in kept]


# -- BPE -------------------------------------------------------------------------------------------------------------

WORDS = ["lower lowest newer newest wider", "", *ACCENTS, "low low low new new wide"] * 3


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "codes"
    write_lines(path, bpe.learn(WORDS, 20))
    return path


def test_a_line_too_long_for_the_model_is_found_at_once(codes, tmp_path, caplog, monkeypatch):
    """A line of 1,024 units is refused: 1,024 positions hold 1,023 units and the end of the sentence."""
    monkeypatch.setattr(streaming, "BYTES", 100)
    caplog.set_level("INFO")
    lines = ["a b", "q " * 1022 + "q", "q " * 1023 + "q", "a b", "q " * 1499 + "q"]
    write_lines(tmp_path / "test.de", lines)
    arguments = (codes, [tmp_path / "test.de"], tmp_path / "bpe", ())
    message = (
        f"{tmp_path}/test.de: line 3 is of more than 1023 units, which is what the model reads (2 such lines in all)"
    )
    assert f"{message}. Split it in the raw text" in refused(bpe.apply, *arguments, "refuse") and not names(
        tmp_path / "bpe"
    )
    bpe.apply(*arguments, "skip")
    assert f"{message}; skipped" in caplog.text and read_lines(tmp_path / "bpe/test.de") == lines
    assert pairs.skipped(tmp_path / "bpe/test", ["de"]) == {2, 4}
    # Training texts are not checked for long lines. A line that cleaning drops is not reported as too long, but the
    # numbers of the later lines still count it.
    bpe.apply(*arguments)
    write_lines(tmp_path / "test.en", ["", *lines[1:4], "b"])
    both, clean = [tmp_path / "test.de", tmp_path / "test.en"], "lengths 1 2000 ratio 9".split()
    assert message in refused(bpe.apply, codes, both, tmp_path / "bpe", clean, "refuse")


def test_nothing_but_spaces_parts_words_and_no_character_is_changed():
    """Merges contain entities, white space other than spaces, and decomposed letters unchanged."""
    words = ["&apos;s", "a\u00a0b", "e\u0301t", "x\u2028y", "ﬁn", "Ⅷ.", "<s>", "😀!", "\x01z"]
    merges = bpe.learn([" ".join(words)] * 3, 1000)
    whole = {"".join(merge.split(" ")[:2]) for merge in merges}
    assert {f"{word}</w>" for word in words} <= whole


def test_merges_depend_neither_on_blocks_nor_on_threads(tmp_path, monkeypatch):
    random_ = random.Random(3)
    words = ["".join(random_.choices("abcdeü", k=random_.randint(1, 7))) for _ in range(300)]
    lines = [" ".join(random_.choices(words, k=8)) for _ in range(2000)]
    write_lines(tmp_path / "text", lines)
    learned = [bpe.learn(lines, 200)]
    monkeypatch.setattr(streaming, "BYTES", 50)
    learned.append(bpe.learn(bpe.Texts([tmp_path / "text"]), 200))
    learn = "from pathlib import Path; from recipes.steps import bpe;"
    learn += f"print(*bpe.learn(bpe.Texts([Path('{tmp_path}/text')]), 200), sep='\\n')"
    environment = {**os.environ, "RAYON_NUM_THREADS": "4", "PYTHONPATH": str(Path(__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", learn], env=environment, capture_output=True, encoding="utf-8")
    learned.append(result.stdout.splitlines())
    assert len(learned[0]) == 200 and all(merges == learned[0] for merges in learned)


def test_each_merge_is_of_the_most_frequent_pair():
    """By definition: count all pairs, merge a most frequent one, count again (Sennrich et al. 2016)."""
    random_ = random.Random(2)
    words = Counter("".join(random_.choices("abcd", k=random_.randint(1, 8))) for _ in range(3000))
    units = {word: [*word[:-1], f"{word[-1]}</w>"] for word in words}
    merges = bpe.learn([" ".join(words.elements())], 60)
    assert len(merges) == 60
    for merge in merges:
        pairs = Counter()
        for word, count in words.items():
            for both in zip(units[word], units[word][1:]):
                pairs[both] += count
        left, right, _ = merge.split(" ")
        # In a run of one unit, such as "aaa", pairs overlap, and programs count them differently.
        assert pairs[left, right] >= 0.98 * max(pairs.values())
        for word in words:
            found = []
            for unit in units[word]:
                if unit == right and found and found[-1] == left:
                    found[-1] += unit
                else:
                    found.append(unit)
            units[word] = found


def test_no_pair_that_comes_once_is_merged_and_a_text_without_words_refused(tmp_path, caplog):
    """However many merges are requested, pairs that occur once are not merged: they carry no information."""
    caplog.set_level("INFO")
    assert bpe.learn(["ab ab", "cd", "ef"], 10) == ["a b</w> 1"]
    assert "1 merges instead of 10: no other pair of units comes twice" in caplog.text
    for lines, message in ((["", " "], "no words to learn from"), (["ab cd", "e"], "no pair of units comes twice")):
        write_lines(tmp_path / "x", lines)
        assert message in refused(bpe.write, tmp_path / "out/codes", [tmp_path / "x"], 10)
    assert not names(tmp_path / "out")


# -- whole files or none ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """If the second of two files is on a full device, neither is written, and the old file stays."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "a").write_text("before")
    with (
        pytest.raises(OSError, match=f"No space left on device: .*{tmp_path}/a"),
        common.replacing_files(tmp_path / "a", tmp_path / "b") as (first, second),
    ):
        os.dup2(os.open("/dev/full", os.O_WRONLY), second.fileno())
        first.write(b"x")
        second.write(b"x")
    assert names(tmp_path) == {"a"} and (tmp_path / "a").read_text() == "before"
