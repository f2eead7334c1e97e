"""Raw text to units and back: what each setting does, hostile lines, and other people's tokenisers as references."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import random
import re
import subprocess
from pathlib import Path

import pytest
import sacremoses
from conftest import SHARED

from fairseq_admin.errors import AdminError
from fairseq_admin.text.bpe import BPE, remove_bpe
from fairseq_admin.text.moses import Normaliser
from fairseq_admin.text.punctuation import PunctuationNormaliser
from fairseq_admin.text.tokens import Text

WMT = {"normalise": True, "aggressive_dashes": True, "escape": True}
SETTINGS = [{}, WMT, {**WMT, "lowercase": True}, {**WMT, "perl": True, "lowercase": True}]
HOSTILE = [
    "",
    "   ",
    "\u2028",
    "\x00\x01\x1f",
    "\ufeff",
    "a\u2028b\x85c\x0bd\re",
    "tab\there\u00a0there\u3000end",
    "Élève, où est l'été ? « Ça va »",
    "Łódź — naïve façade",
    "Привет, мир!",
    "日本語の文です。（１２３％）",
    "مرحبا بالعالم؟",
    "😀 e\u0301\u200b zwj\u200d",
    "@@ @-@ &amp; <unk> </s> | [x] \"q\" 'q' it's",
    "x" * 3000,
    "." * 300,
]
LINES = {
    "en": "The shop doesn't open until seven o'clock on Monday, the twenty-third of March.",
    "de": 'Am Montag, dem dritten März, kostet es zwölf Euro (oder "mehr").',
    "fr": "L'été, l'élève n'aime pas l'école.",
}


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    """A few merges, as fastBPE writes them."""
    path = tmp_path / "codes"
    path.write_text("e r</w> 9\nt h 8\nth e</w> 7\nÉ l 1\n& a 1\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("language", ["de", "en", "fr", "cs", "ja"])
def test_rules_left_out_would_have_changed_nothing(language: str) -> None:
    """All rules, one after the other, give the same: sacremoses' own as it applies them, the scripts' on bytes."""
    theirs = sacremoses.MosesPunctNormalizer(language, pre_replace_unicode_punct=True)
    ours, scripts = PunctuationNormaliser(language), Normaliser(language)
    rules = [(pattern, replacement) for _, pattern, replacement in scripts._rules._rules]
    signs = sorted({c for pattern, _ in [*theirs.REPLACE_UNICODE_PUNCTUATION, *theirs.substitutions] for c in pattern})
    choose = random.Random(1)
    for line in [*HOSTILE, *LINES.values(), *("".join(choose.choices(signs, k=20)) for _ in range(2000))]:
        assert ours.normalize(line) == theirs.normalize(line), repr(line)
        text = f"{line}\n"
        for pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        assert scripts._rules.apply(f"{line}\n") == text, repr(line)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("language", ["de", "en", "fr", "ja"])
def test_a_line_is_a_line_whatever_it_holds(language: str, settings: dict, codes: Path) -> None:
    """Are the tokens one line, single spaces between them; the units too; and can BPE be undone?"""
    text = Text(language, language, **settings)
    tokens = [text.tokenise(line, language) for line in HOSTILE]
    assert tokens[:4] == [""] * 4
    assert all(line == " ".join(line.split()) for line in tokens)
    units = BPE(codes).apply(tokens)
    assert [remove_bpe(line) for line in units] == tokens
    assert all("\n" not in text.detokenise(line) for line in tokens)


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


def test_only_escaped_text_is_unescaped() -> None:
    """Does an entity in the text itself stay, both ways?"""
    for settings in ({}, WMT):
        text = Text("en", "en", **settings)
        assert text.detokenise(text.tokenise("&lt; is an entity", "en")).replace(" ", "") == "&lt;isanentity"
    assert Text("en", "en").detokenise("&lt; x") == "&lt; x"
    assert Text("en", "en", escape=True).detokenise("&lt; x") == "< x"


def test_each_side_is_tokenised_as_its_own_language() -> None:
    text = Text("fr", "en")
    assert text.tokenise("l'eau", "fr") == "l' eau" and text.tokenise("it's", "en") == "it 's"
    assert text.detokenise("it 's") == "it's"


def test_settings_can_be_written_and_read(tmp_path: Path) -> None:
    text = Text("de", "zh-Hans", lowercase=True, escape=True)
    text.write(tmp_path / "text.json")
    assert Text.read(tmp_path / "text.json") == text
    assert [path.name for path in tmp_path.iterdir()] == ["text.json"]
    assert json.loads((tmp_path / "text.json").read_text()) == {
        "source": "de", "target": "zh-Hans", "lowercase": True, "normalise": False, "aggressive_dashes": False,
        "escape": True, "perl": False,
    }  # fmt: skip


GOOD = {"source": "de", "target": "en", "lowercase": False, "normalise": False, "aggressive_dashes": False}
GOOD["escape"] = False


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "text.json: No such file or directory; expected a text.json"),
        ("{", "text.json is not JSON"),
        (b"\xff", "text.json is not JSON"),
        ("[]", "text.json holds a list; expected an object"),
        ({key: GOOD[key] for key in GOOD if key != "escape"}, "'escape' is missing; expected source, target, "),
        ({**GOOD, "truecase": True}, "unknown setting 'truecase'"),
        ({**GOOD, "escape": 1}, "'escape' is 1; expected true or false"),
        ({**GOOD, "source": True}, "'source' is True; expected the code of a language"),
        ({**GOOD, "target": "../en"}, "'target' is '../en'; expected the code of a language"),
    ],
)
def test_a_malformed_file_is_one_line(written: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    if written is not None:
        path.write_bytes(written if isinstance(written, bytes) else _json(written).encode())
    with pytest.raises(AdminError, match=re.escape(message)) as caught:
        Text.read(path)
    assert len(str(caught.value).splitlines()) == 1


def _json(written: object) -> str:
    return written if isinstance(written, str) else json.dumps(written)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (None, "codes: No such file or directory"),
        ("#version: 0.2\ne r</w>\n", "codes: line 1 is no merge"),
        ("e r</w> 9\n\nt h 8\n", "codes: line 2 is no merge"),
    ],
)
def test_malformed_codes_are_one_line(written: str, message: str, tmp_path: Path) -> None:
    """fastBPE itself ends the process, or takes anything as a merge."""
    if written:
        (tmp_path / "codes").write_text(written)
    with pytest.raises(AdminError, match=message) as caught:
        BPE(tmp_path / "codes")
    assert len(str(caught.value).splitlines()) == 1


def test_bpe_says_nothing(codes: Path, capfd: pytest.CaptureFixture) -> None:
    assert BPE(codes).apply(["the other"]) == ["the o@@ th@@ er"]
    assert capfd.readouterr() == ("", "")


def test_without_sacremoses_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "sacremoses":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AdminError, match=r"pip install 'sacremoses"):
        Text("de", "en").tokenise("ja", "de")


def test_a_file_of_before_perl_could_be_chosen_is_read(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text(json.dumps(GOOD))
    assert Text.read(tmp_path / "text.json") == Text("de", "en")


# Expected: what mosesdecoder's tokenizer.perl -l LANGUAGE makes of the line.
IWSLT = [
    ("de", "Er kam z. B. um 5 Uhr, d. h. spät, Hrn. Bart.", "Er kam z. B. um 5 Uhr , d. h. spät , Hrn . Bart ."),
    ("de", "Am 3. Mai galt Art. 5", "Am 3. Mai galt Art. 5"),
    ("en", "Mr. Lee of No. 5 left the U.S.", "Mr. Lee of No. 5 left the U.S ."),
    ("en", "It's the 1990's, isn't it?...'", "It &apos;s the 1990 &apos;s , isn &apos;t it ? ... &apos;"),
    ("en", "He said 'no.'", "He said &apos; no . &apos;"),
    ("en", "a,b 5,300 7,", "a , b 5,300 7 ,"),
    ("fr", "L'été, aujourd'hui: 3 % d'eau.", "L&apos; été , aujourd&apos; hui : 3 % d&apos; eau ."),
    ("en", "a\x01b\x1cc\u2028d\u00a0e\rf\x85g", "abc d e f g"),
    ("en", "x&amp;y [z] | <t> \U0001f600", "x &amp; amp ; y &#91; z &#93; &#124; &lt; t &gt; \U0001f600"),
    ("de", "कि \U00010400\U0001d7d8-Ⅷ 々", "कि \U00010400\U0001d7d8-Ⅷ 々"),
]  # fmt: skip
# With normalize-punctuation.perl -l LANGUAGE, remove-non-printing-char.perl and -a.
WMT14 = [
    ("de", 'Sie sagte: „Nein.“', "Sie sagte : &quot; Nein &quot; ."),
    ("de", "10\u00a0000 gut-gut, ’n ‘m ‚k l’eau", "10,000 gut @-@ gut , &quot; n &apos; m &apos; k l &apos; eau"),
    ("en", "10\u00a0000 “words”, and “more.”", "10.000 &quot; words , &quot; and &quot; more . &quot;"),
    ("fr", "«\u00a0Ça va\u00a0», dit-il\u00a0!", "&quot; Ça va &quot; , dit @-@ il !"),
    ("en", "zero\u200bwidth ( a ) : （b）", "zero width ( a ) : （ b ）"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "line", "tokens"), IWSLT)
def test_the_way_of_iwslt_is_that_of_the_scripts(language: str, line: str, tokens: str) -> None:
    assert Text(language, language, escape=True, perl=True).tokenise(line, language) == tokens


@pytest.mark.parametrize(("language", "line", "tokens"), WMT14)
def test_the_way_of_wmt14_is_that_of_the_scripts(language: str, line: str, tokens: str) -> None:
    assert Text(language, language, **WMT, perl=True).tokenise(line, language) == tokens


def test_perl_lowers_tokens_and_not_raw_text() -> None:
    """Raw text in lower case would hide an abbreviation; Perl has no separate form for a final sigma."""
    text = Text("de", "en", lowercase=True, perl=True)
    assert text.tokenise("Mr. Lee is the U.S. ΟΔΟΣ", "en") == "mr. lee is the u.s. οδοσ"
    assert Text("de", "en", lowercase=True).tokenise("Mr. Lee", "en") == "mr. lee"
    assert text.tokenise("Nos. Art. X", "en") == "nos. art . x"


def test_languages_with_rules_that_are_not_here_are_refused() -> None:
    with pytest.raises(AdminError, match="'fi': Moses has rules for"):
        Text("fi", "en", perl=True).tokenise("USA:n", "fi")
    assert Text("fi", "en").tokenise("USA:n", "fi") == "USA : n"


@pytest.mark.parametrize(
    ("language", "line", "tokens"),
    [
        # "Fil " and "Amn " have a blank in Moses' lists, which is then part of the entry.
        ("es", "Ab Fil. Uno", "Ab Fil . Uno"),
        ("it", "Ab Amn. Due", "Ab Amn . Due"),
        # "Nrs " has a blank, too; "Nr #NUMERIC_ONLY# " has it after the mark, where it does no harm.
        ("nl", "Nrs. 5 Nr. 5 Nr. X", "Nrs . 5 Nr. 5 Nr . X"),
        # "no" is there twice: before numbers only, then always.
        ("is", "Ab no. X", "Ab no. X"),
    ],
)
def test_abbreviations_are_those_that_the_script_reads(language: str, line: str, tokens: str) -> None:
    """As tokenizer.perl -l LANGUAGE prints them."""
    assert Text(language, "en", perl=True).tokenise(line, language) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("language", ["de", "en", "fr"])
def test_tokens_are_those_of_mosestokenizers_perl(language: str) -> None:
    """Line for line on real text, where a script is given: FAIRSEQ_ADMIN_MOSES names mosesdecoder's folder."""
    folder = os.environ.get("FAIRSEQ_ADMIN_MOSES")
    path = SHARED / f"data/multi30k/train.{language}.gz"
    if not folder or not path.exists():
        pytest.skip("FAIRSEQ_ADMIN_MOSES is not set, or the corpus is not here")
    raw = gzip.decompress(path.read_bytes())
    lines = raw.decode("utf-8").split("\n")[:-1]
    scripts = Path(folder) / "scripts/tokenizer"
    tokenise = ["perl", scripts / "tokenizer.perl", "-q", "-l", language]
    ways = {
        False: [tokenise],
        True: [
            ["perl", scripts / "normalize-punctuation.perl", "-l", language],
            ["perl", scripts / "remove-non-printing-char.perl"],
            [*tokenise, "-a"],
        ],
    }
    for wmt, commands in ways.items():
        found = raw
        for command in commands:
            found = subprocess.run(command, input=found, stdout=subprocess.PIPE, check=True).stdout
        text = Text(language, language, normalise=wmt, aggressive_dashes=wmt, escape=True, perl=True)
        expected = [" ".join(filter(None, line.split(" "))) for line in found.decode("utf-8").split("\n")[:-1]]
        assert [text.tokenise(line, language) for line in lines] == expected


def _fsmt(codes: Path, language: str, folder: Path, lowercase: bool = False):  # noqa: ANN202 (transformers may be missing)
    fsmt = pytest.importorskip("transformers.models.fsmt.tokenization_fsmt", reason="transformers is not installed")
    merges = [line.rpartition(" ")[0] for line in codes.read_text(encoding="utf-8").split("\n")[:-1]]
    (folder / "merges.txt").write_text("".join(f"{merge}\n" for merge in merges), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}))
    files = {"src_vocab_file": folder / "vocab.json", "tgt_vocab_file": folder / "vocab.json"}
    given = {name: str(path) for name, path in {**files, "merges_file": folder / "merges.txt"}.items()}
    tokeniser = fsmt.FSMTTokenizer(langs=[language, "en"], do_lower_case=lowercase, **given)

    def units(line: str) -> str:
        found = tokeniser._tokenize(line)
        return " ".join(unit[: -len("</w>")] if unit.endswith("</w>") else f"{unit}@@" for unit in found)

    return units


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("language", ["de", "en", "fr", "ja"])
def test_the_way_of_wmt_gives_the_units_of_fsmt(language: str, lowercase: bool, codes: Path, tmp_path: Path) -> None:
    reference = _fsmt(codes, language, tmp_path, lowercase)
    text = Text(language, "en", lowercase=lowercase, **WMT)
    lines = [*HOSTILE, *LINES.values()]
    assert BPE(codes).apply([text.tokenise(line, language) for line in lines]) == [reference(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "language"),
    [(f"multi30k/test_2017_mscoco.{language}.gz", language) for language in ("de", "en", "fr")]
    + [(f"tatoeba_deen/valid.{language}.gz", language) for language in ("de", "en")],
)
def test_the_way_of_wmt_gives_the_units_of_fsmt_on_real_text(
    name: str, language: str, codes: Path, tmp_path: Path
) -> None:
    path = SHARED / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    reference = _fsmt(codes, language, tmp_path)
    text = Text(language, "en", **WMT)
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    assert BPE(codes).apply([text.tokenise(line, language) for line in lines]) == [reference(line) for line in lines]
