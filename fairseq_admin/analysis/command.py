"""fairseq-admin analyze: its options, and the three files that it writes, whole or not at all."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from .. import outputs
from ..errors import AdminError
from ..text.folders import binarised, files_in, folders
from . import figure
from .curves import Runs
from .fresh import Fresh
from .registry import MEASURES
from .sentences import Source
from .settings import Settings
from .subject import Subject, Trained

MODEL = "options of the model of --arch, as for fairseq-train"


def add_options(parser: argparse.ArgumentParser, positive: Callable[[str], Any], rate: Callable[[str], Any]) -> None:
    """The verb's own options; those of a model are added by `add_model`.

    Args:
        positive, rate: read a whole number of at least 1, and a number above 0.
    """
    parser.add_argument("what", choices=list(MEASURES), help="; ".join(f"{k}: {v.text}" for k, v in MEASURES.items()))
    parser.add_argument(
        "checkpoints", type=Path, nargs="*", metavar="CHECKPOINT", help="a trained model; of curves, a run's folder"
    )
    parser.add_argument(
        "--arch", help="instead of a checkpoint, a fresh model; with the options that it would train with"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="name of the files to write, without .json")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=binarised, help="binarised data to measure on")
    source.add_argument("--random-tokens", action="store_true", help="measure on random words instead")
    parser.add_argument("--split", default="valid", help="of the data (default: valid)")
    parser.add_argument("--tokens", type=positive, default=1024, help="how many, at least (default: 1024)")
    parser.add_argument("--seed", type=_seed, default=1, help="of sentences and of fresh weights (default: 1)")
    parser.add_argument("--json", action="store_true", help="write the numbers alone, without a figure")
    own = Settings()
    parser.add_argument("--depths", type=_depths, help="of a fresh model, as 6,8,12 (default: the measure's own)")
    parser.add_argument(
        "--repeats", type=positive, default=own.repeats, help="random draws to average over (default: 3)"
    )
    parser.add_argument("--lr", type=rate, default=own.lr, help="of an optimizer's update (default: 1e-4)")
    parser.add_argument("--updates", type=positive, default=own.updates, help="of a fresh model (default: 10)")
    parser.set_defaults(model_options=())


def _seed(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= int(text) <= LARGEST_SEED:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text} was found and a whole number from 0 to {LARGEST_SEED} was expected")


def _depths(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        depths = tuple(sorted({int(part) for part in text.split(",")}))
        if depths[0] >= 1:
            return depths
    raise argparse.ArgumentTypeError(f"{text} was found and whole numbers of at least 1, as 6,8,12, were expected")


def add_model(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """The options of the model that --arch among the arguments names; none if it names none that is known."""
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("--arch")
    arch = finder.parse_known_args(arguments)[0].arch
    if arch in ARCH_MODEL_REGISTRY:
        # As fairseq does: an option that is not given is not there, so that the preset decides.
        group = parser.add_argument_group(MODEL, argument_default=argparse.SUPPRESS)
        ARCH_MODEL_REGISTRY[arch].add_args(group)
        parser.set_defaults(model_options=tuple(action.dest for action in group._group_actions))


def _subject(args: argparse.Namespace) -> Subject | None:
    measure = MEASURES[args.what]
    if measure.modelless:
        if args.checkpoints or args.arch or args.data:
            raise AdminError(f"{args.what} is of no model, and a CHECKPOINT, --arch or --data was found. Leave it out.")
        return None
    if measure.runs:
        return Runs(args.checkpoints)
    if bool(args.checkpoints) == bool(args.arch):
        found = "both were" if args.arch else "neither was"
        raise AdminError(f"a CHECKPOINT or --arch is expected, and {found} found. Give one of them.")
    if len(args.checkpoints) > 1 and not measure.several:
        raise AdminError(f"{args.what} is of one checkpoint, and {len(args.checkpoints)} were found. Give one.")
    if not (args.data or args.random_tokens or (measure.wordless and args.checkpoints)):
        raise AdminError(
            "there are no sentences to measure on. Give --data, a folder that fairseq-preprocess wrote, or "
            "--random-tokens."
        )
    source = Source(args.data, args.split, args.tokens, args.seed)
    if args.checkpoints:
        return Trained(args.checkpoints, source)
    options = {name: getattr(args, name) for name in args.model_options if hasattr(args, name)}
    return Fresh(args.arch, options, source)


def run(args: argparse.Namespace) -> str:
    """Measure, draw, write; what to say of it."""
    stem = args.output.with_suffix("") if args.output.suffix in SUFFIXES else args.output
    if stem.name in ("", ".."):
        raise AdminError(f"-o {args.output}/ is a folder; the name of the files to write was expected, without .json.")
    paths = [stem.with_name(stem.name + suffix) for suffix in (SUFFIXES[:1] if args.json else SUFFIXES)]
    inputs = [*args.checkpoints, *(files_in(folders(args.data)) if args.data else [])]
    for path in paths:
        outputs.check(path, inputs)
    with contextlib.ExitStack() as taking:
        parts = [taking.enter_context(outputs.unfinished(path)) for path in paths]  # before the work, not after it
        if not args.json:
            figure.require()
        measure, subject = MEASURES[args.what].module, _subject(args)
        settings = Settings(args.depths, args.repeats, args.lr, args.updates)
        found = measure.measure(subject, settings)
        result = {"what": args.what, **(subject.facts() if subject else {}), **found}
        with outputs.writing(stem):
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            parts[0].write_text(text, encoding="utf-8", errors="backslashreplace")  # as JSON escapes letters too
            if not args.json:
                figure.save(measure.draw, result, *parts[1:])
        for part, path in zip(parts, paths):
            outputs.take_place(part, path)
    return "".join(f"{path}\n" for path in paths)


LARGEST_SEED = 2**31 - 1
"""numpy takes up to 2**32 - 1, and an epoch, or a draw, is added."""
SUFFIXES = (".json", ".png", ".svg")
