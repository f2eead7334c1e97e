"""How raw text becomes tokens and back: normalisation, Moses' rules, lower case.

The settings are next to a model as `text.json`. A line in is a line out, whatever it holds.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from ..errors import AdminError
from ..outputs import write_bytes

FILE = "text.json"


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
    def read(cls, path: Path) -> Text:
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
        write_bytes(f"{json.dumps(dataclasses.asdict(self), indent=2)}\n".encode(), path)

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
            if not line.isprintable():  # where there is any of these, and for some other characters
                line = "".join(c for c in line if not unicodedata.category(c).startswith("C"))
        return " ".join(tokeniser.tokenize(line, aggressive_dash_splits=self.aggressive_dashes, escape=self.escape))

    def detokenise(self, tokens: str) -> str:
        """Raw text of the target language from tokens with spaces between them.

        Raises:
            AdminError: sacremoses is not installed.
        """
        return self._detokeniser.detokenize(tokens.split(), unescape=self.escape)

    @cached_property
    def _moses(self) -> dict[str, tuple[Any, Any]]:
        """Punctuation normaliser and tokeniser of either language."""
        moses = _sacremoses()
        if self.perl:
            from .moses import Normaliser, Tokeniser

            return {language: (Normaliser(language), Tokeniser(language)) for language in {self.source, self.target}}
        from .punctuation import PunctuationNormaliser

        return {
            language: (PunctuationNormaliser(language), moses.MosesTokenizer(language))
            for language in {self.source, self.target}
        }

    @cached_property
    def _detokeniser(self) -> Any:
        return _sacremoses().MosesDetokenizer(self.target)


def _checked(found: object, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise AdminError(f"{path} holds a {type(found).__name__}; expected an object with the settings of the text.")
    expected = get_type_hints(Text)
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
            "sacremoses, which tokenises, is not installed. Run pip install 'sacremoses>=0.2,<0.3' regex, or give "
            "tokens (--tokenised)."
        ) from None
    return sacremoses
