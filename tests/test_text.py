"""Raw text to units and back: the effect of each setting, hostile lines, and other tokenisers as references."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import sacremoses
from hypothesis import example, given
from hypothesis import strategies as st

from fairseq_admin.errors import AdminError
from fairseq_admin.text.bpe import BPE, remove_bpe
from fairseq_admin.text.punctuation import PunctuationNormaliser
from fairseq_admin.text.tokens import Text

WMT = {"normalise": True, "aggressive_dashes": True, "escape": True}
SETTINGS = [{}, WMT, {**WMT, "lowercase": True}, {**WMT, "perl": True, "lowercase": True}]
LINES = {
    "en": "The shop doesn't open until seven o'clock on Monday, the twenty-third of March.",
    "de": 'Am Montag, dem dritten März, kostet es zwölf Euro (oder "mehr").',
    "fr": "L'été, l'élève n'aime pas l'école.",
}


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few merges in fastBPE's format."""
    path = tmp_path_factory.mktemp("bpe") / "codes"
    path.write_text("e r</w> 9\nt h 8\nth e</w> 7\nÉ l 1\n& a 1\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("language", ["de", "en", "fr", "cs", "ja"])
def test_compiled_rules_normalise_as_sacremoses_does(language: str) -> None:
    reference = sacremoses.MosesPunctNormalizer(language, pre_replace_unicode_punct=True)
    ours = PunctuationNormaliser(language)
    rules = [*reference.REPLACE_UNICODE_PUNCTUATION, *reference.substitutions]
    signs = sorted({character for pattern, _ in rules for character in pattern})
    choose = random.Random(1)
    for line in [*LINES.values(), *("".join(choose.choices(signs, k=20)) for _ in range(500))]:
        assert ours.normalize(line) == reference.normalize(line), repr(line)


CHARACTERS = st.characters(exclude_categories=["Cs"])
ODD = [
    "\u2028",
    "\x85",
    "\x0b",
    "\x1f",
    "\ufeff",
    "\u200b",
    "\u200d",
    "\u00a0",
    "\u3000",
    "@@ ",
    "@-@",
    "&amp;",
    "</s>",
    "...",
    "'",
]
ANY_LINE = st.lists(st.one_of(st.text(CHARACTERS, max_size=8), st.sampled_from(ODD))).map("".join)


@given(line=ANY_LINE, settings=st.sampled_from(SETTINGS), language=st.sampled_from(["de", "en", "fr", "ja"]))
@example(line="x" * 3000, settings=WMT, language="en")
@example(line="." * 300, settings=WMT, language="en")
def test_any_line_is_one_line_of_tokens_and_bpe_can_be_undone(codes, line, settings, language):
    """Tokens have single spaces between them, and none of the characters that are said to be removed."""
    text = Text(language, language, **settings)
    tokens = text.tokenise(line, language)
    assert tokens == " ".join(tokens.split()) and not text.removed([tokens])
    units = BPE(codes).apply([tokens])
    assert [remove_bpe(unit) for unit in units] == [tokens] and "\n" not in text.detokenise(tokens)


@given(line=ANY_LINE, dashes=st.booleans(), escape=st.booleans())
def test_detokenised_tokens_are_the_line_but_for_its_spaces(line, dashes, escape):
    """Without normalise and lowercase, only white space and the characters that `removed` counts may change."""
    text = Text("en", "en", aggressive_dashes=dashes, escape=escape)

    def letters(line: str) -> str:
        return "".join(c for c in line if c not in text.removed([line]) and not c.isspace())

    assert letters(text.detokenise(text.tokenise(line, "en"))) == letters(line)


@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize("language", ["de", "en", "fr"])
def test_detokenising_undoes_tokenising(language: str, settings: dict) -> None:
    text = Text(language, language, **settings)
    assert text.detokenise(text.tokenise(LINES[language], language)) == LINES[language]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, "It ’ s “ A & B ” ， well-known , e.g. \u200b [ 1 ]"),
        ({"lowercase": True}, "it ’ s “ a & b ” ， well-known , e.g. \u200b [ 1 ]"),
        ({"normalise": True}, 'It \'s " A & B , " well-known , e.g. [ 1 ]'),
        ({"aggressive_dashes": True}, "It ’ s “ A & B ” ， well @-@ known , e.g. \u200b [ 1 ]"),
        ({"escape": True}, "It ’ s “ A &amp; B ” ， well-known , e.g. \u200b &#91; 1 &#93;"),
        (WMT, "It &apos;s &quot; A &amp; B , &quot; well @-@ known , e.g. &#91; 1 &#93;"),
    ],
)
def test_each_setting_does_what_it_says(settings: dict, tokens: str) -> None:
    text = Text("en", "en", **settings)
    assert text.tokenise("It’s “A & B”， well-known, e.g.\u200b [1]", "en") == tokens
    # An entity in the raw text survives the round trip; only escaped text is unescaped.
    assert text.detokenise(text.tokenise("&lt; is an entity", "en")).replace(" ", "") == "&lt;isanentity"
    assert text.detokenise("&lt; x") == ("< x" if text.escape else "&lt; x")


@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize(
    ("language", "line", "tokens"),
    [
        ("de", "Ein\tTab,\x0bVT\x0cFF\x85NEL\rCR\x1cFS", "Ein Tab , VT FF NEL CR FS"),
        ("fa", "او نمی\u200cداند.", "او نمی\u200cداند ."),
        ("hi", "क्\u200dष है.", "क्\u200dष है ."),
        ("en", "A family: 👨\u200d👩\u200d👧!", "A family : 👨\u200d👩\u200d👧 !"),
        ("en", "(👨🏽\u200d❤\ufe0f\u200d👨🏽)", "( 👨🏽\u200d❤\ufe0f\u200d👨🏽 )"),
    ],
)
def test_control_spaces_are_spaces_and_joiners_stay(settings: dict, language: str, line: str, tokens: str) -> None:
    text = Text(language, language, **settings)
    assert text.tokenise(line, language) == tokens
    assert text.detokenise(tokens) == re.sub(r"\s+", " ", line)
    assert not text.removed([line])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"\x01": 2}),
        (WMT, {"\u200b": 2, "\x01": 2, "\ufeff": 1}),
        ({**WMT, "perl": True}, {"\u200b": 2, "\x01": 2, "\ufeff": 1, "\u200d": 1}),
    ],
)
def test_removed_characters_are_counted(settings: dict, expected: dict) -> None:
    lines = ["\ufeffa\u200bb\x01\n", "c\u200bd\te\u00a0f\n", "\x01g\u200dh"]
    text = Text("en", "en", **settings)
    assert text.removed(lines) == expected
    assert not any(text.removed([text.tokenise(line, "en")]) for line in lines)
    kept = {"\u200b", "\ufeff", "\u200d"} - {*expected}
    assert all(character in "".join(text.tokenise(line, "en") for line in lines) for character in kept)


def test_settings_can_be_written_and_read(tmp_path: Path) -> None:
    text = Text("de", "zh-Hans", lowercase=True, escape=True)
    text.write(tmp_path / "text.json")
    assert Text.read(tmp_path / "text.json") == text
    assert json.loads((tmp_path / "text.json").read_text()) == {
        "source": "de", "target": "zh-Hans", "lowercase": True, "normalise": False, "aggressive_dashes": False,
        "escape": True, "perl": False,
    }  # fmt: skip
    # Files from before the `perl` setting lack it.
    (tmp_path / "text.json").write_text('{"source": "de", "target": "en", "escape": true}')
    assert Text.read(tmp_path / "text.json") == Text("de", "en", escape=True)


def test_merges_without_fastbpe_are_one_line(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fastBPE", None)
    with pytest.raises(AdminError, match="^fastBPE is not installed. Run pip install fastBPE"):
        BPE(tmp_path / "codes")


# Expected: output of mosesdecoder's tokenizer.perl -l LANGUAGE.
IWSLT = [
    ("de", "Er kam z. B. um 5 Uhr, d. h. spät, Hrn. Bart.", "Er kam z. B. um 5 Uhr , d. h. spät , Hrn . Bart ."),
    ("de", "Am 3. Mai galt Art. 5", "Am 3. Mai galt Art. 5"),
    ("en", "Mr. Lee of No. 5 left the U.S.", "Mr. Lee of No. 5 left the U.S ."),
    ("en", "It's the 1990's, isn't it?...'", "It &apos;s the 1990 &apos;s , isn &apos;t it ? ... &apos;"),
    ("en", "Take x. Then y.", "Take x . Then y ."),
    ("en", "He said 'no.'", "He said &apos; no . &apos;"),
    ("en", "a,b 5,300 7,", "a , b 5,300 7 ,"),
    ("fr", "L'été, aujourd'hui: 3 % d'eau.", "L&apos; été , aujourd&apos; hui : 3 % d&apos; eau ."),
    ("en", "a\x01b\x1cc\u2028d\u00a0e\rf\x85g", "abc d e f g"),
    ("en", "x&amp;y [z] | <t> \U0001f600", "x &amp; amp ; y &#91; z &#93; &#124; &lt; t &gt; \U0001f600"),
    ("de", "कि \U00010400\U0001d7d8-Ⅷ 々", "कि \U00010400\U0001d7d8-Ⅷ 々"),
    # In Moses' lists, "Fil " and "Amn " end in a blank, which is part of the entry.
    ("es", "Ab Fil. Uno", "Ab Fil . Uno"),
    ("it", "Ab Amn. Due", "Ab Amn . Due"),
    # "Nrs " also ends in a blank; "Nr #NUMERIC_ONLY# " has its blank after the mark, where it has no effect.
    ("nl", "Nrs. 5 Nr. 5 Nr. X", "Nrs . 5 Nr. 5 Nr . X"),
    # "no" is listed twice: before numbers only, then always.
    ("is", "Ab no. X", "Ab no. X"),
]  # fmt: skip
# Expected: output of normalize-punctuation.perl -l LANGUAGE, remove-non-printing-char.perl and tokenizer.perl -a.
WMT14 = [
    ("de", 'Sie sagte: „Nein.“', "Sie sagte : &quot; Nein &quot; ."),
    ("de", "10\u00a0000 gut-gut, ’n ‘m ‚k l’eau", "10,000 gut @-@ gut , &quot; n &apos; m &apos; k l &apos; eau"),
    ("en", "10\u00a0000 “words”, and “more.”", "10.000 &quot; words , &quot; and &quot; more . &quot;"),
    # Each rule is applied once, from left to right, never to its own output.
    ("en", '"No"", 1\u00a02\u00a03', "&quot; No &quot; , &quot; 1.2 3"),
    ("fr", "«\u00a0Ça va\u00a0», dit-il\u00a0!", "&quot; Ça va &quot; , dit @-@ il !"),
    ("en", "zero\u200bwidth ( a ) : （b）", "zero width ( a ) : （ b ）"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "language", "line", "tokens"),
    [({"escape": True}, *case) for case in IWSLT] + [(WMT, *case) for case in WMT14],
)
def test_perl_gives_the_tokens_of_the_scripts(settings: dict, language: str, line: str, tokens: str) -> None:
    assert Text(language, language, **settings, perl=True).tokenise(line, language) == tokens


def test_languages_with_rules_that_are_not_here_are_refused() -> None:
    with pytest.raises(AdminError, match="'fi': Moses has rules for"):
        Text("fi", "en", perl=True).tokenise("USA:n", "fi")
    assert Text("fi", "en").tokenise("USA:n", "fi") == "USA : n"
