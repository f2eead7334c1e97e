"""What threads that wait for each other cost: seconds a step of fast Admin, alone and next to busy processes.

OpenMP's threads spin while they wait, or sleep with OMP_WAIT_POLICY=PASSIVE, or (GNU's) spin GOMP_SPINCOUNT times and
then sleep, as the recipes have it (recipes/common.mk). A process reads that when it starts, so every setting is timed
in processes of its own, in turns. Steps are those of speed.py, by the clock.

    python recipes/bench/waiting.py                                   # 18L-18L, widths 64 and 256, next to two
    python recipes/bench/waiting.py --sizes 18:512:1024 --busy 3      # layers, width, target tokens
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.bench import started  # noqa: E402
from recipes.bench.arguments import FORM, number  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.turns import spread, summary  # noqa: E402

SIZES = ["18:64:1024", "18:256:1024"]


SLEEPING = {"OMP_WAIT_POLICY": "PASSIVE"}
FIRST_SPINNING = {**SLEEPING, "GOMP_SPINCOUNT": "3000"}


def settings(threads: int) -> dict[str, dict[str, str]]:
    """What a process is started with, by what it is called."""
    several = {"OMP_NUM_THREADS": str(threads)}
    return {
        "1 thread": {"OMP_NUM_THREADS": "1"},
        f"{threads} threads": several,
        f"{threads}, sleeping": {**several, **SLEEPING},
        f"{threads}, spin first": {**several, **FIRST_SPINNING},
    }


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many others compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def row(given: str, processes: int, args: Namespace) -> dict[str, list[float]]:
    """Seconds of every step, by setting; rounds in turns."""
    found: dict[str, list[float]] = {name: [] for name in settings(args.threads)}
    with busy(processes):
        for _ in range(args.rounds):
            for name, setting in settings(args.threads).items():
                found[name] += started.timed(given, args.steps, args.clock, setting)
    return found


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument(
        "--sizes", nargs="+", type=started.form, default=SIZES, help=f"{FORM} (default: {' '.join(SIZES)})"
    )
    top.add_argument("--busy", type=number, default=2, help="processes next to it (default: 2)")
    top.add_argument("--threads", type=number, default=os.cpu_count(), help="(default: one a core)")
    top.add_argument("--rounds", type=number, default=1, help="processes of a setting (default: 1)")
    top.add_argument("--steps", type=number, default=3, help="timed in a process (default: 3)")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    top.set_defaults(device="cpu", clock="wall")
    return top


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    where = conditions(args)
    del where["threads"]  # this process's own, which times nothing
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print("seconds a step: median (lowest to highest)")
    rows = []
    for given in args.sizes:
        for processes in (0, args.busy):
            found = row(given, processes, args)
            next_to = f"next to {processes} busy" if processes else "alone"
            for name, times in found.items():
                print(f"{given:<14} {next_to:<14} {name:<13} {spread(times)}", flush=True)
                rows.append({"size": given, "busy": processes, "setting": name, **summary(times), "steps": len(times)})
    keep(args.csv, where, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
