"""fairseq-admin analyze: add its options, build the subject, measure it, and write all result files or none.

Slow imports wait until a measure runs, so --help answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from typing import TYPE_CHECKING

from .. import outputs, register
from ..arguments import above_zero, model, number, output, positive
from ..errors import AdminError
from ..packages import need
from ..text.assets import binarised, files_in, folders
from .registry import MEASURES, Settings

if TYPE_CHECKING:
    from .subject import Subject

seed = number(int, "a whole number from 0 to 2147483647", lambda value: 0 <= value < 2**31)
"""numpy takes twice as many, and the number of an epoch or a draw is added."""
MODEL = "options of the model of --arch, as for fairseq-train"
SUFFIXES = (".json", ".png", ".svg")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `analyze`. `add_model` adds the options of a fresh model.

    Args:
        parser: the parser of `analyze`.
    """
    parser.add_argument("what", choices=list(MEASURES), help="; ".join(f"{k}: {v.text}" for k, v in MEASURES.items()))
    parser.add_argument("checkpoints", type=model, nargs="*", metavar="CHECKPOINT", help="a trained model")
    parser.add_argument("--arch", help="a fresh model instead of a checkpoint; takes its options as fairseq-train does")
    parser.add_argument("-o", "--output", type=output, required=True, help="name of the files to write, without suffix")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=binarised, help="binarised data to measure on")
    source.add_argument("--random-tokens", action="store_true", help="measure on random words instead")
    parser.add_argument("--split", default="valid", help="split of the data (default: valid)")
    parser.add_argument("--tokens", type=positive, default=1024, help="smallest number of tokens (default: 1024)")
    parser.add_argument("--seed", type=seed, default=1, help="of sentences and fresh weights (default: 1)")
    parser.add_argument("--json", action="store_true", help="write the numbers only, no figure")
    defaults = Settings()
    parser.add_argument("--depths", type=_depths, help="of a fresh model, as 6,8,12 (default: by measure)")
    parser.add_argument(
        "--repeats", type=positive, default=defaults.repeats, help="random draws to average over (default: 3)"
    )
    parser.add_argument("--lr", type=above_zero, default=defaults.lr, help="learning rate of an update (default: 1e-4)")
    parser.add_argument("--updates", type=positive, help="by Adam (default: 10; output-change: 5)")
    parser.set_defaults(model_options=())


def _depths(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        depths = tuple(sorted({int(part) for part in text.split(",")}))
        if depths[0] >= 1:
            return depths
    raise argparse.ArgumentTypeError(f"expected whole numbers of at least 1, as 6,8,12, found {text}")


def add_model(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Add the options of a fresh model, if the arguments name a known --arch.

    Args:
        parser: the parser of `analyze`.
        arguments: the command line after the verb.
    """
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("--arch")
    arch = finder.parse_known_args(arguments)[0].arch
    if arch is None:
        return
    register()
    from fairseq.models import ARCH_MODEL_REGISTRY

    if arch in ARCH_MODEL_REGISTRY:
        # As in fairseq, an option that is not given stays absent, so that the preset decides.
        group = parser.add_argument_group(MODEL, argument_default=argparse.SUPPRESS)
        ARCH_MODEL_REGISTRY[arch].add_args(group)
        parser.set_defaults(model_options=tuple(action.dest for action in group._group_actions))


def _subject(args: argparse.Namespace) -> Subject:
    from .fresh import Fresh
    from .subject import Source, Trained

    of = MEASURES[args.what].of
    if bool(args.checkpoints) == bool(args.arch):
        which = "both were" if args.arch else "neither was"
        raise AdminError(f"either a CHECKPOINT or --arch was expected, but {which} given. Give one of them.")
    if len(args.checkpoints) > 1 and of != "checkpoints":
        raise AdminError(f"{args.what} measures one checkpoint, but {len(args.checkpoints)} were given. Give one.")
    if not (args.data or args.random_tokens or (of == "weights" and args.checkpoints)):
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
    """Measure, draw and write.

    Args:
        args: the parsed command line.

    Returns:
        The paths of the files, one a line.

    Raises:
        AdminError: an option does not go with the measure, or a file cannot be written.
    """
    from . import figure

    stem = args.output.with_suffix("") if args.output.suffix in SUFFIXES else args.output
    if stem.name in ("", ".."):
        raise AdminError(f"-o {args.output}/ is a folder; the name of the files to write was expected, without .json.")
    paths = [stem.with_name(stem.name + suffix) for suffix in (SUFFIXES[:1] if args.json else SUFFIXES)]
    inputs = [*args.checkpoints, *(files_in(folders(args.data)) if args.data else [])]
    for path in paths:
        outputs.check_writable(path, inputs)
    with contextlib.ExitStack() as taking:
        # Before the work starts, so that a path that cannot be written is refused at once.
        parts = [taking.enter_context(outputs.replacing(path)) for path in paths]
        if not args.json:
            need("matplotlib")
        measure = importlib.import_module(f".{args.what.replace('-', '_')}", __package__)
        subject = _subject(args)
        numbers = measure.measure(subject, Settings(args.depths, args.repeats, args.lr, args.updates))
        result = {"what": args.what, **subject.facts(), **numbers}
        with outputs.writing(stem):
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            parts[0].write_text(text, encoding="utf-8", errors="backslashreplace")  # as JSON escapes letters too
            if not args.json:
                figure.save(measure.draw, result, *parts[1:])
    return "".join(f"{path}\n" for path in paths)
