"""Arguments that several benches take: a model's size, turns, and a file to write."""

from __future__ import annotations

import argparse
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


def output(given: str) -> Path:
    """A file to write. It is opened at once: what cannot be written is said before anything is measured."""
    path = Path(given)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be written: {error.strerror}") from None
    return path


def parser(about: str | None) -> argparse.ArgumentParser:
    """A bench's, with --pairs and --csv."""
    top = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--pairs", type=int, default=15, help="turns (default: %(default)s)")
    top.add_argument("--csv", type=output, help="file to write the rows to")
    return top
