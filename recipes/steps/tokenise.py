"""From raw text to tokens: how, which is settled once for a recipe, and the tokens of a pair of texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fairseq_admin.text.tokens import Text
from recipes.steps import languages, pairs
from recipes.steps.common import replacing


def settle(out: Path, source: str, target: str, settings: Sequence[str]) -> None:
    """Write how a recipe's text is tokenised, for its steps and for whoever translates with the model.

    Raises:
        ValueError: translations could not be scored.
    """
    text = Text(source, target, **dict.fromkeys(settings, True))
    languages.say_unknown(text)
    languages.metric(text)  # before anything is trained
    with replacing(out) as part:
        text.write(part)


def tokenise(settings: Path, raw: Path, out: Path, clean: Sequence[str] = (), normalise: bool = True) -> None:
    """Tokenise RAW.de and RAW.en as text.json says, line for line, but for pairs that cleaning drops.

    Args:
        clean: the options of CLEAN=, for training text.
        normalise: whether punctuation is normalised, where text.json says so.
    """
    text = Text.read(settings)
    text = dataclasses.replace(text, normalise=text.normalise and normalise)
    codes = (text.source, text.target)

    def change(sides: pairs.Sides) -> pairs.Sides:
        return [[text.tokenise(line, code) for line in side] for side, code in zip(sides, codes)]

    paths, outputs = ([Path(f"{prefix}.{code}") for code in codes] for prefix in (raw, out))
    pairs.convert(change, paths, outputs, clean)
