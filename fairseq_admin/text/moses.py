"""Two tokenisers on top of sacremoses.

`Tokeniser` is sacremoses' own tokeniser, except that it keeps zero-width joiners. `PerlTokeniser` makes the same tokens
as Moses' Perl scripts, line for line.

sacremoses differs from the scripts of mosesdecoder's main branch: it keeps the full stop of a last word that looks like
an abbreviation, and knows fewer letters and other control characters. `PerlTokeniser` replaces the public rules of
sacremoses by those of the scripts. Only spaces differ from the scripts: never two in a row, none at the ends.
"""

from __future__ import annotations

import re
from functools import cache, cached_property

import regex
from sacremoses import MosesTokenizer
from sacremoses._data_nonbreaking_prefixes import NONBREAKING_PREFIXES
from sacremoses.corpus import NonbreakingPrefixes

from ..errors import AdminError
from . import JOINERS

NOT_HERE = ("ca", "fi", "ga", "so", "sv", "tdt")
"""Languages for which tokenizer.perl has rules that sacremoses lacks."""
NUMERIC_ONLY = re.compile(r"(.*)\s+#NUMERIC_ONLY#")


class Tokeniser(MosesTokenizer):
    """sacremoses' own tokeniser, but a joiner stays between the letters or the emoji that it joins."""

    def __init__(self, language: str) -> None:
        super().__init__(language)  # Chinese, Japanese and Korean have more letters than others
        other = rf"[^{self.IsAlnum}{JOINERS}\s.'`,\-]"
        modifiers = "[\ufe0f\U0001f3fb-\U0001f3ff]*"  # modifiers of an emoji: presentation and skin tone
        self.PAD_NOT_ISALNUM = re.compile(rf"({other}(?:(?:{modifiers}\u200d{other})+{modifiers})?)"), r" \1 "


class PerlTokeniser(MosesTokenizer):
    """tokenizer.perl."""

    # Perl's white space: without U+001C to U+001F, which Python counts and which the rule for ASCII junk removes.
    DEDUPLICATE_SPACE = re.compile(r"[^\S\x1c-\x1f]+"), " "

    def __init__(self, language: str, last: int = 0xFFFF) -> None:
        """Compile the rules of a language.

        Args:
            language: the code for tokenizer.perl.
            last: the last character that the rules know; a second tokeniser takes lines with later characters. If the
                rules know only the first 65,536 characters, `re` looks characters up in a table, which is 2.5 times as
                fast.

        Raises:
            AdminError: the script has rules for this language that are not here.
        """
        if language in NOT_HERE:
            raise AdminError(
                f"{language!r}: Moses has rules for {', '.join(NOT_HERE)} that are not here. Tokenise with its own "
                "scripts, or turn 'perl' off."
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
        self._abbreviations = _abbreviations(language)

    @cached_property
    def _beyond(self) -> PerlTokeniser:
        return PerlTokeniser(self.lang, 0x10FFFF)

    def tokenize(self, text: str, **options: bool) -> list[str]:
        if max(text, default="") > chr(self._last):
            return self._beyond.tokenize(text, **options)
        return super().tokenize(text, **options)

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        """Split the full stop off each word that is not an abbreviation, and always off the last word."""
        words = text.split()
        for number, word in enumerate(words):
            if len(word) > 1 and word[-1] == ".":
                if number + 1 == len(words) or not self._abbreviated(word[:-1], words[number + 1]):
                    words[number] = f"{word[:-1]} ."
        return " ".join(words)

    def _abbreviated(self, word: str, following: str) -> bool:
        if ("." in word and self._letter.search(word)) or self._small.match(following):
            return True
        before_numbers_only = self._abbreviations.get(word)
        return before_numbers_only is False or (before_numbers_only is True and following[0] in "0123456789")


def _abbreviations(language: str) -> dict[str, bool]:
    """The abbreviations of a language. True: the entry is an abbreviation only before a number.

    This function reads Moses' list as the script does, not as sacremoses does. Blanks at the end of an entry belong to
    the entry, which then matches no word. If an abbreviation is listed twice, its later entry counts.
    """
    code = NonbreakingPrefixes().available_langs.get(language, "en")
    abbreviations: dict[str, bool] = {}
    for entry in NONBREAKING_PREFIXES[f"nonbreaking_prefix.{code}"].split("\n"):
        if entry not in ("", "0") and not entry.startswith("#"):
            numeric = NUMERIC_ONLY.match(entry)
            abbreviations[numeric[1] if numeric else entry] = bool(numeric)
    return abbreviations


def lower(tokens: str) -> str:
    """Lower-case as lowercase.perl does. (At the end of a word, Python's lower() makes a final sigma.)

    Args:
        tokens: the tokens, with spaces between them.

    Returns:
        The tokens.
    """
    return tokens.replace("\u03a3", "\u03c3").lower()


@cache
def _characters(properties: str, last: int) -> str:
    """The characters up to `last` with one of these Unicode properties, as ranges for a character class of `re`."""
    every = "".join(map(chr, range(last + 1)))
    runs = (run.group() for run in regex.finditer(f"[{properties}]+", every))
    return "".join(f"\\U{ord(run[0]):08x}-\\U{ord(run[-1]):08x}" for run in runs)
