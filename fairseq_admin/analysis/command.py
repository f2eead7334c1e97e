"""fairseq-admin analyze: choose the subject, measure, and write three files, all or none."""

from __future__ import annotations

import argparse
import contextlib
import json

from .. import outputs
from ..errors import AdminError
from ..packages import need
from ..text.folders import files_in, folders
from . import figure
from .fresh import Fresh
from .registry import MEASURES, Settings, module_of
from .subject import Source, Subject, Trained


def _subject(args: argparse.Namespace) -> Subject:
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
    stem = args.output.with_suffix("") if args.output.suffix in SUFFIXES else args.output
    if stem.name in ("", ".."):
        raise AdminError(f"-o {args.output}/ is a folder; the name of the files to write was expected, without .json.")
    paths = [stem.with_name(stem.name + suffix) for suffix in (SUFFIXES[:1] if args.json else SUFFIXES)]
    inputs = [*args.checkpoints, *(files_in(folders(args.data)) if args.data else [])]
    for path in paths:
        outputs.check(path, inputs)
    with contextlib.ExitStack() as taking:
        parts = [taking.enter_context(outputs.replacing(path)) for path in paths]  # before the work, not after it
        if not args.json:
            need("matplotlib")
        measure, subject = module_of(args.what), _subject(args)
        settings = Settings(args.depths, args.repeats, args.lr, args.updates)
        numbers = measure.measure(subject, settings)
        result = {"what": args.what, **subject.facts(), **numbers}
        with outputs.writing(stem):
            text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
            parts[0].write_text(text, encoding="utf-8", errors="backslashreplace")  # as JSON escapes letters too
            if not args.json:
                figure.save(measure.draw, result, *parts[1:])
    return "".join(f"{path}\n" for path in paths)


SUFFIXES = (".json", ".png", ".svg")
