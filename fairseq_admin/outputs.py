"""Files to write: refused before the work, and whole or not at all. (The standard library only.)"""

from __future__ import annotations

import errno
import glob
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import AdminError, line

SYSTEMS = re.compile(r"/(proc|sys|dev(?!/shm/))/")
"""Where the system's own files are, as the standard streams; /dev/shm is for any."""


def check(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse, before the work and not after it, a path that cannot be written to.

    Args:
        path: the file to write.
        inputs: files that must stay as they are.

    Raises:
        AdminError: the path is not one for a file, its folder is missing or has no right to write, or it is one of the
            inputs, even under another name.
    """
    if of_system := next(filter(SYSTEMS.match, _followed(path)), None):
        raise AdminError(
            f"{path} is one of the system's own ({of_system}); a file to write was expected. Give another --output "
            "(translate without one writes to standard output)."
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise AdminError(f"{path} is a folder or a device; a file to write was expected.")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise AdminError(f"{path}: could not be written (no folder {folder}). Make it, or give another --output.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))
    for source in inputs:
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise AdminError(f"{path} would overwrite its input {source}; give another --output.")


def _followed(path: Path) -> Iterator[str]:
    """The path, absolute, and what it leads to link by link."""
    place = str(path)
    for _ in range(40):  # links in a circle lead nowhere
        folder, name = os.path.split(place)
        place = os.path.join(os.path.realpath(folder), name)
        yield place
        if not os.path.islink(place):
            return
        place = os.path.join(os.path.dirname(place), os.readlink(place))


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A file or folder that is not finished, of the name of `path` in a folder of its own next to it.

    Where `path` is a link, that is next to what it leads to. The folder is removed at the end. It names this machine
    and process, so what a killed process of this machine left of the same output can be told, and is removed too.

    Raises:
        AdminError: nothing can be written there.
    """
    place = Path(os.path.realpath(path))
    host = platform.node()
    part = place.with_name(f"{place.name}.{host}.{os.getpid()}.part")
    for left in place.parent.glob(glob.escape(f"{place.name}.{host}.") + "*.part"):
        if left == part or not _runs(left.name.split(".")[-2]):
            _remove(left)
    with writing(path):
        part.mkdir()
    try:
        yield part / place.name
    finally:
        _remove(part)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """As `unfinished`; when the block ends without an error, what it wrote takes the place of `path`."""
    with unfinished(path) as whole:
        yield whole
        take_place(whole, path)


def take_place(whole: Path, path: Path) -> None:
    """Give what is finished its name, or that of what its name leads to.

    Raises:
        AdminError: it cannot have it, as where another user's file has.
    """
    with writing(path):
        os.replace(whole, os.path.realpath(path))


@contextmanager
def writing(path: Path, *refusals: type[Exception]) -> Iterator[None]:
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
        raise _unwritable(path, line(error)) from None


def _unwritable(path: Path, reason: str) -> AdminError:
    return AdminError(f"{path}: could not be written ({reason}). Is the disk full, or the folder not yours?")


def _runs(process: str) -> bool:
    """Whether there is a process of this number; what is not a number is not ours to judge."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def _remove(path: Path) -> None:
    """Remove a file or folder if it is there; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file so that the path holds either all of it or what it held before.

    Raises:
        AdminError: the path is not one for a file, or the disk is full.
    """
    check(path)
    with replacing(path) as part, writing(path):
        part.write_bytes(content)
