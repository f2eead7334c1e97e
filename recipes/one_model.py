"""A recipe that trains one model: its text, which others may share, then its run."""

from __future__ import annotations

import warnings

from recipes.chain import Chain
from recipes.language_model import LanguageModel
from recipes.recipe import Recipe
from recipes.steps.guard import at_work
from recipes.translation import Pipeline


def of(recipe: Recipe) -> Pipeline | LanguageModel:
    """The steps of a recipe."""
    return LanguageModel(recipe) if recipe.file.kind == "LanguageModel" else Pipeline(recipe)


def make(recipe: Recipe, goal: str) -> None:
    """What a goal needs. Another text is refused where a model was trained on the one that is there."""
    pipeline = of(recipe)
    chain, record = Chain(pipeline.steps()), pipeline.record()
    warnings.simplefilter("ignore")  # of fairseq and its libraries about one another: nothing the user can fix
    with at_work(recipe.text, wait=True):
        chain.adopt(recipe.text, recipe.raw, record, recipe.base)
        chain.make(pipeline.goals["prepare"], recipe.base)
    if goal != "prepare":
        with at_work(recipe.run, pipeline.machine.node):
            pipeline.run.hold(chain, record)
            chain.make(pipeline.goals[goal])
