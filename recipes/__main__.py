"""The front of the recipes: `make TARGET NAME=VALUE ...` comes here, and it can be used alone.

    python -m recipes demo METHOD=pre-ln SEED=2
    python -m recipes iwslt14-prepare
    python -m recipes compare SCHEMES="admin pre-ln" JOBS=8 WHERE=slurm
    python -m recipes help demo

A setting that is not given is taken from the environment, where make has put what stands on its command line. With -n
what would run is listed, and nothing is run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from recipes import recipe as recipes
from recipes.chain import Chain
from recipes.jobs import in_cluster_job
from recipes.language_model import LanguageModel
from recipes.processes import supervise
from recipes.recipe import Recipe
from recipes.steps.common import run
from recipes.translation import Translation

STEPS = ("preflight", "prepare", "train", "average", "generate", "score")


def asked(target: str) -> tuple[str, str]:
    """The recipe and the step that a target names, as in iwslt14-prepare.

    Raises:
        ValueError: there is no such recipe.
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


Task = tuple[bool, Callable[[], list[str]], Callable[[], None]]
"""What a target does: whether on a CPU, its plan, its work."""


def of_a_grid(recipe: Recipe) -> Task:
    from recipes import slurm
    from recipes.grid import front  # with scipy

    grid = front.of(recipe)
    work = partial(front.work, grid)
    if recipe.settings.WHERE == "slurm" and not in_cluster_job():
        work = partial(slurm.submit_grid, recipe, grid.folder, grid.on_cpu)
    return grid.on_cpu, partial(front.plan, grid), work


def of_a_model(recipe: Recipe, goal: str) -> Task:
    from recipes import slurm

    pipeline = LanguageModel(recipe) if recipe.file.kind == "LanguageModel" else Translation(recipe)
    machine, submits = pipeline.machine, recipe.settings.WHERE == "slurm" and not in_cluster_job()
    if machine.node and goal != "train":
        raise ValueError(f"NODE={machine.node} of several only trains; run the target that ends in -train there.")

    def work() -> None:
        if goal == "preflight":
            from recipes.preflight import page  # with torch

            page(pipeline)
        elif submits:
            slurm.make(pipeline, goal)
        else:
            pipeline.make(goal)
        if goal == "all":
            print((recipe.run / "summary.txt").read_text(encoding="utf-8"))
            print(f"Report: {recipe.run / 'report.html'}")

    def plan() -> list[str]:
        parts = slurm.parts(pipeline, "all" if goal == "preflight" else goal) if submits else ()
        jobs = [f"job  {job.name}: {needs}" for _, job, needs, _ in parts]
        return [*jobs, *Chain(pipeline.steps()).table(pipeline.goals[goal])]

    return machine.cpu, plan, work


def main() -> None:
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    target, *words = [word for word in sys.argv[1:] if not word.startswith("-")] or ["help"]
    flags, *_ = [*os.environ.get("MAKEFLAGS", "").split(), ""]
    if target == "help":
        name, _ = asked(next(iter(words), os.environ.get("TARGET", "")))
        print("\n".join(recipes.help_lines(name)))
        return
    if target == "preflight":
        named = dict(os.environ) | dict(word.split("=", 1) for word in words if word.startswith("RECIPE="))
        if not named.get("RECIPE"):
            raise ValueError("RECIPE= is missing; expected a recipe, as in make preflight RECIPE=demo.")
        target = f"{named['RECIPE']}-preflight"
        words = [word for word in words if not word.startswith("RECIPE=")]
    name, goal = asked(target)
    recipe = recipes.read(name, recipes.collect(name, words, recipes.files()[name][0].names))
    exported = recipe.settings.exported().items()
    os.environ.update({name: value for name, value in exported if name in recipe.given or name not in os.environ})
    on_cpu, plan, work = of_a_grid(recipe) if recipe.file.is_grid else of_a_model(recipe, goal)
    if on_cpu:
        # With --cpu fairseq still clips gradients on a GPU that it sees, and starts a process for each of several.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "-n" in options or (not flags.startswith("-") and "n" in flags):
        print("\n".join(plan()))
        return
    raise SystemExit(supervise(partial(run, work)))


if __name__ == "__main__":
    run(main)
