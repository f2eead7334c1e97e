"""Score the translations of a test set, with chrF2 and up to three BLEU scores:

score      sacreBLEU of the detokenised translations against the raw reference: the score to compare today
chrf       chrF2 of the same, by sacreBLEU: F of characters, which needs no tokeniser
tokenised  BLEU of words against the words of the reference, as fairseq-generate prints and the papers on Admin report
compound   BLEU by fairseq's compound_split_bleu.sh, which other papers report for English to German
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from fairseq_admin.text.bpe import remove_bpe
from fairseq_admin.text.tokens import Text
from recipes.steps import pairs
from recipes.steps.common import read_lines, write_lines

logger = logging.getLogger(__name__)

HYPOTHESIS = re.compile(r"H-(\d+)\t[^\t]*\t(.*)")
RESULT = re.compile(r"(?:^|[:| ])Loss \(base 2\): ([0-9.]+), Perplexity: ([0-9.]+|inf)$")
PERPLEXITY = "perplexity a word, test set, as fairseq-eval-lm counts words with BPE joined"
"""The signature of a perplexity."""
DRAWS = 2 * 10**7
"""Largest number of sentences in all resamples of a test set. A sentence takes up to 72 bytes."""
UNSPACED = {"zh": "zh", "cmn": "zh", "yue": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""sacreBLEU's tokenisers for languages whose words its default tokeniser, 13a, does not find."""


def metrics_of(text: Text) -> tuple[BLEU, CHRF]:
    """sacreBLEU and chrF2 for the target language. If the text is in lower case, the scores ignore case.

    Raises:
        ValueError: the tokeniser of the target language needs packages that are not installed.
    """
    language = re.split("[_-]", text.target.lower())[0]  # zh of zh_CN
    try:
        bleu = BLEU(lowercase=text.lowercase, tokenize=UNSPACED.get(language, "13a"))
        return bleu, CHRF(lowercase=text.lowercase)
    except RuntimeError:  # sacreBLEU's own message has several lines
        raise ValueError(
            f"{text.target}: sacreBLEU needs MeCab to find the words of this language, and it is not installed. Run "
            f"pip install 'sacrebleu[{language}]' in the virtual environment, then make again."
        ) from None


def hypotheses(lines: list[str], count: int, skipped: Container[int] = ()) -> list[str]:
    """The hypotheses in fairseq-generate's output, in the order of the test set, still in BPE tokens.

    fairseq translates the longest sentences first, and skips sentences that are too long for the model. The hypothesis
    of a skipped sentence is empty. Of several hypotheses (`--nbest`) fairseq prints the best first, and it is taken.

    Args:
        skipped: numbers of the skipped sentences, from 0.

    Raises:
        ValueError: a hypothesis is missing, or has a number outside the test set.
    """
    translated: dict[int, str] = {}
    for match in filter(None, map(HYPOTHESIS.fullmatch, lines)):
        number = int(match[1])
        if number >= count:
            raise ValueError(
                f"hypothesis H-{number} is outside the {count} sentences of the test set; "
                "remove the generated text and generate it again."
            )
        translated.setdefault(number, match[2])
    missing = [number for number in range(count) if number not in translated and number not in skipped]
    if missing:
        raise ValueError(
            f"{len(missing)} of {count} hypotheses are missing, the first for sentence {missing[0] + 1}; "
            "expected one for every sentence. Remove the generated text and generate it again."
        )
    return [translated.get(number, "") for number in range(count)]


def split_compounds(line: str) -> str:
    """Split words as fairseq's compound_split_bleu.sh does: rich-text -> rich ##AT##-##AT## text.

    A hyphen that the tokeniser has split is split once more: rich @-@ text -> rich @ ##AT##-##AT## @ text. That gives
    five words to match instead of three, which raises BLEU. Papers report BLEU with five words; `tokenised` has three.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def measured(metric: BLEU | CHRF, hypotheses: list[str], references: list[str]) -> tuple[str, str]:
    """The score and its signature."""
    return f"{metric.corpus_score(hypotheses, [references]).score:.2f}", str(metric.get_signature())


def scores(text: Text, tokens: list[str], raw: list[str], tokenised: list[str], compounds: bool) -> dict[str, str]:
    """The scores with their signatures.

    Args:
        tokens: the words of the translations, with BPE undone.
        raw: the reference as it was published.
        tokenised: the words of the reference.
        compounds: whether to compute the third score.
    """
    results, plain = {}, [text.detokenise(line) for line in tokens]
    sacrebleu, chrf = metrics_of(text)
    results["score"], results["signature"] = measured(sacrebleu, plain, raw)
    results["chrf"], results["chrf_signature"] = measured(chrf, plain, raw)
    # BLEU of words, as multi-bleu.perl and fairseq compute it.
    words = BLEU(tokenize="none", smooth_method="none", force=True)
    results["tokenised"], results["tokenised_signature"] = measured(words, tokens, tokenised)
    if compounds:
        split = [[split_compounds(line) for line in side] for side in (tokens, tokenised)]
        results["compound"], results["compound_signature"] = measured(words, *split)
    return results


def paired(text: Text, systems: dict[str, list[str]], references: list[str]) -> tuple[dict[str, list[Any]], int]:
    """sacreBLEU's paired bootstrap of translations, each against the first: is a difference more than chance?

    Args:
        systems: detokenised translations by the name of the run.
        references: the reference as it was published.

    Returns:
        sacreBLEU's results by score, in the order of the systems: mean, ci (half of the 95 % interval) and p_value; and
        the number of resamples. There are fewer than 1,000 for a large test set, since all are in memory at once.
    """
    logging.getLogger("sacrebleu").setLevel(logging.WARNING)  # it logs each step
    metrics = dict(zip(("BLEU", "chrF2"), metrics_of(text)))
    count = max(100, min(1000, DRAWS // len(references)))
    _, results = PairedTest(list(systems.items()), metrics, [references], "bs", count)()
    return {"sacreBLEU": results["BLEU"], "chrF2": results["chrF2"]}, count


def translations(run: Path, text: Text, raw: Path, words: Path, units: Path, compounds: bool) -> dict[str, str]:
    """Score RUN/generate.txt, and write RUN/translations.txt.

    Args:
        raw, words, units: prefixes of the test set as raw text, words and BPE tokens, such as RAW of RAW.de.

    Raises:
        ValueError: a translation is missing.
    """
    references = read_lines(f"{raw}.{text.target}")
    skipped = pairs.skipped(units, (text.source, text.target))
    if skipped:
        logger.info("%d of %d sentences are too long for the model and scored as empty.", len(skipped), len(references))
    lines = hypotheses(read_lines(run / "generate.txt"), len(references), skipped)
    tokens = [remove_bpe(line) for line in lines]
    write_lines(run / "translations.txt", [text.detokenise(line) for line in tokens])
    return scores(text, tokens, references, read_lines(f"{words}.{text.target}"), compounds)


def perplexity(lines: list[str]) -> str:
    """The perplexity in the output of fairseq-eval-lm.

    Raises:
        ValueError: the output has no perplexity, or several.
    """
    perplexities = [match[2] for line in lines if (match := RESULT.search(line))]
    if len(perplexities) != 1:
        raise ValueError(
            f"found {len(perplexities)} perplexities in fairseq-eval-lm's output; expected one. Remove it, try again."
        )
    return perplexities[0]
