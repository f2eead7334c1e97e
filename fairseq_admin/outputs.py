"""Write files and standard output. A file is written whole or not at all, and never over an input.

This file does not import torch.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import AdminError, line


def check_writable(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse a path that cannot be written, before the work begins.

    Args:
        path: the file to write.
        inputs: files that must stay as they are.

    Raises:
        AdminError: the path is a folder, a device or a read-only file, its folder is missing or not writable, or it is
            one of the inputs, even under another name.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise AdminError(f"{path} is a folder or a device; a file to write was expected.")
    if os.path.exists(path) and not os.stat(path).st_mode & 0o222:  # replacing it would need no right to write it
        raise AdminError(f"{path} is read-only; give another --output, or chmod u+w it.")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise AdminError(f"{path}: could not be written (no folder {folder}). Make it, or give another --output.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise AdminError(f"{path}: could not be written (no right to write in {folder}). Give another --output.")
    for source in inputs:
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise AdminError(f"{path} would overwrite its input {source}; give another --output.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A block that makes a new file or folder, which replaces `path` if the block ends without an error.

    If `path` is a link, the target of the link is replaced. The new file has the rights of the old one. The temporary
    folder is next to it, and is removed. The content is on the disk before it gets its name, so a loss of power cannot
    leave the name without it.

    Args:
        path: the file or folder.

    Yields:
        The temporary name to write.

    Raises:
        AdminError: the folder cannot be written.
    """
    target = Path(os.path.realpath(path))
    with writing(path):
        part = tempfile.mkdtemp(f".{os.getpid()}.part", f"{target.name}.", target.parent)
    new = Path(part, target.name)
    try:
        yield new
        with writing(path):
            sync(new)
            if target.exists():
                shutil.copymode(target, new)
            os.replace(new, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or of all files in a folder, is on the disk.

    Args:
        path: the file or folder.
    """
    for file in path.rglob("*") if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def writing(path: Path | str, *refusals: type[Exception]) -> Iterator[None]:
    """A block that only writes. A system error in the block becomes one line that names the path.

    Args:
        path: the file or folder that is written.
        refusals: errors that a library raises instead of OSError.

    Raises:
        AdminError: the system refused to write.
    """
    refused: tuple[type[Exception], ...] = (OSError, *refusals)
    try:
        yield
    except refused as error:
        reason = f"{path}: could not be written ({line(error)})"
        raise AdminError(f"{reason}. Is the disk full, or the folder not yours?") from None


def write_bytes(content: bytes, path: Path) -> None:
    """Write a whole file. If writing fails, the path keeps its old content.

    Args:
        content: the bytes.
        path: the file.

    Raises:
        AdminError: the path cannot be written, or the disk is full.
    """
    check_writable(path)
    with replacing(path) as part, writing(path):
        part.write_bytes(content)


class StdoutClosed(Exception):
    """The reader of standard output has closed it."""


@contextmanager
def standard_output(stream: TextIO) -> Iterator[None]:
    """A block that only writes to standard output. It ends with a flush.

    Args:
        stream: sys.stdout, or its value before it was redirected.

    Raises:
        AdminError: it cannot be written, as on a full disk.
        StdoutClosed: its reader has closed it.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        # Python flushes the rest when it exits, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise StdoutClosed from None
        raise AdminError(f"standard output: could not be written ({line(error)}). Is the disk full?") from None
