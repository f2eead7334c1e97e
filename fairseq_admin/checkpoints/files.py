"""A checkpoint's file: read without running anything in it, and written whole or not at all."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import outputs
from ..errors import AdminError, line
from ..method import clinic
from .options import plain


def allow_fairseq_globals() -> None:
    """Let torch's safe loader (weights_only, the default since torch 2.6) build what fairseq's checkpoints hold.

    These are plain containers without behaviour: option namespaces, numpy scalars and arrays (learning rates and
    losses), the placeholder fairseq broadcasts tensors with, and omegaconf's containers.
    """
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import AnyNode, DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata

    makers = [example.__reduce__()[0] for example in (numpy.float64(0), numpy.zeros(1))]
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdU"]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, _TensorPlaceholder, *makers, numpy.ndarray, numpy.dtype, *dict.fromkeys(dtypes)]
        + [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict]
        + [dict, list, str, int, float, bool, Any]
    )


def outline(path: Path) -> dict[str, Any]:
    """A fairseq checkpoint's contents, its tensors still in the file: names, shapes and types, without a value.

    (What torch wrote before 1.6 cannot be mapped, and is read whole.)

    Raises:
        AdminError: the file is missing, truncated, not a checkpoint, or holds objects that a checkpoint does not need.
    """
    if not os.path.isfile(path):
        raise AdminError(f"{path} is missing, a folder, a pipe or a device; a fairseq checkpoint (.pt) was expected.")
    with _damaged(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise ValueError("it is compressed, which torch.save does not")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise ValueError("its parts overlap, which torch.save does not do")
        return load(path, mapped=True)


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """A fairseq checkpoint's contents, on the CPU, loaded without running code that it may carry.

    Args:
        path: the file.
        mapped: leave tensors in the file until they are used.

    Raises:
        AdminError: as `outline`; or a storage is damaged.
    """
    state = outline(path)
    with _damaged(path):
        _compare_checksums(path)
        return state if mapped else load(path, mapped=False)


def load(path: Path, mapped: bool) -> dict[str, Any]:
    """As `read`, of a file that was looked at before. A checkpoint of the authors' code comes as one of ours."""
    state = torch.load(path, map_location="cpu", mmap=mapped and zipfile.is_zipfile(path), weights_only=True)
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise AdminError(f"{path}: a torch file, but not a fairseq checkpoint (it has no entry 'model').")
    for key, tensor in state["model"].items():
        plain_layout = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if not plain_layout or tensor.is_quantized or tensor.device.type != "cpu":
            raise AdminError(
                f"{path}: {key} of its model is not a plain tensor, which fairseq-train saves. Give the file that it "
                "saved."
            )
    if clinic.rename(state["model"]):
        state["args"] = argparse.Namespace(**{**plain(state.get("args")), **clinic.OPTIONS})
    return state


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """A block that reads a file; whatever is wrong with its content is one line."""
    try:
        yield
    except AdminError:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds an object of {name[1]}" if name else "is not a torch file"
        raise AdminError(
            f"{path} {what}; a fairseq checkpoint was expected. Nothing in it was run. Give a file that fairseq-train "
            "wrote, and copy it again if it is one."
        ) from None
    except Exception as error:  # on a file that is something else, the unpickler raises almost anything
        if isinstance(error, OSError) and error.filename:  # the system's, not torch's of a file cut short
            raise
        what = "not a whole checkpoint" if zipfile.is_zipfile(path) else "not a whole checkpoint, or not a torch file"
        raise AdminError(f"{path}: {what} ({line(error)}). Copy or train it again.") from None


def _compare_checksums(path: Path) -> None:
    """Compare the checksum of every storage in a file, which torch.load does not."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} does not match its checksum")


def checksums(path: Path) -> tuple[int, ...]:
    """Those of all storages, as a file's directory has them: the same for the same weights and optimizer state."""
    if not zipfile.is_zipfile(path):  # torch before 1.6
        return (zlib.crc32(path.read_bytes()),)
    with zipfile.ZipFile(path) as archive:
        return tuple(record.CRC for record in archive.infolist() if "/data/" in record.filename)


@contextmanager
def saved(state: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """Save a checkpoint next to the path; it takes the path's place when the block ends without an error.

    Args:
        state: the checkpoint's contents.
        path: where to save it; it holds either all of it or what it held before.

    Returns:
        The file, for the block to check.

    Raises:
        AdminError: the path is not one for a file, or the disk is full.
    """
    outputs.check(path)
    with outputs.replacing(path) as part:
        with outputs.writing(path, RuntimeError):  # torch's own, of a full disk
            torch.save(state, part)
        yield part


def write(state: Mapping[str, Any], path: Path) -> None:
    """Save a checkpoint by `saved`, without a check."""
    with saved(state, path):
        pass
