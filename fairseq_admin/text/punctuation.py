"""sacremoses' punctuation normaliser: what it writes, in less time.

It has some eighty rules, and most of them look for a character that most lines have not: those are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sacremoses import MosesPunctNormalizer


class Rules:
    """Substitutions, one after the other.

    A character outside ASCII in a pattern stands for itself, and no replacement has one that its pattern has not. So a
    rule with one that the line has not changes nothing.
    """

    def __init__(self, rules: Iterable[tuple[str, str]], flags: int = 0) -> None:
        """
        Args:
            rules: patterns of `re`, and what replaces them.
            flags: of `re`.
        """
        self._rules = [
            (frozenset(c for c in pattern if not c.isascii()), re.compile(pattern, flags), replacement)
            for pattern, replacement in rules
        ]
        self._for_ascii = [rule for rule in self._rules if not rule[0]]

    def apply(self, text: str) -> str:
        """The text with all of them applied."""
        rules = self._for_ascii
        if not text.isascii():
            there = set(text)
            rules = [rule for rule in self._rules if rule[0] <= there]
        for _, pattern, replacement in rules:
            text = pattern.sub(replacement, text)
        return text


class PunctuationNormaliser(MosesPunctNormalizer):
    """sacremoses' own, with full-width punctuation replaced first."""

    def __init__(self, language: str) -> None:
        super().__init__(language)
        self._rules = Rules([*self.REPLACE_UNICODE_PUNCTUATION, *self.substitutions])

    def normalize(self, text: str) -> str:
        return self._rules.apply(text).strip()
