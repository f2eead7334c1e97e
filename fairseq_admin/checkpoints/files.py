"""A checkpoint's file: read without running anything in it, and written whole or not at all."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import stat
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import outputs
from ..errors import AdminError, line


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


def read(path: Path, mapped: bool = False) -> dict[str, Any]:
    """A fairseq checkpoint's contents, on the CPU, loaded without running code that it may carry.

    Args:
        path: the file.
        mapped: leave tensors in the file until they are used; torch before 1.6 wrote files that cannot be mapped.

    Raises:
        AdminError: the file is missing, truncated, damaged, not a checkpoint, or holds objects that a checkpoint does
            not need.
    """
    _refuse_unreadable(path)
    try:
        if zipfile.is_zipfile(path):
            _check_zip(path)
        state = load(path, mapped)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds an object of {name[1]}" if name else "is not a torch file"
        raise AdminError(
            f"{path} {what}; a fairseq checkpoint was expected. Nothing in it was run. Give a file that fairseq-train "
            "wrote, and copy it again if it is one."
        ) from None
    except Exception as error:  # on a file that is something else, the unpickler raises almost anything
        what = "not a whole checkpoint" if zipfile.is_zipfile(path) else "not a whole checkpoint, or not a torch file"
        raise AdminError(f"{path}: {what} ({line(error)}). Copy or train it again.") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise AdminError(f"{path}: a torch file, but not a fairseq checkpoint (it has no entry 'model').")
    for key, tensor in state["model"].items():
        if not (isinstance(tensor, torch.Tensor) and _is_plain(tensor)):
            raise AdminError(
                f"{path}: {key} of its model is not a plain tensor, which fairseq-train saves. Give the file that it "
                "saved."
            )
    return state


def load(path: Path, mapped: bool) -> dict[str, Any]:
    """As `read`, of a file that was read before and needs no check."""
    return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)


def _refuse_unreadable(path: Path) -> None:
    """Refuse what is not a file or cannot be opened, before its content is looked at."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise AdminError(f"{path} is a folder, a pipe or a device; a fairseq checkpoint (.pt) was expected.")
        open(path, "rb").close()
    except FileNotFoundError:
        raise AdminError(f"{path}: no such file; a fairseq checkpoint (.pt) was expected.") from None
    except OSError as error:
        raise AdminError(f"{path}: cannot be read ({error.strerror}). Check the path and its rights.") from None


def _check_zip(path: Path) -> None:
    """Compare the checksum of every storage in a file, which torch.load does not."""
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise ValueError("it is compressed, which torch.save does not")
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} does not match its checksum")


def checksums(path: Path) -> tuple[int, ...]:
    """Those of all storages, as a file's directory has them: the same for the same weights and optimizer state."""
    with zipfile.ZipFile(path) as archive:
        return tuple(record.CRC for record in archive.infolist() if "/data/" in record.filename)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values of its own: not sparse, quantised or without data."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


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
