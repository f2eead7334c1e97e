"""The command line of the recipes. `make TARGET NAME=VALUE ...` calls it; it also works without make.

    python -m recipes demo METHOD=pre-ln SEED=2
    python -m recipes iwslt14-prepare
    python -m recipes demo -- --dropout 0.2 --lr 5e-4
    python -m recipes compare SCHEMES="admin pre-ln" JOBS=8 WHERE=slurm
    python -m recipes demo --help
    python -m recipes status

A setting that is not on the command line comes from the environment, and is then printed. (make puts the
settings on its own command line into the environment.) With -n, the steps are listed and nothing runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from functools import partial
from typing import Any

from recipes import recipe as recipes
from recipes import slurm
from recipes.language_model import LanguageModel
from recipes.processes import in_cluster_job, supervise
from recipes.recipe import Recipe
from recipes.steps.common import run
from recipes.steps.summary import fitted
from recipes.training import Pipeline
from recipes.translation import Translation

log = logging.getLogger(__name__)
STEPS = ("preflight", "prepare", "train", "average", "generate", "score")
USAGE = "python -m recipes TARGET [NAME=VALUE ...] [-n] [-h] [-- OPTIONS OF FAIRSEQ-TRAIN]"


def parse_target(target: str) -> tuple[str, str]:
    """The recipe and the step that a target names: iwslt14-prepare is the step prepare of iwslt14.

    Raises:
        ValueError: there is no such recipe or step.
    """
    known = recipes.files()
    recipe, _, step = target.rpartition("-")
    if target in known:
        return target, "all"
    if recipe in known and not known[recipe][0].is_grid and step in STEPS:
        return recipe, step
    raise ValueError(
        f"{target} is unknown; expected one of {' '.join(known)}, or one with "
        f"-{' -'.join(STEPS)} after it (the grids have none)."
    )


def work_of(recipe: Recipe, goal: str) -> Any:
    """The grid of a recipe, or its pipeline. Both classes have the same methods."""
    if recipe.file.is_grid:
        from recipes.grid import front  # imports scipy

        return front.of(recipe)
    pipeline = LanguageModel(recipe) if recipe.file.kind == "LanguageModel" else Translation(recipe)
    if (node := pipeline.machine.node) and goal != "train":
        raise ValueError(f"NODE_RANK={node} of several only trains; run the target that ends in -train there.")
    return pipeline


def perform(work: Any, goal: str, submits: bool) -> None:
    """Make a goal, here or on a cluster. Show the summary of a whole recipe."""
    if goal == "preflight":
        from recipes.preflight import page  # imports torch

        return page(work)
    if submits:
        slurm.make(work, goal)
    else:
        work.make(goal)
    recipe = work.recipe
    if goal == "all" and not recipe.file.is_grid:
        text = (recipe.run / "summary.txt").read_text(encoding="utf-8")
        print(fitted(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
        print(f"Report: {recipe.run / 'report.html'}")


def command_line() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Parse the command line. Returns its parser, too, and everything after -- as `options` of the parsed arguments."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("recipes", USAGE, add_help=False, allow_abbrev=False)
    parser.description = f"Targets: {' '.join(recipes.files())}; status (of all runs in RUNS=)."
    parser.epilog = f"A recipe of one model has its steps as targets, too, with -{' -'.join(STEPS)} after its name."
    parser.add_argument("target", nargs="?", help="a recipe")
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="its settings")
    parser.add_argument("-n", "--dry-run", action="store_true", help="list the steps, and run none")
    parser.add_argument("-h", "--help", action="store_true", help="this page; with a target, its settings")
    args = parser.parse_intermixed_args(words[:end])
    args.options = words[end + 1 :]
    return args, parser


def main() -> None:
    args, parser = command_line()
    if not args.target or (args.target == "status" and args.help):
        parser.print_help()
        return
    if args.target == "status":
        from recipes import status

        print("\n".join(status.lines(args.words)))
        return
    name, goal = parse_target(args.target)
    file, _ = recipes.files()[name]
    values = recipes.collect(name, args.words, file.names, args.options, file.aliases)
    if args.help:
        print("\n".join(recipes.help_lines(name, values)))
        return
    recipe = recipes.read(name, values)
    exported = recipe.settings.exported().items()
    os.environ.update({name: value for name, value in exported if name in values or name not in os.environ})
    if goal == "prepare":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it needs no GPU, so the GPUs here need not fit the model
    work, submits = work_of(recipe, goal), recipe.settings.WHERE == "slurm" and not in_cluster_job()
    if work.on_cpu:
        # Even with --cpu, fairseq clips gradients on a visible GPU, and starts a process for each of several GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif isinstance(work, Pipeline) and work.machine.cards:
        log.info("The largest GPUs here train: %s.", work.machine.cards)
        os.environ["CUDA_VISIBLE_DEVICES"] = work.machine.cards
    flags, *_ = [*os.environ.get("MAKEFLAGS", "").split(), ""]
    if args.dry_run or (not flags.startswith("-") and "n" in flags):
        goal = "all" if goal == "preflight" else goal
        jobs = [f"job  {job.name}: {job.needs}" for job in work.jobs(goal)] if submits else []
        print("\n".join([*jobs, *work.plan(goal)]))
        return
    raise SystemExit(supervise(partial(run, partial(perform, work, goal, submits))))


if __name__ == "__main__":
    run(main)
