"""Read a checkpoint's file without running code in it, and write it whole or not at all."""

from __future__ import annotations

import argparse
import os
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

from .. import fingerprint, outputs
from ..architectures.config import plain_options
from ..errors import AdminError, line
from ..method import clinic


def allow_fairseq_globals() -> None:
    """Let torch's safe loader (weights_only, the default since torch 2.6) build the objects in fairseq's checkpoints.

    They are containers without behaviour: namespaces of options, numpy scalars and arrays (learning rates and losses;
    numpy 1 and 2 name their constructors differently), fairseq's placeholder for broadcast tensors, and omegaconf's
    containers.
    """
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import AnyNode, DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata

    scalar, array = (example.__reduce__()[0] for example in (numpy.float64(0), numpy.zeros(1)))
    makers = [
        (maker, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for maker, name in ((scalar, "scalar"), (array, "_reconstruct"))
    ]
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdU"]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, _TensorPlaceholder, *makers, numpy.ndarray, numpy.dtype, *dict.fromkeys(dtypes)]
        + [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict]
        + [dict, list, str, int, float, bool, Any]
    )


def broadcast_fingerprints() -> None:
    """Let every process get the fingerprints in a checkpoint's state dict.

    With several processes, the first one reads the checkpoint and sends it to the others. For that, fairseq copies each
    dict, without its metadata, before and after; even the first process loads the copy.
    """
    from fairseq.distributed import utils

    def with_metadata(copied: Any) -> Any:
        def copy(state: Any, tensors: Any) -> Any:
            fingerprints = fingerprint.read_fingerprints(state) if isinstance(state, dict) else None
            copy = copied(state, tensors)
            return fingerprint.with_fingerprints(copy, fingerprints) if fingerprints else copy

        return copy

    for name in ("_split_tensors_from_obj", "_put_tensors_in_obj"):
        setattr(utils, name, with_metadata(getattr(utils, name)))


ZIP, BEFORE_1_6 = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file by torch.save: today's zip, and a pickled number before torch 1.6."""

GIVE = "Give a file that fairseq-train wrote, and copy it again if it is one."


def read(path: Path) -> dict[str, Any]:
    """Load a fairseq checkpoint without running code in it.

    Tensors stay in the file until their values are used. (A file from before torch 1.6 cannot be mapped, so it is read
    at once.) The weights of the authors' code get our names.

    Args:
        path: the file.

    Returns:
        Its contents, as fairseq writes them.

    Raises:
        AdminError: the file is missing, damaged, not a checkpoint, or holds objects that no checkpoint needs.
    """
    if not os.path.isfile(path):
        raise AdminError(f"{path} is missing, a folder, a pipe or a device; a fairseq checkpoint (.pt) was expected.")
    with path.open("rb") as file:
        start = file.read(len(BEFORE_1_6))
    zipped = start.startswith(ZIP)
    if not zipped and start != BEFORE_1_6:
        raise AdminError(f"{path} is not a checkpoint; a file that torch.save wrote (.pt) was expected. {GIVE}")
    try:
        if zipped:  # torch.load checks no checksums
            if not zipfile.is_zipfile(path):
                raise ValueError("its end is missing")
            with zipfile.ZipFile(path) as archive:
                if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
                    raise ValueError("it is compressed, or its parts overlap")
                if changed := archive.testzip():
                    raise ValueError(f"{changed} does not match its checksum")
        state = torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    except Exception as error:  # the unpickler raises almost anything on damaged content
        if isinstance(error, OSError) and error.filename:  # torch's OSError for a truncated file has no filename
            raise
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            message = f"holds an object of {name[1]}; a fairseq checkpoint was expected. Nothing in it was run. {GIVE}"
            raise AdminError(f"{path} {message}") from None
        raise AdminError(f"{path}: not a whole checkpoint ({line(error)}). Copy or train it again.") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise AdminError(f"{path}: a torch file, but not a fairseq checkpoint (it has no entry 'model'). {GIVE}")
    if clinic.rename(state["model"]):
        state["args"] = argparse.Namespace(**{**plain_options(state.get("args")), **clinic.OPTIONS})
    return state


def checksums(path: Path) -> tuple[int, ...]:
    """Read the checksums of all tensors from a file's directory.

    Args:
        path: a checkpoint.

    Returns:
        The checksums. They are equal for two files that hold the same weights and optimizer state.
    """
    if not zipfile.is_zipfile(path):  # torch before 1.6
        return (zlib.crc32(path.read_bytes()),)
    with zipfile.ZipFile(path) as archive:
        return tuple(record.CRC for record in archive.infolist() if "/data/" in record.filename)


@contextmanager
def saved(state: Mapping[str, object], path: Path) -> Iterator[Path]:
    """A block around a new checkpoint, which replaces `path` if the block ends without an error.

    Args:
        state: the checkpoint's contents.
        path: the file to write.

    Yields:
        The temporary file, for the block to check.

    Raises:
        AdminError: the path cannot be written, or the disk is full.
    """
    outputs.check_writable(path)
    with outputs.replacing(path) as part:
        with outputs.writing(path, RuntimeError):  # torch raises RuntimeError if the disk is full
            torch.save(state, part)
        yield part
