"""How raw text becomes a model's units and back: normalisation, Moses tokens, lower case, byte-pair encoding.

The settings lie beside a model as `text.json`, its merges as `codes`. A line in is a line out, whatever it holds.
"""

import contextlib
import dataclasses
import json
import os
import re
import unicodedata
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, Iterator, List, Tuple

from ..errors import AdminError

FILE = "text.json"
CODES = "codes"


@dataclasses.dataclass(frozen=True)
class Text:
    """What is done to the text of a pair of languages, both sides alike.

    Attributes:
        source: code of the language translated from, as in "de". A code that Moses does not know is treated as English.
        target: code of the language translated into.
        lowercase: upper case is given up.
        normalise: full-width punctuation, then Moses' punctuation normalisation, then control characters away.
        aggressive_dashes: "well-known" becomes "well @-@ known".
        escape: characters special to Moses become entities, as in "&apos;".

        perl: tokens are, line for line, those of Moses' Perl scripts; normalise is then Moses' punctuation
            normalisation and control characters replaced by spaces, and tokens are lower-cased, not raw text.

    With normalise, aggressive_dashes and escape, and without perl, the tokens are those of WMT'19's fairseq models as
    transformers' FSMTTokenizer makes them. With perl and escape they are those of fairseq's IWSLT'14 data, with
    aggressive_dashes and normalise besides those of its WMT'14 data.
    """

    source: str
    target: str
    lowercase: bool = False
    normalise: bool = False
    aggressive_dashes: bool = False
    escape: bool = False
    perl: bool = False

    @classmethod
    def read(cls, path: Path) -> "Text":
        """The settings of a `text.json`.

        Raises:
            AdminError: no such file, no JSON, or a setting is missing, unknown or of the wrong type.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise AdminError(f"{path}: {error.strerror}; expected a {FILE}, how text is tokenised.") from None
        except ValueError as error:
            raise AdminError(
                f"{path} is not JSON ({error}). Write it again, or copy it from the training data."
            ) from None
        return cls(**_checked(found, path))

    def write(self, path: Path) -> None:
        """Write the settings as a `text.json`; the path holds either all of them or what it held before."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)

    def tokenise(self, line: str, language: str) -> str:
        """The line's tokens, one space between them and no other white space.

        Args:
            line: raw text of any kind, or nothing.
            language: the line's, self.source or self.target.

        Raises:
            AdminError: sacremoses is not installed, or perl is on and Moses has other rules for the language.
        """
        normaliser, tokeniser = self._moses[language]
        if self.perl:
            from .moses import lower

            tokens = tokeniser.tokens(
                normaliser.normalize(line) if self.normalise else line, self.aggressive_dashes, self.escape
            )
            return lower(tokens) if self.lowercase else tokens
        if self.lowercase:
            line = line.lower()
        if self.normalise:
            line = normaliser.normalize(line)
            line = "".join(c for c in line if not unicodedata.category(c).startswith("C"))
        return " ".join(tokeniser.tokenize(line, aggressive_dash_splits=self.aggressive_dashes, escape=self.escape))

    def detokenise(self, tokens: str) -> str:
        """Raw text of the target language from tokens with spaces between them.

        Raises:
            AdminError: sacremoses is not installed.
        """
        return self._detokeniser.detokenize(tokens.split(), unescape=self.escape)

    @cached_property
    def _moses(self) -> Dict[str, Tuple[Any, Any]]:
        """Punctuation normaliser and tokeniser of either language."""
        moses = _sacremoses()
        if self.perl:
            from .moses import Normaliser, Tokeniser

            return {language: (Normaliser(language), Tokeniser(language)) for language in {self.source, self.target}}
        return {
            language: (
                moses.MosesPunctNormalizer(language, pre_replace_unicode_punct=True),
                moses.MosesTokenizer(language),
            )
            for language in (self.source, self.target)
        }

    @cached_property
    def _detokeniser(self) -> Any:
        return _sacremoses().MosesDetokenizer(self.target)


def _checked(found: object, path: Path) -> Dict[str, Any]:
    if not isinstance(found, dict):
        raise AdminError(f"{path} holds a {type(found).__name__}; expected an object with the settings of the text.")
    expected = {field.name: field.type for field in dataclasses.fields(Text)}
    # Files of before there was a choice lack it.
    found = {"perl": False, **found}
    for name in sorted(found.keys() ^ expected.keys()):
        what = f"unknown setting {name!r}" if name in found else f"{name!r} is missing"
        raise AdminError(f"{path}: {what}; expected {', '.join(expected)}. Write all of them and no others.")
    for name, kind in expected.items():
        value = found[name]
        if kind is bool and not isinstance(value, bool):
            raise AdminError(f"{path}: {name!r} is {value!r}; expected true or false.")
        if kind is str and not (isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_-]+", value)):
            raise AdminError(f'{path}: {name!r} is {value!r}; expected the code of a language, as in "de".')
    return found


def _sacremoses() -> ModuleType:
    try:
        import sacremoses
    except ImportError:
        raise AdminError(
            "sacremoses, which tokenises, is not installed. Run pip install fairseq-admin[text], or give tokens."
        ) from None
    return sacremoses


class BPE:
    """Byte-pair encoding with the merges of a file, as fastBPE writes and reads them."""

    def __init__(self, codes: Path) -> None:
        """Read the merges.

        Raises:
            AdminError: no such file, or not "left right count" in every line.
        """
        import fastBPE

        try:
            lines = codes.read_bytes().split(b"\n")
        except OSError as error:
            raise AdminError(f"{codes}: {error.strerror}; expected the merges of the byte-pair encoding.") from None
        # fastBPE itself ends the process over a missing file, and reads anything at all as merges.
        for number, line in enumerate(lines[:-1] if not lines[-1] else lines, 1):
            if not re.fullmatch(rb"\S+ \S+ \d+\r?", line):
                raise AdminError(
                    f"{codes}: line {number} is no merge; expected two units and a count, as fastBPE writes them. Give "
                    "the file the training text was split with (of subword-nmt's: no #version line, and a 1 a line)."
                )
        with _silent_stderr():
            self._codes = fastBPE.fastBPE(str(codes))

    def apply(self, lines: List[str]) -> List[str]:
        """Split each line's tokens into units, one space between them; "@@" ends a unit inside a token."""
        units = self._codes.apply(lines)
        assert len(units) == len(lines), "fastBPE changed the number of lines"
        return units


def remove_bpe(units: str) -> str:
    """The tokens of which `BPE.apply` made these units."""
    return f"{units} ".replace("@@ ", "").rstrip()


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Nothing reaches standard error: fastBPE's C++ counts the codes there."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
