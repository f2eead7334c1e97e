"""Whether branches are proportional to the weights that are said to write them: tried in training mode.

What evaluation mode shows may not hold in training: there a BatchNorm without weights is linear.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.undisturbed import undisturbed
from .batch import call
from .branches import Writer
from .trace import SCALE, leaf_of, same, tensors, unchanged, with_leaf

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}
"""The share of the largest number by which two runs may differ, as sums on a GPU do in another order."""


def close(one: Tensor, other: Tensor) -> bool:
    return same(one, other, TOLERANCE.get(one.dtype, 0.05))


def try_writers(model: nn.Module, batch: Any, writers: list[Writer]) -> None:
    """Try whether the weights of writers scale what these return, and set `unfoldable` where they do not.

    The model runs twice, the second time with all these weights scaled. Each branch is then compared with what it was,
    and replaced by it. Parameters that are 0 get random numbers for this, because zeros scale with anything.
    """
    tried = {w.outer: w for w in writers if w.outer and not w.unfoldable}  # a weight that is divided needs no trial
    parameters = dict(model.named_parameters())
    scaled = dict.fromkeys(name for w in writers if w.outer in tried for name in w.weights)
    branches: dict[Any, list[Tensor]] = {outer: [] for outer in tried}
    wrong = set[Any]()

    def keep(outer: tuple[str, int], module: nn.Module, args: Any, output: Any) -> None:
        branches[outer].append(leaf_of(output, outer[1]).clone())

    def compare(outer: tuple[str, int], module: nn.Module, args: Any, output: Any) -> Any:
        branch, before = leaf_of(output, outer[1]), branches[outer]
        if not before or not close(before[0] * SCALE, branch):
            wrong.add(outer)
        return with_leaf(output, outer[1], before.pop(0)) if before else output

    def run(hook: Any) -> list[Tensor]:
        with unchanged(model), contextlib.ExitStack() as hooks:
            for outer in tried:
                module = model.get_submodule(outer[0])
                hooks.callback(module.register_forward_hook(partial(hook, outer)).remove)
            torch.clear_autocast_cache()  # it may hold weights as they were before
            torch.manual_seed(1)
            return tensors(call(model, batch))

    with undisturbed(model):
        model.train()  # may change weights: some adapters merge theirs in eval()
        saved = {name: p.clone() for name, p in parameters.items() if name in scaled or not p.any()}
        try:
            for name in saved:
                if not parameters[name].any():
                    parameters[name].normal_(0, 0.02)
            before = run(keep)
            for name in scaled:
                parameters[name].mul_(SCALE)
            after = run(compare)
        finally:
            for name, numbers in saved.items():
                parameters[name].copy_(numbers)
    if not wrong and not all(map(close, before, after)):
        wrong = {*tried}
    for writer in writers:
        if writer.outer and writer.outer in wrong:
            writer.unfoldable = (
                f"has a branch that is not proportional to {' and '.join(writer.weights)} in training mode"
            )
            writer.name, writer.place = writer.outer
