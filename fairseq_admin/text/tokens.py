"""How raw text becomes tokens and back: normalisation, Moses' rules, lower case.

The settings are next to a model as `text.json`. A line in is a line out, whatever it holds.
"""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import AdminError
from ..outputs import write_bytes
from ..packages import need

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
        if self.lowercase and not self.perl:
            line = line.lower()
        if self.normalise:
            line = normaliser.normalize(line)
            if not self.perl and not line.isprintable():  # where there is any of these, and for some other characters
                line = "".join(c for c in line if not unicodedata.category(c).startswith("C"))
        tokens = " ".join(tokeniser.tokenize(line, aggressive_dash_splits=self.aggressive_dashes, escape=self.escape))
        if self.lowercase and self.perl:
            from .moses import lower

            return lower(tokens)
        return tokens

    def detokenise(self, tokens: str) -> str:
        """Raw text of the target language from tokens with spaces between them.

        Raises:
            AdminError: sacremoses is not installed.
        """
        return self._detokeniser.detokenize(tokens.split(), unescape=self.escape)

    @cached_property
    def _moses(self) -> dict[str, tuple[Any, Any]]:
        """Punctuation normaliser and tokeniser of either language."""
        sacremoses = need("sacremoses")
        from .moses import PerlTokeniser
        from .punctuation import PerlNormaliser, PunctuationNormaliser

        normaliser, tokeniser = PunctuationNormaliser, sacremoses.MosesTokenizer
        if self.perl:
            normaliser, tokeniser = PerlNormaliser, PerlTokeniser
        return {language: (normaliser(language), tokeniser(language)) for language in {self.source, self.target}}

    @cached_property
    def _detokeniser(self) -> Any:
        return need("sacremoses").MosesDetokenizer(self.target)
