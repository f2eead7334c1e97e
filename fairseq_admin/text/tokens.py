"""From raw text to tokens and back: normalisation, Moses' rules, lower case.

The settings are in the file `text.json` next to a model. Each line of text gives exactly one line of tokens, whatever
characters it contains.
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
from . import JOINERS

FILE = "text.json"

CONTROL_SPACES = re.compile(r"[\t-\r\x1c-\x1f\x85]")
"""Control characters that are white space: tab, vertical tab, form feed, NEL and the like."""


@dataclasses.dataclass(frozen=True)
class Text:
    """How the text of a pair of languages is tokenised, both sides alike.

    Attributes:
        source: code of the source language, as in "de". A code that Moses does not know is treated as English.
        target: code of the target language.
        lowercase: write everything in lower case.
        normalise: replace full-width punctuation, normalise punctuation by Moses' rules, then remove control and format
            characters (`removed`) but the joiners.
        aggressive_dashes: turn "well-known" into "well @-@ known".
        escape: turn Moses' special characters into entities, as in "&apos;".
        perl: make the tokens of Moses' Perl scripts, line for line; normalise is then Moses' punctuation normalisation,
            with a space for each control character, and tokens are lower-cased instead of raw text.

    With normalise, aggressive_dashes and escape, and without perl, the tokens are those of WMT'19's fairseq models, as
    transformers' FSMTTokenizer makes them. With perl and escape they are those of fairseq's IWSLT'14 data; with
    aggressive_dashes and normalise too, those of its WMT'14 data.
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
        """Read a `text.json`. Settings that it lacks are off.

        Args:
            path: the file.

        Returns:
            The settings.

        Raises:
            AdminError: the file is not JSON, or a setting is unknown or of the wrong type.
            OSError: the file cannot be read.
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
        """Write a `text.json`, by `write_bytes`.

        Args:
            path: the file.
        """
        write_bytes(f"{json.dumps(dataclasses.asdict(self), indent=2)}\n".encode(), path)

    def tokenise(self, line: str, language: str) -> str:
        """Tokenise a line.

        Args:
            line: raw text, which may be empty.
            language: its language, `self.source` or `self.target`.

        Returns:
            Tokens with one space between them and no other white space.

        Raises:
            AdminError: sacremoses is not installed, or perl is on and Moses has other rules for the language.
        """
        normaliser, tokeniser = self._moses[language]
        if not self.perl:
            line = CONTROL_SPACES.sub(" ", line.lower() if self.lowercase else line)
        if self.normalise:
            line = normaliser.normalize(line)
            if not self.perl and not line.isprintable():  # cheap; a few clean lines pass too
                line = "".join(itertools.filterfalse(self._is_removed, line))
        tokens = " ".join(tokeniser.tokenize(line, aggressive_dash_splits=self.aggressive_dashes, escape=self.escape))
        if self.lowercase and self.perl:
            from .moses import lower

            return lower(tokens)
        return tokens

    def removed(self, lines: Iterable[str]) -> Counter[str]:
        """Count the control and format characters that tokenising removes.

        With perl and normalise, Moses puts a space in place of each, and of each joiner.

        Args:
            lines: raw text.

        Returns:
            The count of each character.
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
        """Join tokens to raw text of the target language.

        Args:
            tokens: the tokens, with spaces between them.

        Returns:
            The text.

        Raises:
            AdminError: sacremoses is not installed.
        """
        return self._detokeniser.detokenize(tokens.split(), unescape=self.escape)

    @cached_property
    def _moses(self) -> dict[str, tuple[Any, Any]]:
        """Punctuation normaliser and tokeniser of each language."""
        need("sacremoses")
        from .moses import PerlTokeniser, Tokeniser
        from .punctuation import PerlNormaliser, PunctuationNormaliser

        normaliser, tokeniser = (PerlNormaliser, PerlTokeniser) if self.perl else (PunctuationNormaliser, Tokeniser)
        return {language: (normaliser(language), tokeniser(language)) for language in {self.source, self.target}}

    @cached_property
    def _detokeniser(self) -> Any:
        return need("sacremoses").MosesDetokenizer(self.target)


def removal_note(removed: Counter[str]) -> str:
    """A note for the user on removed characters.

    Args:
        removed: the result of `Text.removed`.

    Returns:
        The note, without a full stop.
    """
    each = ", ".join(f"U+{ord(character):04X} ({count})" for character, count in removed.most_common())
    return f"{removed.total()} control or format characters are not in the tokens: {each}"
