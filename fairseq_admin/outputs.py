"""What a command writes: a file whole or not at all, never over its inputs; and standard output. (No torch.)"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import AdminError, line


def check(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse, before the work and not after it, a path that cannot be written to.

    Args:
        path: the file to write.
        inputs: files that must stay as they are.

    Raises:
        AdminError: the path is not one for a file, its folder is missing or has no right to write, or it is one of the
            inputs, even under another name.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise AdminError(f"{path} is a folder or a device; a file to write was expected.")
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
    """A name to write a file or folder under. If the block ends without an error, that takes the place of `path`.

    Where `path` is a link, it takes the place of what the link leads to. Its folder is next to that, and is removed.

    Raises:
        AdminError: nothing can be written there.
    """
    target = Path(os.path.realpath(path))
    with writing(path):
        part = tempfile.mkdtemp(f".{os.getpid()}.part", f"{target.name}.", target.parent)
    try:
        yield Path(part, target.name)
        with writing(path):
            os.replace(Path(part, target.name), target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def writing(path: Path | str, *refusals: type[Exception]) -> Iterator[None]:
    """A block that writes and does nothing else, so that what the system refuses there is said of this path.

    Args:
        path: what is written.
        refusals: what a library raises in place of an OSError.

    Raises:
        AdminError: it is refused.
    """
    refused: tuple[type[Exception], ...] = (OSError, *refusals)
    try:
        yield
    except refused as error:
        reason = f"{path}: could not be written ({line(error)})"
        raise AdminError(f"{reason}. Is the disk full, or the folder not yours?") from None


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file so that the path holds either all of it or what it held before.

    Raises:
        AdminError: the path is not one for a file, or the disk is full.
    """
    check(path)
    with replacing(path) as part, writing(path):
        part.write_bytes(content)


class Unread(Exception):
    """Whoever reads standard output has read enough."""


@contextmanager
def standard_output(stream: TextIO) -> Iterator[None]:
    """A block that writes to standard output and does nothing else; it is flushed at the end.

    Args:
        stream: sys.stdout, or what it was before it was redirected.

    Raises:
        AdminError: it cannot be written, as on a full disk.
        Unread: nobody reads it any more.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        # Python will flush what is left at the end, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            raise Unread from None
        raise AdminError(f"standard output: could not be written ({line(error)}). Is the disk full?") from None
