"""Average the checkpoints of a run: choose the files, check that they belong together, take the mean.

The files are mapped, not loaded, so the system can take back memory at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bar import bar, progress
from ..errors import AdminError
from ..method.state_dict import LEGACY_KEYS, OMEGA_INIT
from . import files
from .building import refuse_not_finite
from .checkpoint import Checkpoint

LAST = 10
"""Number of checkpoints of a run folder that are averaged by default."""

NUMBERED = {"epochs": re.compile(r"checkpoint(\d+)\.pt"), "updates": re.compile(r"checkpoint_\d+_(\d+)\.pt")}
EXAMPLES = {"epochs": "checkpoint7.pt", "updates": "checkpoint_3_900.pt"}

MOVING_AVERAGES = ("ema", "ema_fp32_params")
"""Entries of a checkpoint's `extra_state` by --store-ema: the moving average of the weights, and its float32 copy."""


def newest(folder: Path, last: int, by: str | None = None) -> list[Path]:
    """Find the last checkpoints of a run.

    Args:
        folder: the run's --save-dir.
        last: number of checkpoints.
        by: "epochs" (checkpoint7.pt) or "updates" (checkpoint_3_900.pt). None: epochs if there are any.

    Returns:
        Their paths, oldest first.

    Raises:
        AdminError: there are fewer.
    """
    numbered: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in NUMBERED}
    for name in os.listdir(folder):  # raises an error for an unreadable folder, where a glob would find nothing
        for kind, pattern in NUMBERED.items():
            if match := pattern.fullmatch(name):
                numbered[kind].append((int(match[1]), folder / name))
    kinds = [by] if by else list(NUMBERED)
    if not any(numbered[kind] for kind in kinds):
        names = " or ".join(f"{EXAMPLES[kind]} ({kind})" for kind in kinds)
        raise AdminError(
            f"{folder} holds no numbered checkpoint; expected names like {names}. Give the --save-dir of a run, or "
            "name the files."
        )
    kind = next(kind for kind in kinds if numbered[kind])
    paths = [path for _, path in sorted(numbered[kind])]
    if len(paths) < last:
        raise AdminError(
            f"{folder} holds {len(paths)} checkpoints numbered by {kind} and the last {last} were asked for. "
            "Lower --last, or train with --keep-last-epochs or --keep-interval-updates that high."
        )
    return paths[-last:]


def choose(inputs: Sequence[Path], last: int | None = None, by: str | None = None) -> list[Path]:
    """Resolve the inputs of the command line: the last checkpoints of one run folder, or the named files.

    Args:
        inputs: one run folder, or files.
        last, by: see `newest`; for a run folder only.

    Returns:
        The files to average.

    Raises:
        AdminError: the inputs mix folders and files, or the folder holds too few checkpoints.
    """
    folders = [path for path in inputs if os.path.isdir(path)]
    if folders and len(inputs) > 1:
        raise AdminError(
            f"{folders[0]} is a folder; either one run folder or files were expected. For several runs, name the files."
        )
    if folders:
        of_recipe = folders[0] / "checkpoints"
        return newest(of_recipe if of_recipe.is_dir() else folders[0], last or LAST, by)
    if last or by:
        raise AdminError(
            f"--last and --by choose from a run folder, and {inputs[0]} is not one. Leave them out, or give a folder."
        )
    return list(inputs)


def _refuse_misfits(checkpoints: Sequence[Checkpoint], checksums: Sequence[tuple[int, ...]]) -> None:
    """Refuse checkpoints that are folded, from several runs, or copies of each other. Reads no large weight."""
    copies: dict[tuple[int, ...], Checkpoint] = {}
    for checkpoint, checksum in zip(checkpoints, checksums):
        if checkpoint.folded:
            raise AdminError(
                f"{checkpoint.name} is folded, and the fold is not linear in omega: average first, then fold. Give the "
                "unfolded checkpoints."
            )
        refuse_other_run(checkpoints[0], checkpoint)
        first = copies.setdefault(checksum, checkpoint)
        if first is not checkpoint:
            raise AdminError(
                f"{checkpoint.name} and {first.name} hold the same weights; each checkpoint counts once. Leave one out "
                "(fairseq's checkpoint_last.pt and checkpoint_best.pt are copies)."
            )


def refuse_other_run(one: Checkpoint, two: Checkpoint) -> None:
    """Refuse checkpoints of two runs, which differ in shapes, records or dictionaries, or whose profiled ω differs by
    more than a rounding. (Training changes omega_delta alone.)

    Args:
        one, two: the checkpoints.

    Raises:
        AdminError: they are of two runs.
    """
    texts = bool(one.text and two.text)
    facts = [_run_facts(checkpoint, texts) for checkpoint in (one, two)]
    for name in [*facts[0], *facts[1]]:
        values = [known.get(name, "missing") for known in facts]
        if values[0] != values[1]:
            raise _other_runs(one, two, f"{name} is {values[0]}", values[1])
    if "code" in (one.record or {}):  # the authors' code trains the ω that we load as omega_init
        return
    for key in filter(lambda key: key.endswith(OMEGA_INIT), one.weights):
        first, second = one.weights[key].float(), two.weights[key].float()
        differs = (first - second).abs() > 2**-8 * first.abs()
        if differs.any():
            fact = f"the profiled omega of {key.removesuffix(OMEGA_INIT)} is {first[differs][0]:.4g}"
            raise _other_runs(one, two, fact, f"{second[differs][0]:.4g}")


def _other_runs(one: Checkpoint, two: Checkpoint, fact: str, other: object) -> AdminError:
    return AdminError(
        f"{one.name} and {two.name} are not of one run: {fact} in the first and {other} in the second. Give "
        "checkpoints of one run."
    )


def _run_facts(checkpoint: Checkpoint, texts: bool) -> dict[str, Any]:
    """Facts that the checkpoints of one run share, by their names in messages. Older ones lack facts about the text."""
    return {
        **{f"the shape of {key}": tuple(tensor.shape) for key, tensor in checkpoint.weights.items()},
        **{f"omega's {name}": value for name, value in (checkpoint.record or {}).items()},
        **{f"the new layers' {name}": value for name, value in (checkpoint.new_layers or {}).items()},
        **{f"the dictionary of the {stack}": value for stack, value in checkpoint.text.items() if texts},
    }


def average(paths: Sequence[Path]) -> Checkpoint:
    """Average checkpoints. Memory holds the result and the float64 sum of one tensor.

    The mean is summed in float64 and stored in the newest checkpoint's types. Entries that are not floats, or that only
    an older fairseq stores (one is uninitialised memory, possibly NaN), come from the newest. Entries that share one
    tensor in every file, such as tied embeddings, also share one in the result. Optimizer state is dropped, since
    nobody resumes from an average, and so is the moving average (--store-ema), which belongs to the newest weights.

    Args:
        paths: checkpoints in any order, at least one, all of one run.

    Returns:
        The newest checkpoint (most updates), its model replaced by the mean.

    Raises:
        AdminError: a file is not a whole checkpoint, is folded, belongs to another model or run than the first, or has
            diverged.
    """
    checkpoints = []
    for path in progress("read", paths, " files"):  # not a comprehension: an error in one would leave the bar open
        checkpoints.append(Checkpoint.read(path))
    _refuse_misfits(checkpoints, [files.checksums(path) for path in paths])
    last = max(checkpoints, key=lambda checkpoint: checkpoint.updates)
    ties = _ties(checkpoints, last)
    with bar("average", sum(last.weights[keys[0]].nbytes for keys in ties), "B", scaled=True) as shown:
        for keys in ties:
            mean = _mean(keys[0], checkpoints, last.weights[keys[0]])
            last.weights.update(dict.fromkeys(keys, mean))
            shown.update(mean.nbytes)
    last.state.pop("last_optimizer_state", None)
    for name in MOVING_AVERAGES:
        (last.state.get("extra_state") or {}).pop(name, None)
    return Checkpoint(last.state)


def _ties(checkpoints: Sequence[Checkpoint], last: Checkpoint) -> list[list[str]]:
    """Group the names of the newest checkpoint's entries: a group shares one tensor in every file."""
    ties: dict[Any, list[str]] = {}
    for key in last.weights:
        tensors = [checkpoint.weights[key] for checkpoint in checkpoints]
        ties.setdefault(tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors), []).append(key)
    return list(ties.values())


def _mean(key: str, checkpoints: Sequence[Checkpoint], newest: Tensor) -> Tensor:
    """The mean of an entry, in the newest checkpoint's type; or the newest tensor, if the entry is not averaged."""
    if LEGACY_KEYS.search(key) or not newest.is_floating_point():
        return newest
    summed = torch.zeros(newest.shape, dtype=torch.float64)
    for checkpoint in checkpoints:
        summed += checkpoint.weights[key]
    if not summed.sum().isfinite():
        for checkpoint in checkpoints:
            refuse_not_finite(checkpoint.name, key, checkpoint.weights[key])
    return summed.div_(len(checkpoints)).to(newest.dtype)
