"""What a pair's languages mean: which of them the tokeniser knows, and by which tokens the target is scored."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

    from fairseq_admin.text.tokens import Text

logger = logging.getLogger(__name__)

UNSPACED = {"zh": "zh", "cmn": "zh", "yue": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""sacreBLEU's tokenisers of the languages whose words its usual one, 13a, does not find."""
CJK = ("ja", "ko")
"""Languages that sacremoses knows without a list of abbreviations."""


def metric(text: Text) -> BLEU:
    """sacreBLEU for the target language. A model of lower-case text cannot know the case.

    Raises:
        ValueError: the target's tokeniser needs packages that are not installed.
    """
    from sacrebleu.metrics import BLEU  # a fifth of a second, which a recipe with nothing to do can spare

    language = re.split("[_-]", text.target.lower())[0]  # zh of zh_CN
    try:
        return BLEU(lowercase=text.lowercase, tokenize=UNSPACED.get(language, "13a"))
    except RuntimeError:  # its advice has several lines
        raise ValueError(
            f"{text.target}: sacreBLEU needs MeCab to find the words of this language, and it is not installed. Run "
            f"pip install 'sacrebleu[{language}]' in the virtual environment, then make again."
        ) from None


def say_unknown(text: Text) -> None:
    """Say in one line which of the two languages the tokeniser treats as English because it does not know them."""
    from sacremoses.corpus import NonbreakingPrefixes

    known = {*NonbreakingPrefixes().available_langs, *CJK}
    unknown = [language for language in (text.source, text.target) if language not in known]
    if unknown:
        logger.info(
            "The tokeniser does not know %s and treats it as English. It knows %s.",
            " and ".join(unknown),
            " ".join(sorted(code for code in known if len(code) < 4)),
        )
