"""Types of command-line arguments: a number within bounds, a file to write, a model."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

N = TypeVar("N", int, float)


def number(kind: type[N], expected: str, holds: Callable[[N], bool]) -> Callable[[str], N]:
    """Make the `type` of an option.

    Args:
        kind: int or float.
        expected: the condition in words, for the message.
        holds: the condition.

    Returns:
        A function from text to the number. It raises argparse.ArgumentTypeError if the text does not fit.
    """

    def convert(text: str) -> N:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")

    return convert


positive = number(int, "a whole number of at least 1", lambda value: value >= 1)
power = number(float, "a number from -10 to 10", lambda value: abs(value) <= 10)
above_zero = number(float, "a number above 0", lambda value: 0 < value < math.inf)


def output(text: str) -> Path:
    """The `type` of an option: a file to write. (Path would drop the "/" that marks a folder.)

    Args:
        text: the argument on the command line.

    Returns:
        The path.

    Raises:
        ArgumentTypeError: the text names a folder, or is "-", by which others mean standard output.
    """
    if text.endswith("/") or text == "-":
        folder = text if text.endswith("/") else "./"
        raise argparse.ArgumentTypeError(f"{text} is no file; expected a file to write, as {folder}NAME")
    return Path(text)


def model(text: str) -> Path:
    """The `type` of an argument: a checkpoint, or a folder. In a recipe's folder it is model.pt.

    Args:
        text: the argument on the command line.

    Returns:
        The path of the checkpoint or of the folder.
    """
    path = Path(text)
    return path / "model.pt" if (path / "model.pt").is_file() else path
