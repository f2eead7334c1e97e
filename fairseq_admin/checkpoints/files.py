"""A checkpoint's file: read without running anything in it, and written whole or not at all."""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import re
import stat
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import outputs
from ..errors import AdminError, line

SHARD = re.compile(r"-shard\d+\.pt$")
"""How fairseq names the parts of a checkpoint under --use-sharded-state."""


def allow_fairseq_globals() -> None:
    """Let torch's safe loader (weights_only, the default since torch 2.6) build what fairseq's checkpoints hold.

    These are plain containers without behaviour: option namespaces, numpy scalars and arrays (learning rates and
    losses), the placeholder fairseq broadcasts tensors with, and omegaconf's containers.
    """
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import AnyNode, DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata

    multiarray = importlib.import_module(f"{'numpy.core' if numpy.__version__ < '2' else 'numpy._core'}.multiarray")
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdU"]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, _TensorPlaceholder]
        + [multiarray.scalar, multiarray._reconstruct, numpy.ndarray, numpy.dtype, *dict.fromkeys(dtypes)]
        + [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict]
        # typing.Any is a class only since Python 3.11
        + [dict, list, str, int, float, bool, Any if isinstance(Any, type) else (Any, "typing.Any")]
    )


def sharded(path: Path) -> AdminError:
    """The refusal of a file that holds one GPU's part of a model (fully_sharded with --use-sharded-state)."""
    return AdminError(
        f"{path} is one shard of a checkpoint; a whole one was expected. Train without --use-sharded-state, which "
        "saves whole ones. fairseq puts shards together in memory only (FSDP.consolidate_shard_weights, which "
        "fairseq-generate --checkpoint-shard-count N calls)."
    )


def refuse_unreadable(path: Path) -> None:
    """Refuse, before its content is looked at, what is not a file, cannot be opened, or is one shard of a checkpoint.

    Raises:
        AdminError: it is so.
    """
    if SHARD.search(path.name) and os.path.exists(path):
        raise sharded(path)
    try:
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise AdminError(f"{path} is a pipe or a device; a file was expected. Save what it gives to a file first.")
        open(path, "rb").close()
    except FileNotFoundError:
        shard = path.with_name(f"{path.stem}-shard0.pt")
        if shard.exists():
            raise sharded(shard) from None
        raise AdminError(f"{path}: no such file; a fairseq checkpoint (.pt) was expected.") from None
    except IsADirectoryError:
        raise AdminError(f"{path} is a folder; a fairseq checkpoint (.pt) was expected.") from None
    except OSError as error:
        raise AdminError(f"{path}: cannot be read ({error.strerror}). Check the path and its rights.") from None


def read(
    path: Path, place: Callable[[torch.UntypedStorage, str], torch.UntypedStorage] | None = None
) -> dict[str, Any]:
    """A fairseq checkpoint's contents, on the CPU, loaded without running code that it may carry.

    Args:
        path: the file.
        place: called with each storage before a tensor is made of it, as torch.load's `map_location`; the storages are
            then mapped from the file, which must be of torch's zip format, instead of read.

    Raises:
        AdminError: the file is missing, truncated, not a checkpoint or only a shard of one, or holds objects that a
            checkpoint does not need.
    """
    refuse_unreadable(path)
    target: Any = place or "cpu"
    try:
        if place is None and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load compares no checksums
            if damaged:
                raise ValueError(f"{damaged} does not match its checksum")
        state = torch.load(path, map_location=target, mmap=place is not None, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds an object of {found[1]}" if found else "is not a torch file"
        raise AdminError(
            f"{path} {what}; a fairseq checkpoint was expected. Nothing in it was run. Give a file that fairseq-train "
            "wrote, and copy it again if it is one."
        ) from None
    except Exception as error:  # on a file that is something else, the unpickler raises almost anything
        if path.is_file() and not zipfile.is_zipfile(path):
            what = "not a whole checkpoint, or not a torch file at all"
            raise AdminError(f"{path}: {what}. Copy or train it again.") from None
        raise AdminError(f"{path}: not a whole checkpoint ({line(error)}). Copy or train it again.") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise AdminError(f"{path}: a torch file, but not a fairseq checkpoint (it has no entry 'model').")
    _refuse_malformed(path, state)
    # Not by fsdp_metadata, which fully_sharded puts into a whole checkpoint too.
    if any("flat_param" in key for key in state["model"]):
        raise sharded(path)
    return state


def _refuse_malformed(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse names and sections that are not of fairseq's kind, before anything looks into them."""
    wrong = [f"{key!r} of its model" for key in state["model"] if not isinstance(key, str)]
    sections = {name: state.get(name) for name in ("cfg", "task_state", "extra_state")}
    wrong += [f"its {name!r}" for name, value in sections.items() if value is not None and not hasattr(value, "get")]
    history = state.get("optimizer_history") or []
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        wrong.append("its 'optimizer_history'")
    if wrong:
        raise AdminError(
            f"{path}: {wrong[0]} is not what fairseq-train saves there: the file is damaged. Copy it again, or take an "
            "earlier one."
        )


def write(state: Mapping[str, Any], path: Path, check: Callable[[Path], None] = lambda written: None) -> None:
    """Save a checkpoint so that the path holds either all of it or what it held before.

    Args:
        state: the checkpoint's contents.
        path: where to save it.
        check: called with the file's path before it is renamed; if that raises, the path stays as it was.

    Raises:
        AdminError: the path is not one for a file, or the disk is full.
    """
    outputs.check(path)
    with outputs.replacing(path) as part:
        with outputs.writing(path, RuntimeError):  # torch's own, of a full disk
            torch.save(state, part)
        check(part)
