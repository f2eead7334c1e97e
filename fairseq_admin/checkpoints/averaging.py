"""The mean of a run's checkpoints: which files, whether they belong together, and the sum, one storage at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bar import bar
from ..errors import AdminError
from ..method.state_dict import STRAY
from . import files
from .building import refuse_not_finite
from .checkpoint import Checkpoint
from .records import Entry, Source

LAST = 10
"""How many checkpoints of a run folder to average by default."""

NUMBERED = {"epochs": re.compile(r"checkpoint(\d+)\.pt"), "updates": re.compile(r"checkpoint_\d+_(\d+)\.pt")}


def newest(folder: Path, last: int, upto: int | None = None, by: str | None = None) -> list[Path]:
    """The last checkpoints of a run, oldest first.

    Args:
        folder: the run's --save-dir.
        last: how many.
        upto: no checkpoint beyond this epoch, or this update.
        by: "epochs" (checkpoint7.pt) or "updates" (checkpoint_3_900.pt); default: epochs where there are any.

    Raises:
        AdminError: fewer checkpoints than asked for, or only shards.
    """
    found: dict[str, list[tuple[int, Path]]] = {kind: [] for kind in NUMBERED}
    for path in folder.glob("*.pt"):
        for kind, pattern in NUMBERED.items():
            if match := pattern.fullmatch(path.name):
                found[kind].append((int(match[1]), path))
    kind = by or ("epochs" if found["epochs"] else "updates")
    paths = [path for number, path in sorted(found[kind]) if upto is None or number <= upto]
    if len(paths) < last:
        for path in sorted(folder.glob("*.pt")):
            if not any(found.values()) and files.SHARD.search(path.name):
                raise files.sharded(path)
        bound = "" if upto is None else f" up to {upto}"
        raise AdminError(
            f"{folder} holds {len(paths)} checkpoints numbered by {kind}{bound} and the last {last} were asked for. "
            "Lower --last, or train with --keep-last-epochs or --keep-interval-updates that high."
        )
    return paths[-last:]


def _save_dir(run: Path) -> Path:
    """A run folder's --save-dir: itself or, in the recipes' runs, its folder `checkpoints`."""
    own = any(pattern.fullmatch(path.name) for path in run.glob("*.pt") for pattern in NUMBERED.values())
    return run if own or not (run / "checkpoints").is_dir() else run / "checkpoints"


def choose(
    inputs: Sequence[Path], last: int | None = None, upto: int | None = None, by: str | None = None
) -> list[Path]:
    """The checkpoints that a command line means: those of one run folder, or the files it names.

    Raises:
        AdminError: several folders, a folder next to files, a file twice, a folder's options without a folder, or fewer
            checkpoints than asked for.
        PermissionError: there is no right to read the folder.
    """
    folders = [path for path in inputs if os.path.isdir(path)]
    if folders and len(inputs) > 1:
        raise AdminError(
            f"{folders[0]} is a folder; either one run folder or files were expected. For several runs, name the files."
        )
    if folders:
        os.listdir(folders[0])  # refused without the right to; what looks for names would find none
        return newest(_save_dir(folders[0]), LAST if last is None else last, upto, by)
    for option, value in (("--last", last), ("--upto", upto), ("--by", by)):
        if value is not None:
            raise AdminError(
                f"{option} chooses from a run folder, and {inputs[0]} is not one. Leave it out, or give a folder."
            )
    seen: dict[tuple[int, int], Path] = {}
    for path in inputs:
        if os.path.exists(path):
            status = os.stat(path)
            twin = seen.setdefault((status.st_dev, status.st_ino), path)
            if twin is not path:
                raise AdminError(f"{path} and {twin} are one file; each checkpoint counts once. Name it once.")
    return list(inputs)


def _refuse_misfits(sources: Sequence[Source]) -> None:
    """Refuse checkpoints that are not of one run, or are damaged, as far as can be told without their weights."""
    for source in sources:
        if source.checkpoint.folded:
            raise AdminError(
                f"{source.path} is folded, and the fold is not linear in omega: average first, then fold. Give the "
                "unfolded checkpoints."
            )
        source.checkpoint.check_omega()
    first = sources[0]
    for other in sources[1:]:
        _refuse_other_entries(first, other)
        _refuse_other_profile(first, other)
        _refuse_other_dictionary(first, other)
    seen: dict[tuple[int, ...], Source] = {}
    for source in sources:
        twin = seen.setdefault(tuple(entry.record.crc for entry in source.entries.values()), source)
        if twin is not source:
            raise AdminError(
                f"{source.path} and {twin.path} hold the same weights; each checkpoint counts once. Leave one out "
                "(fairseq's checkpoint_last.pt and checkpoint_best.pt are copies)."
            )


def _refuse_other_entries(first: Source, other: Source) -> None:
    """Refuse a pair of checkpoints whose weights differ in name or shape."""
    one, two = first.checkpoint, other.checkpoint
    if one.has_omega != two.has_omega:
        without, having = (one, two) if two.has_omega else (two, one)
        raise AdminError(
            f"{without.name} has no omega (it is folded, or a stock model) and {having.name} has: average first, then "
            "fold. The fold is not linear in omega."
        )
    for key in [*one.weights, *two.weights]:
        for without, having in ((one, two), (two, one)):
            if key not in without.weights:
                raise AdminError(
                    f"{without.name} has no {key}, and {having.name} has; checkpoints of one model were expected."
                )
        shape, expected = (getattr(source.entries.get(key), "shape", None) for source in (other, first))
        if shape != expected:
            raise AdminError(
                f"{two.name}: {key} has shape {shape}, and {expected} in {one.name}; checkpoints of one model were "
                "expected."
            )


def _refuse_other_profile(first: Source, other: Source) -> None:
    """Refuse a pair of checkpoints whose ω are not from one profiling: the mean of two records is not a record."""
    one, two = (source.checkpoint.more or {} for source in (first, other))
    if one != two:
        raise _of_other_runs(first, other, "the new layers were set up", one, two)
    one, two = (source.checkpoint.record or {} for source in (first, other))
    if one == two:
        return
    if not (one and two):
        early, late = (first, other) if two else (other, first)
        raise AdminError(
            f"{early.path} was saved before omega was profiled, and {late.path} after it. Leave the first out."
        )
    raise _of_other_runs(first, other, "omega was profiled", one, two)


def _of_other_runs(first: Source, other: Source, done: str, one: dict[str, Any], two: dict[str, Any]) -> AdminError:
    what = next(key for key in [*one, *two] if one.get(key) != two.get(key))
    return AdminError(
        f"{first.path} and {other.path} are not of one run: {done} with {what} {one.get(what)} in the first and "
        f"{two.get(what)} in the second. Average the checkpoints of one run."
    )


def _refuse_other_dictionary(first: Source, other: Source) -> None:
    """Refuse a pair of checkpoints whose units have other numbers."""
    one, two = first.checkpoint.text, other.checkpoint.text
    for name in one:
        if one[name] != two.get(name, one[name]):
            raise AdminError(
                f"{first.path} and {other.path} were trained with different dictionaries of the {name}. Average the "
                "checkpoints of one run."
            )


def average(paths: Iterable[Path]) -> Checkpoint:
    """The newest checkpoint (most updates) with its model replaced by the mean of all.

    Memory holds the result, one storage of one file, and its float64 sum.

    Accumulated in float64, stored in the newest's types; entries that are not floats, or that only an older fairseq
    stores (one of them uninitialised memory, so possibly NaN), are taken from the newest. Entries that are one tensor
    in every file, as tied embeddings are, stay one. Optimizer state is dropped: an average is not a point to resume
    from. So is the newest's moving average (--store-ema), which is not that of the mean.

    Args:
        paths: checkpoints in any order, at least one, all of one run.

    Raises:
        AdminError: a file is not a whole checkpoint, is folded, is from another model or run than the first, or has
            diverged.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(Source(path)) for path in paths]
        _refuse_misfits(sources)
        last = max(sources, key=lambda source: source.checkpoint.updates)
        model = last.checkpoint.weights
        # Storage of the newest -> place in all files -> the entries there: several where they are tied in all.
        storages: dict[int, dict[tuple[Entry, ...], list[str]]] = {}
        for key, entry in last.entries.items():
            places = tuple(source.entries[key] for source in sources)
            storages.setdefault(entry.start, {}).setdefault(places, []).append(key)
        sizes = {entry.start: entry.record.size for entry in last.entries.values()}
        with bar("average", len(sources) * sum(sizes.values()), "B", scaled=True) as shown:
            for start, views in storages.items():
                for keys, mean in zip(views.values(), _means(sources, last, [keys[0] for keys in views.values()])):
                    model.update(dict.fromkeys(keys, mean))
                shown.update(len(sources) * sizes[start])
    return Checkpoint(last.checkpoint.state)


def _means(sources: Sequence[Source], last: Source, keys: Sequence[str]) -> Iterable[Tensor]:
    """The means of entries that share a storage in the newest checkpoint."""
    # What is kept is allocated before what is freed, or malloc's heap would be left full of holes.
    means = {key: torch.empty(last.entries[key].shape, dtype=last.entries[key].dtype) for key in keys}
    summed = [key for key in keys if means[key].is_floating_point() and not STRAY.search(key)]
    sums = {key: torch.zeros_like(means[key], dtype=torch.float64) for key in summed}
    for source in sources:
        storages: dict[int, Tensor] = {}
        for key, total in sums.items():
            total += source.tensor(key, storages)
    for key, mean in means.items():
        if key not in sums:
            mean.copy_(last.tensor(key, {}))
            continue
        if not sums[key].sum().isfinite():
            for source in sources:
                refuse_not_finite(source.checkpoint.name, key, source.tensor(key, {}))
        mean.copy_(sums[key].div_(len(sources)))
    return means.values()
