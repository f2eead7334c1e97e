"""The texts in an archive, streamed in one pass: .tgz, .tar.gz, .tar, one .gz, or a folder that was unpacked.

No path from an archive is written to, and no link in it is followed. A member that is itself compressed (NAME.gz) is
also found as NAME, and read as text. An archive is read to its end even if all members came earlier, because the
checksum of a gzip file is in its last eight bytes; tarfile's own stream mode for .tgz does not check it.
"""

from __future__ import annotations

import difflib
import gzip
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from recipes.steps.bar import reading
from recipes.steps.table import BLOCK, check_start

# What reading a damaged archive raises, here or where a member's text is read.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError)


class Member(NamedTuple):
    """One member's text as it streams by: read it before the next. `size` in bytes, None where compressed."""

    name: str
    text: IO[bytes]
    size: int | None


def damaged(archive: Path, error: BaseException) -> ValueError:
    return ValueError(f"{archive}: found a truncated or corrupt archive ({error}). Fetch that file again.")


def members(archive: Path, names: Sequence[str]) -> Iterator[Member]:
    """The named members, each once, in the order of the archive.

    Raises:
        ValueError: the archive is missing or not an archive; a name is missing, comes twice, or is not a file.
        DAMAGE: the archive is truncated or corrupt.
    """
    if archive.is_dir():
        return from_folder(archive, names)
    if not archive.is_file():
        raise ValueError(f"{archive}: found no such file or folder, expected an archive. Check the path.")
    try:
        check_start(str(archive), archive, archive.suffix)
    except ValueError as error:
        raise ValueError(f"{error}. Check the path, or fetch it again.") from None
    if archive.suffix == ".gz" and not archive.name.endswith(".tar.gz"):
        return from_gzip(archive, names)
    return from_tar(archive, names)


def missing(archive: Path, name: str, held: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(name, held, n=3, cutoff=0.5) or sorted(held)[:3]
    said = f"nearest {', '.join(near)}" if near else "it is empty"
    return ValueError(f"{archive}: holds no {name} (of {len(held)} files, {said}). Check the names.")


def wanted(entry: str, names: Sequence[str]) -> str | None:
    """The name, of those asked for, that an entry of the archive matches."""
    plain = entry[2:] if entry.startswith("./") else entry
    return next((name for name in names if name in (plain, plain.removesuffix(".gz"))), None)


def unzipped(name: str, file: IO[bytes]) -> IO[bytes]:
    """The text of a file that is compressed if its name says so."""
    return gzip.GzipFile(fileobj=file, mode="rb") if name.endswith(".gz") else file  # type: ignore[return-value]


def drain(file: IO[bytes]) -> None:
    while file.read(BLOCK):
        pass


def check_whole(where: str, path: Path, kind: str) -> None:
    """Read a file to its end, where no checksum shows whether it is whole.

    Args:
        where: what to call it in a message.
        kind: the ending of its name: .tgz, .gz or .tar; others are not checked.

    Raises:
        ValueError: it is truncated or corrupt; the message has no full stop.
    """
    try:
        with path.open("rb") as raw:
            if kind in (".tgz", ".gz"):
                drain(gzip.GzipFile(fileobj=raw, mode="rb"))  # type: ignore[arg-type]
            elif kind == ".tar":
                with tarfile.open(fileobj=raw, mode="r|") as tar:
                    for entry in tar:
                        if entry.isreg():
                            drain(tar.extractfile(entry))  # type: ignore[arg-type]
    except DAMAGE as error:
        raise ValueError(f"{where}: found a truncated or corrupt archive ({error}), expected a whole one") from None


def from_tar(archive: Path, names: Sequence[str]) -> Iterator[Member]:
    found: set[str] = set()
    held = []
    with reading(f"read {archive}", archive) as raw:
        whole = raw if archive.suffix == ".tar" else gzip.GzipFile(fileobj=raw, mode="rb")
        with tarfile.open(fileobj=whole, mode="r|", bufsize=BLOCK) as tar:  # type: ignore[call-overload]
            for entry in tar:
                if not entry.isdir():
                    held.append(entry.name)
                name = wanted(entry.name, names)
                if name is None:
                    continue
                if not entry.isreg():
                    raise ValueError(
                        f"{archive}: {entry.name} is a link or another special file, expected a plain one. "
                        "Fetch the archive again, from its publisher."
                    )
                if name in found:
                    raise ValueError(f"{archive}: {name} comes twice, expected once. Fetch it again.")
                found.add(name)
                stream = tar.extractfile(entry)
                assert stream is not None
                text = unzipped(entry.name, stream)
                yield Member(name, text, entry.size if text is stream else None)
                drain(text)
        drain(whole)  # type: ignore[arg-type]
    for name in names:
        if name not in found:
            raise missing(archive, name, held)


def from_gzip(archive: Path, names: Sequence[str]) -> Iterator[Member]:
    """A compressed text holds one member, named as the file is without .gz."""
    held = archive.name[: -len(".gz")]
    for name in names:
        if name != held:
            raise missing(archive, name, [held])
    with reading(f"read {archive}", archive) as raw:
        text = unzipped(archive.name, raw)
        yield Member(held, text, None)
        drain(text)


def unpacked(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, compressed or not.

    Raises:
        ValueError: both are there.
    """
    there = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
    if len(there) > 1:
        raise ValueError(f"{folder}: holds {name} and {name}.gz, expected one of them. Move the other away.")
    return next(iter(there), None)


def from_folder(folder: Path, names: Sequence[str]) -> Iterator[Member]:
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name}: is outside {folder}; expected a path below it. Check the names.")
        path = unpacked(folder, name)
        if path is None:
            nearby = (folder / name).parent
            files = nearby.iterdir() if nearby.is_dir() else ()
            raise missing(folder, name, [str(path.relative_to(folder)) for path in files if path.is_file()])
        with reading(f"read {path}", path) as raw:
            text = unzipped(path.name, raw)
            yield Member(name, text, path.stat().st_size if text is raw else None)
            drain(text)
