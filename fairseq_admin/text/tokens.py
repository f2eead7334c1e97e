"""How raw text becomes tokens and back: normalisation, Moses' rules, lower case.

The settings are next to a model as `text.json`. A line in is a line out, whatever it holds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import AdminError
from ..outputs import write_bytes
from ..packages import need

FILE = "text.json"

CONTROL_SPACES = re.compile(r"[\t-\r\x1c-\x1f\x85]")
"""Control characters that are white space: tab, vertical tab, form feed, NEL and the like."""

JOINERS = "\u200c\u200d"
"""Zero-width non-joiner and joiner: spelling in Persian and in the scripts of India, and what ties emoji together."""


@dataclasses.dataclass(frozen=True)
class Text:
    """What is done to the text of a pair of languages, both sides alike.

    Attributes:
        source: code of the language translated from, as in "de". A code that Moses does not know is treated as English.
        target: code of the language translated into.
        lowercase: upper case is given up.
        normalise: replace full-width punctuation, normalise punctuation by Moses' rules, then remove control and format
            characters (`removed`) but the joiners.
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
        """The settings of a `text.json`; those that it leaves out are off.

        Raises:
            AdminError: it is not JSON, or a setting is unknown or of the wrong type.
            OSError: it cannot be read.
        """
        try:
            text = cls(**json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            raise AdminError(
                f"{path} does not say how text is tokenised ({error}); expected an object with {names}. Copy it from "
                "the training data, or write it again."
            ) from None
        for name, value in dataclasses.asdict(text).items():
            kind, expected = (str, 'a code, as in "de"') if name in ("source", "target") else (bool, "true or false")
            if not isinstance(value, kind):
                raise AdminError(f"{path}: {name!r} is {value!r}; expected {expected}.")
        return text

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
        if not self.perl:
            line = CONTROL_SPACES.sub(" ", line.lower() if self.lowercase else line)
        if self.normalise:
            line = normaliser.normalize(line)
            if not self.perl and not line.isprintable():  # as for some other characters, too
                line = "".join(itertools.filterfalse(self._is_removed, line))
        tokens = " ".join(tokeniser.tokenize(line, aggressive_dash_splits=self.aggressive_dashes, escape=self.escape))
        if self.lowercase and self.perl:
            from .moses import lower

            return lower(tokens)
        return tokens

    def removed(self, lines: Iterable[str]) -> Counter[str]:
        """Count the control and format characters of raw lines that their tokens lack.

        With perl and normalise, Moses puts a space in place of each, a joiner too.
        """
        counts: Counter[str] = Counter()
        for line in lines:
            if not line.rstrip().isprintable():
                counts.update(filter(self._is_removed, line))
        return counts

    def _is_removed(self, character: str) -> bool:
        if character.isspace() or (character in JOINERS and not self.perl):
            return False
        return unicodedata.category(character).startswith("C") if self.normalise else character < " "

    def detokenise(self, tokens: str) -> str:
        """Raw text of the target language from tokens with spaces between them.

        Raises:
            AdminError: sacremoses is not installed.
        """
        return self._detokeniser.detokenize(tokens.split(), unescape=self.escape)

    @cached_property
    def _moses(self) -> dict[str, tuple[Any, Any]]:
        """Punctuation normaliser and tokeniser of either language."""
        need("sacremoses")
        from .moses import PerlTokeniser, Tokeniser
        from .punctuation import PerlNormaliser, PunctuationNormaliser

        normaliser, tokeniser = (PerlNormaliser, PerlTokeniser) if self.perl else (PunctuationNormaliser, Tokeniser)
        return {language: (normaliser(language), tokeniser(language)) for language in {self.source, self.target}}

    @cached_property
    def _detokeniser(self) -> Any:
        return need("sacremoses").MosesDetokenizer(self.target)


def removal_note(removed: Counter[str]) -> str:
    """What to tell the user of the characters that `Text.removed` counted."""
    each = ", ".join(f"U+{ord(character):04X} ({count})" for character, count in removed.most_common())
    return f"{removed.total()} control or format characters are not in the tokens: {each}"
