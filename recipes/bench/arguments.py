"""Arguments that several benches take: a model's size, whole numbers, and files to write."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

FORM = "LAYERS[-DECODER_LAYERS]:WIDTH:TOKENS"


def size(given: str) -> dict[str, int]:
    """The arguments at a size, as SIZES writes it. Heads have 64 channels, and there are two at least."""
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?:([1-9]\d*):([1-9]\d*)", given)
    if not found:
        raise argparse.ArgumentTypeError(f"{given!r} is no size; expected {FORM}, as 60-12:512:1024")
    layers, decoder_layers, width, tokens = (int(it or found[1]) for it in found.groups())
    heads = max(2, width // 64)
    if width % heads:
        raise argparse.ArgumentTypeError(
            f"{given!r}: {width} channels are not {heads} heads; expected a width that is a multiple of 64"
        )
    sizes = {"layers": layers, "decoder_layers": decoder_layers, "width": width, "tokens": tokens}
    return {**sizes, "ffn": 4 * width, "heads": heads}


def number(given: str) -> int:
    """One of the arguments that count."""
    if not re.fullmatch(r"[1-9]\d*", given):
        raise argparse.ArgumentTypeError(f"{given!r} was found; expected a whole number of at least 1")
    return int(given)


def output(given: str) -> Path:
    """A file to write, its folder made; where it cannot be written, that is said before anything is measured."""
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given}: no folder can be made for it ({error.strerror})") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{given} was found; expected a file in a folder that can be written to")
    return path


def parser(about: str | None) -> argparse.ArgumentParser:
    """A bench's, with --pairs and --csv."""
    top = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--pairs", type=number, default=15, help="turns (default: %(default)s)")
    top.add_argument("--csv", type=output, help="file to write the rows to")
    return top
