"""The front of the recipes: `make TARGET NAME=VALUE ...` comes here, and it can be used alone.

    python -m recipes demo METHOD=pre-ln SEED=2
    python -m recipes iwslt14-prepare
    python -m recipes help demo

A setting that is not given is taken from the environment, where make has put what stands on its command line. With -n
the steps are listed, and none is run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings

from recipes import recipe as recipes
from recipes.chain import Chain
from recipes.grid import settings as grids
from recipes.language_model import LanguageModel
from recipes.processes import supervise
from recipes.recipe import Recipe
from recipes.steps.common import run, write_lines
from recipes.steps.guard import at_work
from recipes.translation import Pipeline

STEPS = ("preflight", "prepare", "train", "average", "generate", "score")
MAKES = {"PYTHON", "VENV", "TORCH", "PYTEST", "TARGET", "RECIPE"}
"""Variables of the Makefile's own."""


def given(target: str, words: list[str]) -> dict[str, str]:
    """What the user gave for the settings of a target: words NAME=VALUE, or the environment.

    Raises:
        ValueError: a name on make's command line is not a setting.
    """
    if wrong := next((word for word in words if not re.match(r"[A-Z]\w*=", word)), None):
        raise ValueError(f"{wrong}: expected NAME=VALUE, a setting of {target}. See make help TARGET={target}.")
    known = grids.names(target) if target in grids.KINDS else recipes.names(target)
    _, _, after = os.environ.get("MAKEFLAGS", "").partition("-- ")
    on_line = {word.partition("=")[0] for word in re.split(r"(?<!\\)\s+", after) if "=" in word} - MAKES
    values = {name: os.environ[name] for name in [*known, *on_line] if name in os.environ}
    return values | dict(word.split("=", 1) for word in words)


def asked(target: str) -> tuple[str, str]:
    """The recipe and the step that a target names, as in iwslt14-prepare.

    Raises:
        ValueError: there is no such recipe.
    """
    known = recipes.files()
    recipe, _, step = target.rpartition("-")
    if target in known:
        return target, "all"
    if recipe in known and step in STEPS:
        return recipe, step
    raise ValueError(
        f"{target} is unknown; expected one of {' '.join([*known, *grids.KINDS])}, or one with -{' -'.join(STEPS)} "
        "after it (the grids have none)."
    )


def prepare(pipeline: Pipeline | LanguageModel, chain: Chain, recipe: Recipe) -> None:
    """The text, which others may be waiting for too. Another one is refused where a model was trained on it."""
    with at_work(recipe.text, wait=True):
        chain.adopt(recipe.text, recipe.raw, pipeline.record(), recipe.base)
        chain.make(pipeline.goals["prepare"], recipe.base)
        write_lines(recipe.text / "settings.json", [json.dumps(pipeline.record(), indent=2)])  # for whoever reads it


def of(recipe: Recipe) -> Pipeline | LanguageModel:
    """The steps of a recipe."""
    return LanguageModel(recipe) if recipe.file.kind == "LanguageModel" else Pipeline(recipe)


def work(recipe: Recipe, goal: str) -> None:
    pipeline = of(recipe)
    chain = Chain(pipeline.steps())
    warnings.simplefilter("ignore")  # of fairseq and its libraries about one another: nothing the user can fix
    machine = pipeline.machine
    prepare(pipeline, chain, recipe)
    if goal == "prepare":
        return
    with at_work(recipe.run, machine.node):
        pipeline.run.hold(chain, pipeline.record())
        chain.make(pipeline.goals[goal])
        if goal == "all":
            print((recipe.run / "summary.txt").read_text(encoding="utf-8"))
            print(f"Report: {recipe.run / 'report.html'}")


def main() -> None:
    options, words = [word for word in sys.argv[1:] if word.startswith("-")], sys.argv[1:]
    target, *words = [word for word in words if not word.startswith("-")] or ["help"]
    flags, *_ = [*os.environ.get("MAKEFLAGS", "").split(), ""]
    dry = "-n" in options or (not flags.startswith("-") and "n" in flags)
    if target in grids.KINDS:
        from recipes.grid import front  # with scipy and submitit

        front.main(target, given(target, words), dry)
        return
    if target == "help":
        name = next(iter(words), os.environ.get("TARGET", ""))
        print("\n".join(grids.help_lines(name) if name in grids.KINDS else recipes.help_lines(asked(name)[0])))
        return
    if target == "preflight":
        named = [word.partition("=")[2] for word in words if word.startswith("RECIPE=")]
        target = f"{next(iter(named), os.environ.get('RECIPE', ''))}-preflight"
        words = [word for word in words if not word.startswith("RECIPE=")]
    name, goal = asked(target)
    recipe = recipes.read(name, given(name, words))
    os.environ.update({key: value for key, value in recipe.settings.exported().items() if key not in os.environ})
    pipeline = of(recipe)
    if pipeline.machine.cpu:
        # With --cpu fairseq still clips gradients on a GPU that it sees, and starts a process for each of several.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if pipeline.machine.node and goal != "train":
        raise ValueError(
            f"NODE={pipeline.machine.node} of several only trains; run the target that ends in -train there."
        )
    if goal == "preflight":
        from recipes.preflight.page import page  # with torch

        page(recipe, pipeline.run)
        return
    if dry:
        print("\n".join(Chain(pipeline.steps()).table(pipeline.goals[goal])))
        return
    raise SystemExit(supervise(lambda: run(lambda: work(recipe, goal)), recipe.text, recipe.run))


if __name__ == "__main__":
    run(main)
