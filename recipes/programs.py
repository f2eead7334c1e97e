"""The targets that are programs of their own: tables and figures of what there is, and the trial of a GPU."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat

from recipes.settings import Data, Machine, Pair
from recipes.validation import validated


class Trial(Machine):
    DEVICE: Literal["cuda", "cpu"] = "cuda"
    """cpu tries it with tiny sizes, in a folder of its own"""
    DATA: Data | None = None
    """a folder with train, valid and test in both languages, as for make own: three models are trained on it too"""
    PAIR: Pair = "de-en"
    """source and target language of DATA"""
    MINUTES: PositiveFloat = 30
    """that each of the three may take"""


PROGRAMS: dict[str, type[Machine]] = {"table": Machine, "figures": Machine, "tables": Machine, "gpu-trial": Trial}


def commands(target: str, given: dict[str, str]) -> list[list[object]]:
    """The modules of recipes, each with its arguments.

    Raises:
        ValueError: a setting is wrong.
    """
    runs = Path(validated(PROGRAMS[target], given).RUNS)
    if target == "table":
        return [["steps.report", runs / "results.csv", "-o", runs / "table"]]
    if target == "tables":
        return [["figures.tables", "README.md", *sorted(Path("docs").glob("*.md"))]]
    if target == "figures":
        return [["figures.docs", runs, "-o", "docs/images"]]
    return [["gpu_trial.run", *(f"{name}={value}" for name, value in given.items())]]


def run(target: str, given: dict[str, str], dry: bool) -> None:
    """Run them, or print them."""
    for module, *arguments in commands(target, given):
        command = [sys.executable, "-m", f"recipes.{module}", *map(str, arguments)]
        if dry:
            print(shlex.join(command))
        elif status := subprocess.run(command).returncode:
            raise SystemExit(status)
