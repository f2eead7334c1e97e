"""A recipe that trains one model, as jobs of a Slurm cluster: its text, its training, and what is made of it.

Each job is the same command again, for that part; the variable NODE tells it that it is on the cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from recipes.chain import Chain
from recipes.jobs import Job, Needs
from recipes.training import Pipeline


def parts(pipeline: Pipeline, goal: str) -> Iterator[tuple[str, Job, Needs]]:
    """The goals that are jobs, one after another."""
    recipe, machine = pipeline.recipe, pipeline.machine
    needs, gpus = recipe.file.needs, 0 if machine.cpu else machine.gpus
    found = {"prepare": needs}
    if goal != "prepare":
        found["train"] = replace(needs, nodes=machine.nodes, gpus=gpus)
    if goal not in found:
        found[goal] = replace(needs, gpus=min(1, gpus))
    words = [f"{name}={value}" for name, value in recipe.given.items()]
    for part, needed in found.items():
        target = recipe.target if part == "all" else f"{recipe.target}-{part}"
        yield part, Job(target, [sys.executable, "-m", "recipes", target, *words], recipe.run), needed


def run(pipeline: Pipeline, goal: str) -> None:
    """Those parts that are not done.

    Raises:
        ValueError: one failed.
    """
    from recipes import slurm  # with submitit

    recipe = pipeline.recipe
    cluster = slurm.read_settings(Path(recipe.settings.SLURM))
    for part, job, needs in parts(pipeline, goal):
        if Chain(pipeline.steps()).plan(pipeline.goals[part]):
            print(f"# {job.name}: {needs}; what it says is in {job.log}", flush=True)
            if any(status for _, status in slurm.run([job], needs, 1, cluster, recipe.run / "slurm")):
                raise ValueError(f"{job.name}: {job.last_word()} All it said: {job.log}.")
