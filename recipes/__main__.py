"""The command line of the recipes. `make TARGET NAME=VALUE ...` calls it; it also works without make.

    python -m recipes demo METHOD=pre-ln SEED=2
    python -m recipes iwslt14 -n                          # its commands, ready to paste
    python -m recipes iwslt14-prepare
    python -m recipes demo -- --dropout 0.2 --lr 5e-4
    python -m recipes demo --help

A setting that is not on the command line comes from the environment, and is then printed. (make puts the settings on
its own command line into the environment.)
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from recipes import recipe as recipes
from recipes import slurm
from recipes.processes import in_cluster_job, supervise
from recipes.settings import Settings, collect, described, exported
from recipes.steps.common import run
from recipes.steps.summary import fitted
from recipes.text import Options
from recipes.training import Run

log = logging.getLogger(__name__)
STEPS = ("preflight", "text", "prepare", "train", "average", "generate", "score")
USAGE = "python -m recipes TARGET [NAME=VALUE ...] [-n] [-h] [-- OPTIONS OF FAIRSEQ-TRAIN]"


def grids() -> list[str]:
    text = Path(__file__).with_name("research").joinpath("grids.yaml").read_text(encoding="utf-8")
    return sorted(yaml.safe_load(text).keys() - {"shared"})


def parse_target(target: str) -> tuple[str, str]:
    """The recipe and the step that a target names: iwslt14-prepare is the step prepare of iwslt14.

    Raises:
        ValueError: there is no such recipe or step.
    """
    known = recipes.files()
    recipe, _, step = target.rpartition("-")
    if target in known:
        return target, "all"
    if recipe in known and step in STEPS:
        return recipe, step
    raise ValueError(
        f"{target} is unknown; expected one of {' '.join([*known, *grids()])}, or a recipe with "
        f"-{' -'.join(STEPS)} after it."
    )


def command_line(targets: list[str]) -> argparse.Namespace:
    """The parsed command line. Everything after -- is in `options`. Without a target, this prints the page and ends."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("recipes", USAGE, add_help=False, allow_abbrev=False)
    parser.description = f"Targets: {' '.join(targets)}."
    parser.epilog = f"A recipe of one model has its steps as targets, too, with -{' -'.join(STEPS)} after its name."
    parser.add_argument("target", nargs="?", help="a recipe or a grid")
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="its settings")
    parser.add_argument("-n", "--dry-run", action="store_true", help="print its commands, and run none")
    parser.add_argument("-h", "--help", action="store_true", help="this page; with a target, its settings")
    args = parser.parse_intermixed_args(words[:end])
    if not args.target:
        parser.print_help()
        raise SystemExit
    args.options = words[end + 1 :]
    flags, *_ = [*os.environ.get("MAKEFLAGS", "").split(), ""]
    args.dry_run |= not flags.startswith("-") and "n" in flags
    return args


def perform(work: Any, goal: str) -> None:
    """Reach a goal, here or on a cluster.

    Args:
        work: a `training.Run` or a grid.
    """
    if work.settings.on_cluster and not in_cluster_job():
        slurm.make(work, goal)
    else:
        work.make(goal)


def start(work: Any, goal: str, dry_run: bool, cards: str = "", after: Any = None) -> None:
    """Print the commands of a goal, or reach it in a process group of its own, which ends with this process.

    Args:
        cards: the UUIDs of the GPUs to train on; empty: all that are visible.
        after: called at the end.
    """
    if work.on_cpu or goal in ("text", "prepare"):
        # Even with --cpu, fairseq clips gradients on a visible GPU, and starts a process for each of several GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif cards:
        log.info("The largest GPUs here train: %s.", cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = cards
    if dry_run:
        submits = work.settings.on_cluster and not in_cluster_job()
        jobs = [f"# job {job.name}: {job.needs}" for job in work.jobs(goal)] if submits else []
        print("\n".join([*jobs, *work.lines(goal)]))
        return

    def reach() -> None:
        perform(work, goal)
        if after:
            after()

    raise SystemExit(supervise(partial(run, reach)))


def show(work: Run) -> None:
    """Show the summary of a whole recipe."""
    text = (work.recipe.result / "summary.txt").read_text(encoding="utf-8")
    print(fitted(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
    print(f"Report: {work.recipe.result / 'report.html'}")


def main() -> None:
    args = command_line([*recipes.files(), *grids()])
    if args.target in grids():
        os.execv(sys.executable, [sys.executable, "-m", "recipes.research.grid", *sys.argv[1:]])
    name, goal = parse_target(args.target)
    values = collect(name, args.words, Settings.model_fields, args.options)
    if args.help:
        print("\n".join(recipes.help_lines(name, values)))
        print("\nPREPARE_ARGS may have:")
        for line in described(Options, Options.model_fields, {}):
            option, _, meaning = line.partition(": ")
            print(f"  --{option.replace('_', '-').replace('=', ' ')}: {meaning}")
        return
    recipe = recipes.read(name, values)
    os.environ.update(exported(recipe.file.threads))
    work = Run(recipe)
    if work.machine.node and goal != "train":
        raise ValueError(f"NODES={recipe.settings.NODES} only trains; run the target that ends in -train there.")
    if goal == "preflight":
        from recipes.preflight import page  # imports torch

        return page(work)
    start(work, goal, args.dry_run, work.machine.cards, partial(show, work) if goal == "all" else None)


if __name__ == "__main__":
    run(main)
