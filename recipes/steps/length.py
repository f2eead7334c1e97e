"""How long a run is, how often it is saved, and how many checkpoints are averaged: does that go together?

    python -m recipes.steps.length updates=1000 save_every=50 average=3

make asks before anything is prepared, so only the standard library is used.
"""

from __future__ import annotations

import argparse
import re

from recipes.steps.common import run


def number(name: str, text: str) -> int:
    """A variable's whole number above 0.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"{name}={text} is not a number that a run can have; expected a whole one above 0, as in 1000")
    return int(text)


def check(unit: str, length: int, save_every: int, average: int) -> None:
    """A run ends with a checkpoint, and leaves as many as are averaged.

    Args:
        unit: "updates" or "epochs".
        length: how many are wanted.
        save_every: updates from one checkpoint to the next.
        average: how many checkpoints are averaged.

    Raises:
        ValueError: it would not. (make ends the sentence.)
    """
    if unit == "updates" and length % save_every:
        raise ValueError(
            f"UPDATES={length} is not a multiple of SAVE_EVERY={save_every}, so the last updates would be in no "
            f"checkpoint. Give UPDATES={max(1, length // save_every) * save_every}, or another SAVE_EVERY"
        )
    there = length // save_every if unit == "updates" else length
    if average > there:
        raise ValueError(
            f"AVERAGE={average} is more than the {there} checkpoints of {unit.upper()}={length}"
            f"{f' and SAVE_EVERY={save_every}' if unit == 'updates' else ''}. Give AVERAGE={there}, or train longer"
            f"{' or save more often' if unit == 'updates' else ''}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("given", nargs=3, metavar="NAME=NUMBER", help="updates or epochs, save_every and average")
    given = [it.partition("=") for it in parser.parse_args().given]
    check(given[0][0], *(number(name.upper(), text) for name, _, text in given))


if __name__ == "__main__":
    run(main)
