"""The command `fairseq-admin`: work with trained models, and measure them."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from . import outputs, register, verbs
from .analysis import command as analysis
from .arguments import above_zero, model, output, positive, power
from .errors import INTERRUPTED, MISTAKE, AdminError, end
from .text.assets import binarised
from .version import __version__


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def _omega(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=model, help="a checkpoint of an Admin model")


def _average(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", type=Path, nargs="+", help="checkpoints, or one run folder")
    parser.add_argument("-o", "--output", type=output, required=True, help="file to write")
    parser.add_argument("--last", type=positive, help="number of checkpoints to average (run folder; default: 10)")
    parser.add_argument(
        "--by", choices=("epochs", "updates"), help="kind of checkpoint (run folder; default: epochs, if any)"
    )
    parser.add_argument("--data", type=Path, help="folder of the training text: record its codes and text.json")


def _fold(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=model, help="a checkpoint of an Admin model; average first, then fold")
    parser.add_argument("-o", "--output", type=output, required=True, help="file to write")
    parser.add_argument("--data", type=binarised, help="binarised data, to compare on its validation set too")
    parser.add_argument("--min-omega", type=above_zero, help="raise smaller omega to this (default: refuse them)")
    parser.add_argument(
        "--tolerance", type=above_zero, default=1e-4, help="of log-probabilities, at most (default: 1e-4)"
    )


def _text(parser: argparse.ArgumentParser) -> None:
    """Add the options for facts about the text that the files next to the model may lack."""
    parser.add_argument("--data", type=Path, help="folder with the files that are not next to the model")
    parser.add_argument("-s", "--source-lang", metavar="CODE", help="language of the text, if no file names it")
    parser.add_argument("-t", "--target-lang", metavar="CODE", help="language of the translation, if no file names it")
    parser.add_argument("--codes", type=Path, metavar="FILE", help="merges of the byte-pair encoding (default: codes)")


def _translate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=model, help="a checkpoint (.pt), or a folder for CTranslate2")
    parser.add_argument("text", type=Path, nargs="?", help="UTF-8 text (default, or -: standard input)")
    parser.add_argument("-o", "--output", type=output, help="file to write (default: standard output)")
    _text(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tokenised", action="store_true", help="text and translation are tokens")
    kind.add_argument("--units", action="store_true", help="text and translation are units of the dictionary")
    parser.add_argument("--beam", type=positive, default=5, help="width of the beam (default: 5)")
    parser.add_argument(
        "--lenpen", type=power, default=1.0, help="scores are divided by the length to this power (default: 1)"
    )
    hypotheses = "above 1, that many hypotheses a line, each as the line's NUMBER<tab>SCORE<tab>TEXT (default: 1)"
    parser.add_argument("--nbest", type=positive, default=1, help=hypotheses)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device (default: cuda if there is one)")
    parser.add_argument("--batch-tokens", type=positive, default=4096, help="source units per batch (default: 4096)")


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=model, help="of an Admin model, folded or not, or a stock Transformer")
    parser.add_argument("--to", choices=("ctranslate2", "huggingface"), required=True, help="target engine")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write, new or empty")
    _text(parser)
    parser.add_argument("--quantization", metavar="TYPE", help="CTranslate2's type of weights (default: float32)")
    tolerance = "largest difference in float32 (default: 1e-4)"
    parser.add_argument("--tolerance", type=above_zero, default=1e-4, help=tolerance)


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="a recipe's folder, or a --save-dir")
    parser.add_argument("-o", "--output", type=output, required=True, help="file to write (.html)")


Verb = Callable[[argparse.Namespace], str]
AddOptions = Callable[[argparse.ArgumentParser], object]
VERBS: dict[str, tuple[Verb, AddOptions, str]] = {
    "omega": (verbs.omega, _omega, "print omega of every sub-layer, and where it came from"),
    "average": (verbs.average, _average, "average checkpoints into one"),
    "fold": (verbs.fold, _fold, "fold omega into the weights, giving an equivalent stock Transformer"),
    "translate": (verbs.translate, _translate, "translate raw text, a line a sentence"),
    "export": (verbs.export, _export, "write a folder that CTranslate2 or Hugging Face's transformers read"),
    "analyze": (analysis.run, analysis.add_options, "measure what the papers measure: numbers and a figure"),
    "path": (verbs.path, lambda parser: None, "print the folder that fairseq-train --user-dir takes"),
    "report": (verbs.report, _report, "write a page on one or several runs: losses, omega, scores, translations"),
}
"""The function of each verb, the function that adds its options, and its help."""


WITHOUT_FAIRSEQ = (verbs.translate, verbs.path)
"""Verbs that start without fairseq. `translate` imports it later if the model is a checkpoint of fairseq's."""


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Build the parsers.

    Returns:
        The parser of the command line, and the parser of each verb.
    """
    top = Parser(prog="fairseq-admin", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    parsers = top.add_subparsers(dest="verb", required=True)
    for name, (verb, add_options, text) in VERBS.items():
        parser = parsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.set_defaults(verb=verb)
        add_options(parser)
    return top, parsers.choices


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Files may come before, among and after the options.

    Args:
        arguments: without the name of the command.

    Returns:
        The verb's function as `verb`, and its options.
    """
    top, of_verbs = parsers()
    if arguments and arguments[0] in of_verbs:
        if arguments[0] == "analyze":
            analysis.add_model(of_verbs["analyze"], arguments[1:])
        return of_verbs[arguments[0]].parse_intermixed_args(arguments[1:])
    return top.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one command. A user's mistake gives one line on standard error and status 2; Ctrl-C gives one line and 130.

    The answer is printed last, when the output file is already complete, so a closed pipe loses nothing.

    Args:
        arguments: without the name of the command. None: sys.argv's.

    Returns:
        The exit status.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller closed it, as `2>&-` does
            setattr(sys, name, open(os.devnull, mode))
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as Ctrl-C does
    logging.disable(logging.INFO)  # the logs of libraries report nothing that the user can fix
    try:
        args = parse(sys.argv[1:] if arguments is None else arguments)
        with warnings.catch_warnings(action="ignore"):
            if args.verb not in WITHOUT_FAIRSEQ:
                register()
            answer = args.verb(args)
        with outputs.standard_output(sys.stdout):
            print(answer.encode(errors="surrogateescape").decode(errors="backslashreplace"), end="")
    except AdminError as error:
        return end(str(error), MISTAKE)
    except outputs.StdoutClosed:
        return 0
    except OSError as error:  # this error came from reading a file; `outputs` handles errors in writing
        if error.filename is None:
            raise
        return end(f"{error.filename}: cannot be read ({error.strerror}). Check the path and its rights.", MISTAKE)
    except KeyboardInterrupt:
        return end("interrupted.", INTERRUPTED)
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGTERM, terminate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
