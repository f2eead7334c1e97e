"""The command `fairseq-admin`: what is done with a model once it is trained, one verb each."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from .checkpoints import averaging, equivalence, files
from .checkpoints import fold as folding
from .checkpoints.checkpoint import Checkpoint
from .errors import AdminError
from .method.omega import omega_summary
from .text.assets import Assets
from .version import __version__


def _omega(args: argparse.Namespace) -> None:
    checkpoint = Checkpoint.read(args.checkpoint)
    stacks, record = checkpoint.omegas, checkpoint.record
    if not stacks:
        raise AdminError(f"{checkpoint.name} has no omega: it is not (or no longer) an Admin model.")
    if args.json:
        table = {
            stack: [
                {"layer": int(name.split(".")[1]), "sublayer": name.split(".")[2], **omega_summary(omega)}
                for name, omega in sublayers.items()
            ]
            for stack, sublayers in stacks.items()
        }
        print(json.dumps({**table, "provenance": record}, indent=1))
        return
    print("profiled: " + (", ".join(f"{k} {v}" for k, v in record.items()) if record else "not yet"))
    print(f"{'stack':8} {'sub-layer':>9} {'layer':>5}  {'kind':12} {'min':>9} {'mean':>9} {'max':>9}")
    for stack, sublayers in stacks.items():
        for number, (name, omega) in enumerate(sublayers.items(), 1):
            _, layer, kind = name.split(".")
            s = omega_summary(omega)
            print(f"{stack:8} {number:9d} {layer:>5}  {kind:12} {s['min']:9.4f} {s['mean']:9.4f} {s['max']:9.4f}")


def _average(args: argparse.Namespace) -> None:
    paths = averaging.choose(args.inputs, args.last, args.upto, args.by)
    files.check_output(args.output, paths)
    averaging.average(paths).write(args.output)
    print(f"{args.output}: average of {', '.join(path.name for path in paths)}")


def _fold(args: argparse.Namespace) -> None:
    files.check_output(args.output, [args.checkpoint])
    unfolded = Checkpoint.read(args.checkpoint)
    # fairseq-preprocess writes to a folder `bin`, next to what its text was made with.
    data = args.data and (args.data.parent if args.data.name == "bin" else args.data)
    text = Assets(args.checkpoint, data, unfolded.text).fingerprints() if data else None
    folded = folding.fold(unfolded, {"fp16": torch.float16, "fp32": torch.float32}[args.dtype], args.min_omega, text)
    bound = args.tolerance or {"fp16": 0.1, "fp32": 1e-4}[args.dtype]
    apart = ""

    def check(written: Path) -> None:
        nonlocal apart
        found = equivalence.difference(unfolded, Checkpoint.read(written), args.data)
        apart = f"log-probabilities of {found.positions} positions differ by up to {found.largest:.2g}"
        if found.largest > bound:
            raise AdminError(
                f"{args.checkpoint} folded is not the same: {apart}, more than {bound:g}. Nothing was written. Keep "
                "the model unfolded, with --user-dir, or allow --tolerance."
            )

    folded.write(args.output, check)
    print(f"{args.output}: {folded.state['args']['arch']}, {args.dtype}; {apart} (bound {bound:g})")


def _translate(args: argparse.Namespace) -> None:
    from .translation import engines, pipeline, streams  # with engines and tokenisers, which no other verb needs

    if args.nbest > args.beam:
        raise AdminError(f"--nbest {args.nbest} is more than --beam {args.beam} finds; raise --beam.")
    if args.output and args.text and args.output.exists() and args.text.exists() and args.output.samefile(args.text):
        raise AdminError(f"{args.output} is the text to translate; give another --output.")
    search = engines.Search(args.beam, args.lenpen, args.nbest)
    with streams.opened(args.text) as (source, name), streams.written(args.output) as sink:
        with contextlib.redirect_stdout(sys.stderr):  # what a library may print is no translation
            model = pipeline.Pipeline.load(args.model, args.data, args.tokenised, args.device)
            streams.flow(model, source, name, sink, search, args.batch_tokens)


def _export(args: argparse.Namespace) -> None:
    from .export import folder  # with engines, which no other verb needs

    checkpoint = Checkpoint.read(args.checkpoint)
    exported = folder.export(checkpoint, args.to, args.output, args.data, args.quantization, args.tolerance)
    for note in exported.notes:
        print(f"fairseq-admin: {note}", file=sys.stderr)
    print(f"{args.output}: {exported.summary}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value}: a positive number is needed")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    top = argparse.ArgumentParser(prog="fairseq-admin", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True)
    omega = verbs.add_parser("omega", help="print omega of every sub-layer, and where it came from")
    omega.add_argument("checkpoint", type=Path, help="a checkpoint of an Admin model")
    omega.add_argument("--json", action="store_true", help="for machines: min, mean and max over channels")
    omega.set_defaults(run=_omega)
    average = verbs.add_parser("average", help="average checkpoints into one")
    average.add_argument("inputs", type=Path, nargs="+", help="checkpoints, or one run folder")
    average.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    average.add_argument("--last", type=_positive, help=f"of a run folder, how many (default: {averaging.LAST})")
    average.add_argument("--upto", type=_positive, help="of a run folder, none beyond this epoch, or update")
    average.add_argument(
        "--by", choices=list(averaging.NUMBERED), help="of a run folder, which (default: epochs where there are any)"
    )
    average.set_defaults(run=_average)
    fold = verbs.add_parser("fold", help="fold omega away: a stock Transformer that computes the same")
    fold.add_argument("checkpoint", type=Path, help="a checkpoint of ours; average first, then fold")
    fold.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    fold.add_argument("--data", type=Path, help="binarised data whose validation set to check on, in addition to noise")
    fold.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32", help="of the weights (default: fp32)")
    fold.add_argument(
        "--min-omega",
        type=_above_zero,
        help=f"clamp entries nearer to 0 than this (default: refuse below {folding.SMALLEST:g})",
    )
    fold.add_argument(
        "--tolerance", type=_above_zero, help="largest difference of log-probabilities (default: 1e-4; fp16: 0.1)"
    )
    fold.set_defaults(run=_fold)
    translating = verbs.add_parser(
        "translate",
        help="translate raw text, a line a sentence",
        description="Translate raw text, a line a sentence. Dictionaries, codes and text.json are next to the model.",
    )
    translating.add_argument("model", type=Path, help="a checkpoint (.pt), or a folder for CTranslate2 or transformers")
    translating.add_argument("text", type=Path, nargs="?", help="UTF-8 text (default, or -: standard input)")
    translating.add_argument("-o", "--output", type=Path, help="file to write (default: standard output)")
    translating.add_argument("--data", type=Path, help="folder with the files that are not next to the model")
    translating.add_argument("--tokenised", action="store_true", help="the text is tokens, the translation too")
    translating.add_argument("--beam", type=_positive, default=5, help="width of the beam (default: 5)")
    translating.add_argument(
        "--lenpen", type=float, default=1.0, help="power of the length that divides scores (default: 1)"
    )
    translating.add_argument(
        "--nbest",
        type=_positive,
        default=1,
        help="above 1, that many hypotheses a line, as NUMBER<tab>SCORE<tab>TEXT: the line's number from 1, the "
        "hypothesis' log-probability (natural) over its length to the power --lenpen, and its text",
    )
    translating.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if it is there")
    translating.add_argument(
        "--batch-tokens", type=_positive, default=4096, help="source units a batch, padding included (default: 4096)"
    )
    translating.set_defaults(run=_translate)
    exporting = verbs.add_parser("export", help="write a folder that CTranslate2 or Hugging Face's transformers read")
    exporting.add_argument("checkpoint", type=Path, help="of an Admin model, folded or not, or of a stock Transformer")
    exporting.add_argument("--to", choices=("ctranslate2", "huggingface"), required=True, help="whose folder")
    exporting.add_argument("-o", "--output", type=Path, required=True, help="folder to write, new or empty")
    exporting.add_argument("--data", type=Path, help="folder with the files that are not next to the model")
    exporting.add_argument("--quantization", metavar="TYPE", help="CTranslate2's, as int8 (default: float32)")
    exporting.add_argument(
        "--tolerance", type=_above_zero, help="largest difference of log-probabilities, in float32 (default: 1e-4)"
    )
    exporting.set_defaults(run=_export)
    return top


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Libraries tell nothing that the user cannot fix."""
    for library in ("fairseq", "hydra"):
        logging.getLogger(library).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Terminated(BaseException):
    """The command was told to end. What it was writing is removed on the way out."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def main(arguments: list[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on standard error and status 2, an interrupt one and status 130."""
    args = parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with _quiet():
            args.run(args)
        if sys.stdout:
            sys.stdout.flush()
    except AdminError as error:
        print(f"fairseq-admin: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, _Terminated) as ended:
        print("fairseq-admin: interrupted; nothing half-written is left.", file=sys.stderr)
        return 130 if isinstance(ended, KeyboardInterrupt) else 143
    except BrokenPipeError:
        # Whoever read the output has read enough. Python will flush what is left at the end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
