"""Normalise punctuation by sacremoses' rules.

`PunctuationNormaliser` applies the rules in sacremoses' order, but faster. `PerlNormaliser` does exactly what Moses'
scripts do.
"""

from __future__ import annotations

import re

import regex
from sacremoses import MosesPunctNormalizer


class PunctuationNormaliser(MosesPunctNormalizer):
    """sacremoses' normaliser with its eighty rules compiled once. Full-width punctuation is replaced first."""

    def __init__(self, language: str) -> None:
        super().__init__(language)
        self._compile([*self.REPLACE_UNICODE_PUNCTUATION, *self.substitutions])

    def _compile(self, rules: list[tuple[str, str]], flags: int = 0) -> None:
        self._rules = [(re.compile(pattern, flags), replacement) for pattern, replacement in rules]
        # Outside ASCII, characters in patterns stand for themselves, so such a pattern matches no line of ASCII.
        self._rules_of_ascii = [rule for rule in self._rules if rule[0].pattern.isascii()]

    def _apply(self, text: str) -> str:
        for pattern, replacement in self._rules_of_ascii if text.isascii() else self._rules:
            text = pattern.sub(replacement, text)
        return text

    def normalize(self, text: str) -> str:
        return self._apply(text).strip()


class PerlNormaliser(PunctuationNormaliser):
    """normalize-punctuation.perl and then remove-non-printing-char.perl."""

    UNPRINTABLE = regex.compile(r"\p{C}")

    def __init__(self, language: str) -> None:
        MosesPunctNormalizer.__init__(self, language, norm_quote_commas=False, norm_numbers=False, perl_parity=True)
        rules = list(self.substitutions)
        if language == "en":
            rules += self.EN_QUOTATION_FOLLOWED_BY_COMMA
        elif language not in ("cs", "cz"):
            rules += self.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
        rules += self.DE_ES_CZ_CS_FR if language in ("de", "es", "cz", "cs", "fr") else self.OTHER
        # The script reads bytes, so it knows only the digits and white space of ASCII.
        self._compile(rules, re.ASCII)

    def normalize(self, text: str) -> str:
        # The script keeps the newline. So its rule that turns ." into ". also matches at the end of a line.
        return self.UNPRINTABLE.sub(" ", self._apply(f"{text}\n"))
