"""The options of fairseq-admin analyze. (Imports nothing slow: --help answers at once.)"""

from __future__ import annotations

import argparse
import contextlib

from .. import register
from ..arguments import above_zero, model, number, output, positive
from ..text.folders import binarised
from .registry import MEASURES, Settings

LARGEST_SEED = 2**31 - 1
"""numpy takes up to 2**32 - 1, and the number of an epoch or a draw is added."""
seed = number(int, f"a whole number from 0 to {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED)
MODEL = "options of the model of --arch, as for fairseq-train"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options to its parser; `add_model` adds those of a model."""
    parser.add_argument("what", choices=list(MEASURES), help="; ".join(f"{k}: {v.text}" for k, v in MEASURES.items()))
    parser.add_argument("checkpoints", type=model, nargs="*", metavar="CHECKPOINT", help="a trained model")
    parser.add_argument(
        "--arch", help="instead of a checkpoint, a fresh model; with the options that it would train with"
    )
    parser.add_argument("-o", "--output", type=output, required=True, help="name of the files to write, without .json")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=binarised, help="binarised data to measure on")
    source.add_argument("--random-tokens", action="store_true", help="measure on random words instead")
    parser.add_argument("--split", default="valid", help="of the data (default: valid)")
    parser.add_argument("--tokens", type=positive, default=1024, help="how many, at least (default: 1024)")
    parser.add_argument("--seed", type=seed, default=1, help="of sentences and of fresh weights (default: 1)")
    parser.add_argument("--json", action="store_true", help="write the numbers alone, without a figure")
    defaults = Settings()
    parser.add_argument("--depths", type=_depths, help="of a fresh model, as 6,8,12 (default: the measure's own)")
    parser.add_argument(
        "--repeats", type=positive, default=defaults.repeats, help="random draws to average over (default: 3)"
    )
    parser.add_argument("--lr", type=above_zero, default=defaults.lr, help="of an optimizer's update (default: 1e-4)")
    parser.add_argument("--updates", type=positive, default=defaults.updates, help="of a fresh model (default: 10)")
    parser.set_defaults(model_options=())


def _depths(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        depths = tuple(sorted({int(part) for part in text.split(",")}))
        if depths[0] >= 1:
            return depths
    raise argparse.ArgumentTypeError(f"{text} was found and whole numbers of at least 1, as 6,8,12, were expected")


def add_model(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Add the options of a fresh model, if the arguments name a known --arch.

    Args:
        parser: the verb's.
        arguments: the command line after the verb.
    """
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("--arch")
    arch = finder.parse_known_args(arguments)[0].arch
    if arch is None:
        return
    register()
    from fairseq.models import ARCH_MODEL_REGISTRY  # takes seconds

    if arch in ARCH_MODEL_REGISTRY:
        # As in fairseq, an option that is not given stays absent, so that the preset decides.
        group = parser.add_argument_group(MODEL, argument_default=argparse.SUPPRESS)
        ARCH_MODEL_REGISTRY[arch].add_args(group)
        parser.set_defaults(model_options=tuple(action.dest for action in group._group_actions))
