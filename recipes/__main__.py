"""The front of the recipes: `make TARGET NAME=VALUE ...` comes here, and it can be used alone.

    python -m recipes demo METHOD=pre-ln SEED=2
    python -m recipes iwslt14-prepare
    python -m recipes help demo

A setting that is not given is taken from the environment, where make has put what stands on its command line. With -n
the steps are listed, and none is run.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes import recipe as recipes
from recipes.chain import Chain
from recipes.grid import settings as grids
from recipes.language_model import LanguageModel
from recipes.recipe import Recipe
from recipes.steps import inputs, settings
from recipes.steps.common import run
from recipes.steps.guard import OWN, Ended, alone, clear, supervise
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


@contextmanager
def at_work(folder: Path, node: int = 0, wait: bool = False) -> Iterator[None]:
    """Have a folder to oneself; what a killed process left half-written goes."""
    lock = folder / f".guard{node or ''}"
    with alone(lock, wait):
        os.environ[OWN] = os.pathsep.join(filter(None, (os.environ.get(OWN), str(lock.absolute()))))
        if not node:
            clear(folder)
        yield


def prepare(pipeline: Pipeline | LanguageModel, chain: Chain, recipe: Recipe) -> None:
    """The text, which others may be waiting for too. Another one is refused where a model was trained on it."""
    record = recipe.raw / "inputs.json"
    kept = inputs.read(record)
    data = Path(recipe.settings.DATA) if getattr(recipe.settings, "DATA", None) else None
    with at_work(recipe.text, wait=True):
        held, keys = recipe.text / "settings.json", recipe.text / ".keys"
        adopts = held.exists() and not keys.exists()
        changed = settings.differences(kept, inputs.present(kept, data, recipe.archives))
        if settings.change(held, pipeline.record(), changed, recipe.base):
            keys.mkdir(exist_ok=True)  # so that no later start takes the old text as made with the new settings
        elif adopts:
            for folder in dict.fromkeys((recipe.raw, recipe.text)):
                chain.adopt(folder)
        settings.hold(held, pipeline.record(), changed, recipe.base)
        chain.make(pipeline.goals["prepare"])


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
    train = pipeline.run
    with at_work(recipe.run, machine.node):
        held, folder = recipe.run / "settings.json", recipe.run
        adopts = held.exists() and not (folder / ".keys").exists()
        record = {
            **train.held(),
            **settings.read(recipe.text / "settings.json"),
            **inputs.read(recipe.raw / "inputs.json"),
        }
        settings.hold(held, record, [], folder)
        settings.check_length(folder, train.unit, train.length)
        if adopts and train.trained.exists():
            chain.adopt(folder)
        known = chain.kept("average").get("settings", {}).get("average")
        settings.check_average(known, str(recipe.settings.AVERAGE), folder, train.unit)
        chain.make(pipeline.goals[goal])
        if goal == "all":
            print((folder / "summary.txt").read_text(encoding="utf-8"))
            print(f"Report: {folder / 'report.html'}")


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
    try:
        status = supervise(lambda: run(lambda: work(recipe, goal)))
    except Ended as ended:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        status = 128 + ended.number
    if status:
        clear_halves(recipe)
    raise SystemExit(status)


def clear_halves(recipe: Recipe) -> None:
    """Remove what a killed command left half-written, where nobody else is at work."""
    for folder in (recipe.text, recipe.run):
        if folder.exists():
            try:
                with alone(folder / ".guard", wait=False):
                    clear(folder)
            except ValueError:
                continue


if __name__ == "__main__":
    run(main)
