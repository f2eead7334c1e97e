"""Write down how one classifier of the grid of `make deeper` came out.

    python -m recipes.deeper.result CELL scheme=admin layers=8 lr=1e-3 seed=1 --data BIN

writes CELL/result.json and removes the cell's checkpoints. Training tried every checkpoint on validation and the test
set; what counts is the last one. A run that diverged has the accuracy of a guess.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from recipes.compare import cells
from recipes.steps.common import read_lines, run
from recipes.steps.logs import read_log

GUESS = 0.5


def accuracy(log: Path, subset: str) -> float:
    """The last accuracy on a subset, 0 to 1, in a log of --log-format json.

    Raises:
        ValueError: there is none.
    """
    found = re.findall(rf'"{subset}_accuracy": "?([0-9.]+)', "\n".join(read_lines(log)))
    if not found:
        raise ValueError(
            f"{log}: has no accuracy on {subset}; expected one a checkpoint. Remove its folder, run again."
        )
    return round(float(found[-1]) / 100, 5)  # fairseq's per cent have three digits


def main() -> None:
    args, _ = cells.parsed(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    diverged = cells.stopped(args)
    log = args.cell / "train.log"
    parsed = read_log(log, unfinished=diverged)
    found = {subset: GUESS if diverged else accuracy(log, subset) for subset in ("valid", "test")}
    row = {"diverged": diverged, **found, "params": parsed.params, "seconds": round(parsed.hours * 3600)}
    cells.ended(args, row, "diverged" if diverged else f"accuracy {found['test']:.3f}")


if __name__ == "__main__":
    run(main)
