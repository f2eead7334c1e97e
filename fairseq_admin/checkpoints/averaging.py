"""The mean of a run's checkpoints: which files, whether they belong together, and the mean.

The files are mapped, not loaded: what was read of them is memory that the system takes back where it needs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bar import bar, each
from ..errors import AdminError
from ..method.state_dict import OMEGA_INIT, STRAY
from . import files
from .building import refuse_not_finite
from .checkpoint import Checkpoint

LAST = 10
"""How many checkpoints of a run folder to average by default."""

NUMBERED = {"epochs": re.compile(r"checkpoint(\d+)\.pt"), "updates": re.compile(r"checkpoint_\d+_(\d+)\.pt")}
EXAMPLES = {"epochs": "checkpoint7.pt", "updates": "checkpoint_3_900.pt"}

MOVING_AVERAGES = ("ema", "ema_fp32_params")
"""Where a checkpoint's `extra_state` holds those of --store-ema: one of the weights, and that in float32."""


def newest(folder: Path, last: int, upto: int | None = None, by: str | None = None) -> list[Path]:
    """The last checkpoints of a run's --save-dir, oldest first; refused if there are fewer.

    Args:
        folder: the run's --save-dir.
        last: how many.
        upto: no checkpoint beyond this epoch, or this update.
        by: "epochs" (checkpoint7.pt) or "updates" (checkpoint_3_900.pt); default: epochs where there are any.
    """
    numbered: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in NUMBERED}
    for path in folder.glob("*.pt"):
        for kind, pattern in NUMBERED.items():
            if match := pattern.fullmatch(path.name):
                numbered[kind].append((int(match[1]), path))
    kinds = [by] if by else list(NUMBERED)
    if not any(numbered[kind] for kind in kinds):
        names = " or ".join(f"{EXAMPLES[kind]} ({kind})" for kind in kinds)
        raise AdminError(
            f"{folder} holds no numbered checkpoint; expected names like {names}. Give the --save-dir of a run, or "
            "name the files."
        )
    kind = next(kind for kind in kinds if numbered[kind])
    paths = [path for number, path in sorted(numbered[kind]) if upto is None or number <= upto]
    if len(paths) < last:
        bound = "" if upto is None else f" up to {upto}"
        raise AdminError(
            f"{folder} holds {len(paths)} checkpoints numbered by {kind}{bound} and the last {last} were asked for. "
            "Lower --last, or train with --keep-last-epochs or --keep-interval-updates that high."
        )
    return paths[-last:]


def choose(
    inputs: Sequence[Path], last: int | None = None, upto: int | None = None, by: str | None = None
) -> list[Path]:
    """The checkpoints that a command line means: those of one run folder, or the files it names, each once."""
    folders = [path for path in inputs if os.path.isdir(path)]
    if folders and len(inputs) > 1:
        raise AdminError(
            f"{folders[0]} is a folder; either one run folder or files were expected. For several runs, name the files."
        )
    if folders:
        names = os.listdir(folders[0])  # refused without the right to; a search by pattern would find nothing
        in_recipes = not any(pattern.fullmatch(name) for name in names for pattern in NUMBERED.values())
        save_dir = folders[0] / "checkpoints" if in_recipes and "checkpoints" in names else folders[0]
        return newest(save_dir, LAST if last is None else last, upto, by)
    for option, value in (("--last", last), ("--upto", upto), ("--by", by)):
        if value is not None:
            raise AdminError(
                f"{option} chooses from a run folder, and {inputs[0]} is not one. Leave it out, or give a folder."
            )
    return list(inputs)


def _refuse_misfits(checkpoints: Sequence[Checkpoint], checksums: Sequence[tuple[int, ...]]) -> None:
    """Refuse checkpoints that are folded, not of one run, or copies, as far as can be told without their weights."""
    copies: dict[tuple[int, ...], Checkpoint] = {}
    for checkpoint, checksum in zip(checkpoints, checksums):
        if checkpoint.folded:
            raise AdminError(
                f"{checkpoint.name} is folded, and the fold is not linear in omega: average first, then fold. Give the "
                "unfolded checkpoints."
            )
        texts = bool(checkpoints[0].text and checkpoint.text)
        facts = [_of_a_run(one, texts) for one in (checkpoints[0], checkpoint)]
        for what in [*facts[0], *facts[1]]:
            one, two = (of_one.get(what, "missing") for of_one in facts)
            if one != two:
                raise AdminError(
                    f"{checkpoints[0].name} and {checkpoint.name} are not of one run: {what} is {one} in the first and "
                    f"{two} in the second. Average the checkpoints of one run."
                )
        _refuse_other_profile(checkpoints[0], checkpoint)
        first = copies.setdefault(checksum, checkpoint)
        if first is not checkpoint:
            raise AdminError(
                f"{checkpoint.name} and {first.name} hold the same weights; each checkpoint counts once. Leave one out "
                "(fairseq's checkpoint_last.pt and checkpoint_best.pt are copies)."
            )


def _refuse_other_profile(one: Checkpoint, two: Checkpoint) -> None:
    """Refuse two models whose profiled omega differs: training changes omega_delta alone."""
    if "code" in (one.record or {}):  # the authors' code, which trains what we take as omega_init
        return
    for key in one.weights:
        if not key.endswith(OMEGA_INIT):
            continue
        profiles = one.weights[key], two.weights[key]
        narrow = min((profile.dtype for profile in profiles), key=lambda dtype: dtype.itemsize)
        first, second = (profile.to(narrow) for profile in profiles)
        differs = first.ne(second) & first.isfinite() & second.isfinite()
        if differs.any():
            raise AdminError(
                f"{one.name} and {two.name} are not of one run: omega of {key.removesuffix(OMEGA_INIT)} was profiled "
                f"as {first[differs][0]:.4g} in the first and {second[differs][0]:.4g} in the second. Average the "
                "checkpoints of one run."
            )


def _of_a_run(checkpoint: Checkpoint, texts: bool) -> dict[str, Any]:
    """What the checkpoints of one run have in common, by its name in errors; older ones know nothing of their text."""
    return {
        **{f"the shape of {key}": tuple(tensor.shape) for key, tensor in checkpoint.weights.items()},
        **{f"omega's {name}": value for name, value in (checkpoint.record or {}).items()},
        **{f"the new layers' {name}": value for name, value in (checkpoint.more or {}).items()},
        **{f"the dictionary of the {stack}": value for stack, value in checkpoint.text.items() if texts},
    }


def average(paths: Sequence[Path]) -> Checkpoint:
    """The newest checkpoint (most updates) with its model replaced by the mean of all.

    Memory holds the result and the float64 sum of one tensor.

    Accumulated in float64, stored in the newest's types; entries that are not floats, or that only an older fairseq
    stores (one of them uninitialised memory, so possibly NaN), are taken from the newest. Entries that are one tensor
    in every file, as tied embeddings are, stay one. Optimizer state is dropped: an average is not a point to resume
    from. So is the newest's moving average (--store-ema), which is not that of the mean.

    Args:
        paths: checkpoints in any order, at least one, all of one run.

    Raises:
        AdminError: a file is not a whole checkpoint, is folded, is from another model or run than the first, has
            diverged.
    """
    checkpoints = []
    for path in each("read", paths, " files"):  # which an error ends; a comprehension keeps the bar open meanwhile
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
    """The names of the newest's entries; those that are one tensor in every file are together."""
    ties: dict[Any, list[str]] = {}
    for key in last.weights:
        tensors = [checkpoint.weights[key] for checkpoint in checkpoints]
        ties.setdefault(tuple((t.data_ptr(), t.shape, t.stride()) for t in tensors), []).append(key)
    return list(ties.values())


def _mean(key: str, checkpoints: Sequence[Checkpoint], newest: Tensor) -> Tensor:
    """An entry's mean in the newest's type, or the newest's own."""
    if STRAY.search(key) or not newest.is_floating_point():
        return newest
    summed = torch.zeros(newest.shape, dtype=torch.float64)
    for checkpoint in checkpoints:
        summed += checkpoint.weights[key]
    if not summed.sum().isfinite():
        for checkpoint in checkpoints:
            refuse_not_finite(checkpoint.name, key, checkpoint.weights[key])
    return summed.div_(len(checkpoints)).to(newest.dtype)
