"""The mean of a run's checkpoints: which files, whether they belong together, and the sum, a storage at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError
from ..method import provenance, state_dict
from . import files as checkpoint
from .records import Entry, Source

LAST = 10
"""How many checkpoints of a run folder to average unless told."""

NUMBERED = {"epochs": re.compile(r"checkpoint(\d+)\.pt"), "updates": re.compile(r"checkpoint_\d+_(\d+)\.pt")}

FOLD = "admin_fold"
"""The entry of a checkpoint's `extra_state` that tells a folded model from one that never had an ω."""


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
            if not any(found.values()) and checkpoint.SHARD.search(path.name):
                raise checkpoint.sharded(path)
        bound = "" if upto is None else f" up to {upto}"
        raise AdminError(
            f"{folder} holds {len(paths)} checkpoints numbered by {kind}{bound} and the last {last} were asked for. "
            "Lower --last, or train with --keep-last-epochs or --keep-interval-updates that high."
        )
    return paths[-last:]


def choose(
    inputs: Sequence[Path], last: int | None = None, upto: int | None = None, by: str | None = None
) -> list[Path]:
    """The checkpoints that a command line means: those of one run folder, or the files it names.

    Raises:
        AdminError: several folders, a folder beside files, a file twice, options of a folder without one, or fewer
            checkpoints than asked for.
    """
    folders = [path for path in inputs if path.is_dir()]
    if folders and len(inputs) > 1:
        raise AdminError(
            f"{folders[0]} is a folder; either one run folder or files were expected. Name the files of several runs."
        )
    if folders:
        return newest(folders[0], LAST if last is None else last, upto, by)
    for option, value in (("--last", last), ("--upto", upto), ("--by", by)):
        if value is not None:
            raise AdminError(
                f"{option} chooses from a run folder, and {inputs[0]} is none. Leave it out, or give a folder."
            )
    seen: dict[tuple[int, int], Path] = {}
    for path in inputs:
        if path.exists():
            status = os.stat(path)
            twin = seen.setdefault((status.st_dev, status.st_ino), path)
            if twin is not path:
                raise AdminError(f"{path} and {twin} are one file; each checkpoint counts once. Name it once.")
    return list(inputs)


def _refuse_misfits(sources: Sequence[Source]) -> None:
    """Refuse checkpoints that are not of one run, by what tells most; the weights stay unread."""
    for source in sources:
        if FOLD in (source.state.get("extra_state") or {}):
            raise AdminError(
                f"{source.path} is folded, and the fold is not linear in omega: average first, then fold. Give the "
                "unfolded checkpoints."
            )
    first = sources[0]
    for other in sources[1:]:
        if first.has_omega != other.has_omega:
            without, having = (first, other) if other.has_omega else (other, first)
            raise AdminError(
                f"{without.path} has no omega (it is folded, or a stock model) and {having.path} has: average first, "
                "then fold. The fold is not linear in omega."
            )
        for key in [*first.state["model"], *other.state["model"]]:
            for without, having in ((first, other), (other, first)):
                if key not in without.state["model"]:
                    raise AdminError(
                        f"{without.path} has no {key}, and {having.path} has; checkpoints of one model were expected."
                    )
            shape, expected = (getattr(source.entries.get(key), "shape", None) for source in (other, first))
            if shape != expected:
                raise AdminError(
                    f"{other.path}: {key} has shape {shape}, and {expected} in {first.path}; checkpoints of one model "
                    "were expected."
                )
        _refuse_other_profile(first, other)
    seen: dict[tuple[int, ...], Source] = {}
    for source in sources:
        twin = seen.setdefault(tuple(entry.crc for entry in source.entries.values()), source)
        if twin is not source:
            raise AdminError(
                f"{source.path} and {twin.path} hold the same weights; each checkpoint counts once. Leave one out "
                "(fairseq's checkpoint_last.pt and checkpoint_best.pt are copies)."
            )


def _refuse_other_profile(first: Source, other: Source) -> None:
    """Refuse a pair of checkpoints whose ω were not profiled at once: the mean of two records is none."""
    records = []
    for source in (first, other):
        if provenance.KEY in source.entries:
            try:
                records.append(provenance.decode(source.tensor(provenance.KEY, {})) or {})
            except AdminError as error:
                raise AdminError(f"{source.path}: {error}") from None
    if len(records) < 2 or records[0] == records[1]:
        return
    if not all(records):
        early, late = (first, other) if records[1] else (other, first)
        raise AdminError(
            f"{early.path} was saved before omega was profiled, and {late.path} after it. Leave the first out."
        )
    what = next(key for key in [*records[0], *records[1]] if records[0].get(key) != records[1].get(key))
    raise AdminError(
        f"{first.path} and {other.path} are not of one run: omega was profiled with {what} {records[0].get(what)} in "
        f"the first and {records[1].get(what)} in the second. Average the checkpoints of one run."
    )


def _refuse_not_finite(sources: Sequence[Source], key: str) -> None:
    """Refuse the first checkpoint with NaN or infinity in an entry."""
    for source in sources:
        tensor = source.tensor(key, {})
        bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            raise AdminError(
                f"{source.path}: {key} holds NaN or infinity, {bad} of {tensor.numel()} values: the run had diverged. "
                "Leave this file out."
            )


def average(paths: Iterable[Path]) -> dict[str, Any]:
    """The newest checkpoint (most updates) with its model replaced by the mean of all.

    Beside the result, one storage of one file and its float64 sum are in memory.

    Accumulated in float64, stored in the newest's types; entries that are no floats, or that only an older fairseq
    stores (one of them uninitialised memory, so possibly NaN), are the newest's. Entries that are one tensor in every
    file, as tied embeddings are, stay one. Optimizer state is dropped: an average is not a point to resume from.

    Args:
        paths: checkpoints in any order, at least one, all of one run.

    Raises:
        AdminError: a file is no whole checkpoint, folded, or of another model or run than the first, or has diverged.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(Source(path)) for path in paths]
        _refuse_misfits(sources)
        last = max(sources, key=lambda source: source.updates)
        model = last.state["model"]
        # Storage of the newest -> place in all files -> the entries there: several where they are tied in all.
        storages: dict[int, dict[tuple[Entry, ...], list[str]]] = {}
        for key, entry in last.entries.items():
            places = tuple(source.entries[key] for source in sources)
            storages.setdefault(entry.start, {}).setdefault(places, []).append(key)
        for views in storages.values():
            for keys, mean in zip(views.values(), _means(sources, last, [keys[0] for keys in views.values()])):
                model.update(dict.fromkeys(keys, mean))
    return last.state


def _means(sources: Sequence[Source], last: Source, keys: Sequence[str]) -> Iterable[Tensor]:
    """The means of entries that share a storage in the newest checkpoint."""
    # What stays is allocated before what goes, or malloc's heap would be left full of holes.
    means = {key: torch.empty(last.entries[key].shape, dtype=last.entries[key].dtype) for key in keys}
    summed = [key for key in keys if means[key].is_floating_point() and not state_dict.STRAY.search(key)]
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
            _refuse_not_finite(sources, key)
        mean.copy_(sums[key].div_(len(sources)))
    return means.values()
