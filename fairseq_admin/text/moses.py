"""Moses' tokenizer.perl, normalize-punctuation.perl and lowercase.perl, line for line, on top of sacremoses.

sacremoses differs from the scripts of mosesdecoder's main branch: it keeps the full stop of a last word that looks like
an abbreviation, it knows fewer letters and other control characters, and it normalises a line without its newline.
Here its public rules are replaced by those of the scripts. Where a script leaves several spaces, or one at an end,
there is one or none here.
"""

from __future__ import annotations

import re
from functools import cache, cached_property

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer
from sacremoses._data_nonbreaking_prefixes import NONBREAKING_PREFIXES
from sacremoses.corpus import NonbreakingPrefixes

from ..errors import AdminError
from .punctuation import Rules

RULES_OF_THEIR_OWN = ("ca", "fi", "ga", "so", "sv", "tdt")
"""Languages for which tokenizer.perl has rules that sacremoses lacks."""
NUMERIC_ONLY = re.compile(r"(.*)\s+#NUMERIC_ONLY#")


class Tokeniser(MosesTokenizer):
    """tokenizer.perl."""

    # Perl's white space, without the separators that Python counts (U+001C to U+001F); these go with the ASCII junk.
    DEDUPLICATE_SPACE = re.compile(r"[^\S\x1c-\x1f]+"), " "

    def __init__(self, language: str, last: int = 0xFFFF) -> None:
        """Prepare for a language.

        Args:
            language: the code that tokenizer.perl is given.
            last: the rules know characters up to this one; for a line with others there is a second tokeniser. With
                the first 65,536 alone, `re` looks a character up in a table.

        Raises:
            AdminError: the script treats the language in a way of its own, which is not here.
        """
        if language in RULES_OF_THEIR_OWN:
            raise AdminError(
                f"{language!r}: Moses has rules for {', '.join(RULES_OF_THEIR_OWN)} that are not here. Tokenise with "
                "its own scripts, or turn 'perl' off."
            )
        super().__init__(language)
        self._last = last
        alpha, number = _characters(r"\p{Alphabetic}", last), _characters(r"\p{N}", last)
        alnum = _characters(r"\p{Alphabetic}\p{Nd}", last)
        self.PAD_NOT_ISALNUM = re.compile(rf"([^{alnum}\s.'`,\-])"), r" \1 "
        self.AGGRESSIVE_HYPHEN_SPLIT = re.compile(rf"([{alnum}])-(?=[{alnum}])"), r"\1 @-@ "
        self.COMMA_SEPARATE_1 = re.compile(rf"([^{number}]),"), r"\1 , "
        self.COMMA_SEPARATE_2 = re.compile(rf",([^{number}])"), r" , \1"
        self.COMMA_SEPARATE_3 = re.compile(rf"([{number}]),$"), r"\1 , "
        between_others = re.compile(rf"([^{alpha}])'([^{alpha}])"), r"\1 ' \2"
        after_a_letter = re.compile(rf"([{alpha}])'([^{alpha}])"), r"\1 ' \2"
        self.ENGLISH_SPECIFIC_APOSTROPHE = [
            between_others,
            (re.compile(rf"([^{alpha}{number}])'([{alpha}])"), r"\1 ' \2"),
            after_a_letter,
            (re.compile(rf"([{alpha}])'([{alpha}])"), r"\1 '\2"),
            (re.compile(rf"([{number}])'(s)"), r"\1 '\2"),
        ]
        self.FR_IT_SPECIFIC_APOSTROPHE = [
            between_others,
            (re.compile(rf"([^{alpha}])'([{alpha}])"), r"\1 ' \2"),
            after_a_letter,
            (re.compile(rf"([{alpha}])'([{alpha}])"), r"\1' \2"),
        ]
        self._letter = re.compile(f"[{alpha}]")
        self._small = re.compile(f"[{_characters(chr(92) + 'p{Lowercase}', last)}]")
        self._before_numbers, self._abbreviations = _prefixes(language)

    @cached_property
    def _beyond(self) -> Tokeniser:
        return Tokeniser(self.lang, 0x10FFFF)

    def tokens(self, text: str, aggressive_dashes: bool, escape: bool) -> str:
        """The line's tokens with spaces between them."""
        known = self._last == 0x10FFFF or max(text, default="") <= chr(self._last)
        tokeniser = self if known else self._beyond
        found = tokeniser.tokenize(text, aggressive_dash_splits=aggressive_dashes, escape=escape, return_str=True)
        return " ".join(found.split())

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        """Split the full stop off each word, unless it is an abbreviation; off the last word always."""
        words = text.split()
        for number, word in enumerate(words):
            if len(word) > 1 and word[-1] == ".":
                following = words[number + 1] if number + 1 < len(words) else None
                if following is None or not self._abbreviated(word[:-1], following):
                    words[number] = f"{word[:-1]} ."
        return " ".join(words)

    def _abbreviated(self, word: str, following: str) -> bool:
        if ("." in word and self._letter.search(word)) or word in self._abbreviations or self._small.match(following):
            return True
        return word in self._before_numbers and following[0] in "0123456789"


class Normaliser(MosesPunctNormalizer):
    """normalize-punctuation.perl and then remove-non-printing-char.perl."""

    def __init__(self, language: str) -> None:
        super().__init__(language, norm_quote_commas=False, norm_numbers=False, perl_parity=True)
        rules: list[tuple[str, str]] = list(self.substitutions)
        if language == "en":
            rules += self.EN_QUOTATION_FOLLOWED_BY_COMMA
        elif language not in ("cs", "cz"):
            rules += self.DE_ES_FR_QUOTATION_FOLLOWED_BY_COMMA
        rules += self.DE_ES_CZ_CS_FR if language in ("de", "es", "cz", "cs", "fr") else self.OTHER
        # The script reads bytes: to it, only ASCII has digits and white space.
        self._rules = Rules(rules, re.ASCII)
        self._unprintable = re.compile(f"[{_characters(chr(92) + 'p{C}', 0xFFFF)}]")

    def normalize(self, text: str) -> str:
        """The line, its newline put where a script put it."""
        # The script leaves the newline in, and moves a quotation mark before a full stop that only it follows.
        text = self._unprintable.sub(" ", self._rules.apply(f"{text}\n"))
        return text if max(text, default="") <= "\uffff" else regex.sub(r"\p{C}", " ", text)


def _prefixes(language: str) -> tuple[frozenset[str], frozenset[str]]:
    """The language's abbreviations: those that are one before a number only, and the others.

    From Moses' own list and in the script's way, which sacremoses does not keep to: blanks at the end of an entry are
    part of it, so that it matches no word, and of an abbreviation that is there twice the later entry counts.
    """
    code = NonbreakingPrefixes().available_langs.get(language, "en")
    entries: dict[str, bool] = {}
    for entry in NONBREAKING_PREFIXES[f"nonbreaking_prefix.{code}"].split("\n"):
        if entry not in ("", "0") and not entry.startswith("#"):
            numeric = NUMERIC_ONLY.match(entry)
            entries[numeric[1] if numeric else entry] = bool(numeric)
    before_numbers = frozenset(entry for entry, numeric in entries.items() if numeric)
    return before_numbers, frozenset(entries) - before_numbers


def lower(tokens: str) -> str:
    """lowercase.perl: Python alone writes a sigma at the end of a word in another way."""
    return tokens.lower() if "\u03a3" not in tokens else tokens.replace("\u03a3", "\u03c3").lower()


@cache
def _characters(properties: str, last: int) -> str:
    """The characters with one of these Unicode properties, up to the last, as ranges inside a class of `re`."""
    every = "".join(map(chr, range(last + 1)))
    runs = (run.group() for run in regex.finditer(f"[{properties}]+", every))
    return "".join(f"\\U{ord(run[0]):08x}-\\U{ord(run[-1]):08x}" for run in runs)
