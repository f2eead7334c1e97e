"""Parallel texts: tokenise, clean, join and split them. Files are written completely or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fairseq_admin.text.tokens import Text, removal_note
from recipes.steps import cleaning, streaming
from recipes.steps.common import decoded, read_lines, replacing_files

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of tokenising and cleaning. Raise it with a change that gives the same raw text other words."""
LONGEST = 1024 - 1
"""Most BPE tokens in a line that a model can read: its positions (fairseq's default is 1,024) without the end of the
sentence. fairseq fails at a longer line; in a test set, only after the training."""
Sides = list[list[str]]
"""Lines of each text."""


def is_long(line: str) -> bool:
    return line.count(" ") >= LONGEST


def skipped(prefix: Path, languages: Sequence[str]) -> set[int]:
    """Numbers, from 0, of the pairs that fairseq skips since a side is too long. PREFIX.de and PREFIX.en are in BPE."""
    sides = (read_lines(f"{prefix}.{language}") for language in languages)
    return {number for lines in sides for number, line in enumerate(lines) if is_long(line)}


def convert(
    change: Callable[[Sides], Sides], paths: Sequence[Path], outputs: Sequence[Path], clean: Sequence[str] = (),
    too_long: str = "",
) -> None:  # fmt: skip
    """Convert parallel texts on all cores, and drop pairs.

    Args:
        change: converts a block of lines of each side. The number of lines stays the same.
        clean: the words of --clean.
        too_long: `refuse` or `skip` lines that are too long for the model; empty: do not look for them.

    Raises:
        ValueError: a text is not UTF-8, the texts differ in their number of lines, no pair is left, or a line is too
            long for the model and `too_long` is refuse.
    """
    rule = cleaning.rule(clean)

    def work(block: streaming.Block) -> tuple[list[bytes], Counter[str], list[str]]:
        """The text to write for each side, counts of dropped pairs by reason, and the lines that are too long."""
        first, sides = block
        pairs = list(zip(*change([decoded(lines, path, first) for lines, path in zip(sides, paths)])))
        reasons = [rule(*pair) for pair in pairs]
        kept = [(number, pair) for number, (pair, reason) in enumerate(zip(pairs, reasons), first) if not reason]
        long = [
            f"{path}: line {number}"
            for number, pair in (kept if too_long else ())
            for path, line in zip(paths, pair)
            if is_long(line)
        ]
        written = ["".join(f"{pair[side]}\n" for _, pair in kept).encode() for side in range(len(paths))]
        return written, Counter(reasons), long

    counts, long = Counter[str](), []
    with replacing_files(*outputs) as files:
        for sides, reasons, long_lines in streaming.parallel(work, streaming.blocks(*paths)):
            for file, side in zip(files, sides):
                file.write(side)
            counts += reasons
            long += long_lines
        if long:
            message = f"{long[0]} is of more than {LONGEST} units, which is what the model reads"
            message += f" ({len(long)} such lines in all)" if len(long) > 1 else ""
            if too_long == "refuse":
                raise ValueError(
                    f"{message}. Split it in the raw text, and its translation with it, or give "
                    "PREPARE_ARGS='--too-long skip', which counts it as not translated."
                )
            logger.info("%s; skipped: it has no loss and an empty translation.", message)
        cleaning.report(" ".join(map(str, paths)), counts)


def tokenise(settings: Path, raw: Path, out: Path, clean: Sequence[str] = (), normalise: bool = True) -> None:
    """Tokenise RAW.de and RAW.en by the rules of text.json, line by line, and drop pairs by `clean`.

    Args:
        settings: path of text.json.
        normalise: False: do not normalise punctuation, even if text.json does.
    """
    text = Text.read(settings)
    text = dataclasses.replace(text, normalise=text.normalise and normalise)
    codes = (text.source, text.target)

    def change(sides: Sides) -> Sides:
        return [[text.tokenise(line, code) for line in side] for side, code in zip(sides, codes)]

    paths, outputs = ([Path(f"{prefix}.{code}") for code in codes] for prefix in (raw, out))
    convert(change, paths, outputs, clean)
    for path in paths:
        with path.open(encoding="utf-8", newline="\n") as lines:
            if counts := text.removed(lines):
                logger.info("%s: %s.", path, removal_note(counts))


def split(parts: Sequence[Path], languages: Sequence[str], out: Path, every: int = 1, keep: str | None = None) -> None:
    """Join parallel texts into OUT.de and OUT.en.

    Args:
        every: N, for `keep`.
        keep: `nth`: keep every Nth pair; `rest`: keep the other pairs; None: keep all.
    """
    for language in languages:
        lines = itertools.chain.from_iterable(Path(f"{part}.{language}").open("rb") for part in parts)
        with replacing_files(f"{out}.{language}") as (file,):
            file.writelines(
                line for number, line in enumerate(lines, 1) if not keep or (number % every == 0) == (keep == "nth")
            )
