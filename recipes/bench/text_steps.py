"""How fast the recipes' text steps are on one core: lines a second next to other programs, in turns.

Each row is one step's own work on the same lines, without reading and writing. Moses' scripts are timed as commands,
including their start, where `perl` is found and --moses names a folder with scripts/ in it; its cleaning includes
reading and writing. subword-nmt learns and applies where it is installed. A ratio is the median over the rounds.

    python recipes/bench/text_steps.py                        # on generated text
    python recipes/bench/text_steps.py --text train.en --language en --moses mosesdecoder
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["RAYON_NUM_THREADS"] = "1"

from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.steps import bpe  # noqa: E402
from recipes.steps.cleaning import Cleaner  # noqa: E402
from recipes.steps.common import read_lines, run, write_lines  # noqa: E402
from recipes.steps.text import BPE, Text  # noqa: E402


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--text", type=Path, help="raw text, one sentence per line (default: generated)")
    top.add_argument("--language", default="en", help="its language (default: en)")
    top.add_argument("--lines", type=int, default=50000, help="of the text, at most (default: 50000)")
    top.add_argument("--merges", type=int, default=5000, help="to learn (default: 5000)")
    top.add_argument("--rounds", type=int, default=3, help="each program's turns (default: 3)")
    top.add_argument("--moses", type=Path, help="folder of mosesdecoder, to time its Perl")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    top.set_defaults(device="cpu", clock="wall")
    return top


def generated(lines: int) -> list[str]:
    """Sentences of made-up words, frequent ones and rare ones, with punctuation."""
    source = random.Random(1)
    syllables = [first + vowel for first in "bdfgklmnprst" for vowel in ("a", "e", "i", "o", "u", "é")]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(20000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    found = []
    for _ in range(lines):
        sentence = source.choices(words, weights, k=source.randint(3, 40))
        sentence[source.randrange(len(sentence))] += source.choice(
            [",", "'s", ' "it"', " U.S.", " 3,5", " &", " well-known"]
        )
        found.append(" ".join(sentence).capitalize() + ".")
    return found


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(rounds: int, ours: Callable[[], object], other: Callable[[], object]) -> tuple[float, float, float]:
    """Median seconds of either side, and the median ratio of the rounds."""
    pairs = []
    for number in range(rounds):
        order = (ours, other) if number % 2 == 0 else (other, ours)
        seconds = [timed(work) for work in order]
        pairs.append(seconds if number % 2 == 0 else seconds[::-1])
    ratios = [first / second for first, second in pairs]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs), statistics.median(ratios)


def piped(lines: list[str], *commands: list[object]) -> Callable[[], object]:
    """An action that pipes the lines through the commands."""
    given = "".join(f"{line}\n" for line in lines).encode()
    text = " | ".join(" ".join(f"'{part}'" for part in command) for command in commands)
    return lambda: subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        input=given,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )


class Report:
    """The rows of the table, each printed as it is found."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, step: str, beside: str, lines: int, seconds: tuple[float, float, float], note: str = "") -> None:
        first, second, ratio = lines / seconds[0], lines / seconds[1], seconds[2]
        print(f"{step:34} {first:10.0f} {beside:24} {second:10.0f} {ratio:7.3f}  {note}".rstrip(), flush=True)
        found = {"step": step, "lines_per_s": first, "beside": beside, "lines_per_s_beside": second}
        self.rows.append({**found, "ratio": ratio, "note": note})


def given(args: argparse.Namespace) -> list[str]:
    """The lines to work on.

    Raises:
        ValueError: there are none, or what --moses needs is not there.
    """
    raw = read_lines(args.text)[: args.lines] if args.text else generated(args.lines)
    if not raw:
        raise ValueError(f"{args.text}: no lines; expected text. Give another file.")
    if args.moses and not (args.moses / "scripts/tokenizer/tokenizer.perl").exists():
        raise ValueError(f"{args.moses}/scripts/tokenizer/tokenizer.perl is not there; expected mosesdecoder's folder.")
    if args.moses and not shutil.which("perl"):
        raise ValueError("--moses: perl is not installed; expected it to run Moses' scripts. Leave --moses out.")
    return raw


def moses_tokenizer(args: argparse.Namespace, settings: dict[str, bool]) -> list[list[object]]:
    """Moses' commands for a way to tokenise, to be piped."""
    folder = args.moses / "scripts/tokenizer"
    command: list[object] = ["perl", folder / "tokenizer.perl", "-q", "-l", args.language]
    if not settings:
        return [command]
    normalise = ["perl", folder / "normalize-punctuation.perl", "-l", args.language]
    return [normalise, ["perl", folder / "remove-non-printing-char.perl"], [*command, "-a"]]


def tokenising(report: Report, args: argparse.Namespace, raw: list[str]) -> list[str]:
    """Time it, with Moses' rules line for line and with sacremoses'. Returns the tokens of the first way."""

    def tokenised(text: Text) -> list[str]:
        return [text.tokenise(line, args.language) for line in raw]

    ways = {"tokenise": {}, "tokenise (-a, normalised)": {"normalise": True, "aggressive_dashes": True}}
    tokens: list[str] = []
    for name, settings in ways.items():
        text, plain = (Text(args.language, args.language, escape=True, perl=perl, **settings) for perl in (True, False))
        for each in (text, plain):
            each.tokenise("x", args.language)
        exact = partial(tokenised, text)
        report.add(name, "sacremoses", len(raw), in_turns(args.rounds, exact, partial(tokenised, plain)))
        if args.moses:
            perl = piped(raw, *moses_tokenizer(args, settings))
            report.add(name, "Moses' Perl", len(raw), in_turns(args.rounds, exact, perl))
        tokens = tokens or exact()
    return tokens


def cleaning(report: Report, args: argparse.Namespace, tokens: list[str], folder: Path) -> None:
    cleaner = Cleaner(1, 175, 1.5)
    other_side = tokens[::-1]

    def clean() -> int:
        return sum(not isinstance(cleaner.cleaned(*pair), str) for pair in zip(tokens, other_side))

    if not args.moses:
        report.add("clean (pairs)", "", len(tokens), (timed(clean), float("nan"), float("nan")))
        return
    for side, lines in (("a", tokens), ("b", other_side)):
        write_lines(folder / f"x.{side}", lines)
    script = args.moses / "scripts/training/clean-corpus-n.perl"
    perl = ["perl", script, "-ratio", 1.5, folder / "x", "a", "b", folder / "y", 1, 175]
    report.add("clean (pairs)", "Moses' Perl", len(tokens), in_turns(args.rounds, clean, piped([], perl)))


def learning(report: Report, args: argparse.Namespace, tokens: list[str], learn_other: Callable) -> list[str]:
    """Time learning merges. Returns ours, as lines of a file of codes."""
    found: dict[str, list[str]] = {}

    def ours() -> None:
        found["ours"] = bpe.learn(["\n".join(tokens)], args.merges)

    def theirs() -> None:
        out = io.StringIO()
        with contextlib.redirect_stderr(io.StringIO()):
            learn_other(tokens, out, args.merges)
        found["theirs"] = out.getvalue().splitlines()

    seconds = in_turns(args.rounds, ours, theirs)
    same = set.intersection(*({tuple(line.split()[:2]) for line in lines} for lines in found.values()))
    report.add("learn", "subword-nmt", len(tokens), seconds, f"{len(same)} of {len(found['ours'])} merges the same")
    return found["ours"]


def applying(
    report: Report, args: argparse.Namespace, tokens: list[str], learnt: list[str], folder: Path, other: Callable
) -> None:
    write_lines(folder / "codes", learnt)
    codes = BPE(folder / "codes")
    merges = "".join(" ".join(line.split()[:2]) + "\n" for line in learnt)
    results = {}

    def apply() -> None:
        results["ours"] = codes.apply(tokens)

    def apply_other() -> None:
        # Made again each time, as it remembers the words it has split.
        splitter = other(io.StringIO(f"#version: 0.2\n{merges}"))
        results["theirs"] = [splitter.process_line(line) for line in tokens]

    seconds = in_turns(args.rounds, apply, apply_other)
    equal = sum(map(str.__eq__, results["ours"], results["theirs"]))
    report.add("apply", "subword-nmt", len(tokens), seconds, f"{equal} of {len(tokens)} lines the same")


def bench(args: argparse.Namespace) -> None:
    raw = given(args)
    print(f"{args.text or 'generated text'}, {args.language}: {len(raw)} lines, one core, medians of {args.rounds}")
    print(f"{'':34} {'lines/s':>10} {'':24} {'lines/s':>10} {'ratio of times':>7}")
    report = Report()
    tokens = tokenising(report, args, raw)
    with tempfile.TemporaryDirectory() as name:
        cleaning(report, args, tokens, Path(name))
        try:
            from subword_nmt.apply_bpe import BPE as Other
            from subword_nmt.learn_bpe import learn_bpe
        except ImportError:
            raise ValueError(
                "subword-nmt is not installed; expected it to compare with. Run pip install subword-nmt."
            ) from None
        applying(report, args, tokens, learning(report, args, tokens, learn_bpe), Path(name), Other)
    text = {"text": args.text.name if args.text else "generated", "language": args.language, "lines": len(raw)}
    keep(args.csv, {**text, "rounds": args.rounds, **conditions(args)}, report.rows)


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    run(lambda: bench(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
