"""A checkpoint's weights read from its file one storage at a time, and checked as they are read.

A torch file is a zip. Each of its records data/N is one storage: the bytes of one or more tensors as they are in
memory, with a checksum. So a part of a model can be read without the rest of it, or the optimizer's state.

torch.load(mmap=True) gives each tensor's place, as an address in the mapped file; the zip's directory gives each
record's place, size and checksum. The bytes are then read from the file, not through the mapping: mapped pages of ten
files would count as ten models in memory. (Measured on ten 60L-12L checkpoints, peak memory in models: 1.4 as here,
11.4 with every file mapped, 1.9 with every file mapped again for each eighth of the model.)
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import AdminError, line
from . import files
from .checkpoint import Checkpoint

MOVING_AVERAGES = ("ema", "ema_fp32_params")
"""Where a checkpoint's `extra_state` holds those of --store-ema: one of the weights, and that in float32."""


class Record(NamedTuple):
    """A storage in a file: its size in bytes, and its checksum."""

    size: int
    crc: int


class Entry(NamedTuple):
    """A tensor in a file: the first byte of its storage, that storage, and its place there (counted in elements)."""

    start: int
    record: Record
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Source:
    """A checkpoint whose weights stay on disk until asked for, and are checked against their checksums then.

    torch.load looks at no checksum, mapped or not. The file is held open: if it is replaced in the meantime, the old
    one is still read; if it is written over, its checksums fail.
    """

    checkpoint: Checkpoint
    """What the file says, without optimizer state and moving averages; its weights are mapped, and not checked."""
    entries: dict[str, Entry]
    """Where the weights are."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            AdminError: what `files.read` refuses, damage, or a file in a format other than torch's zip.
        """
        self.path = path
        _refuse_other_formats(path)
        mapped: dict[int, int] = {}  # address of every storage -> its size in bytes

        def note(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
            if storage.nbytes():
                mapped[storage.data_ptr()] = storage.nbytes()
            return storage

        self.checkpoint = Checkpoint(files.read(path, note), path)
        self.checkpoint.state.pop("last_optimizer_state", None)
        for name in MOVING_AVERAGES:
            (self.checkpoint.state.get("extra_state") or {}).pop(name, None)
        try:
            self._file: BinaryIO = open(path, "rb")
            records = _records(self._file)
        except Exception as error:  # zipfile, struct and the disk each raise errors of their own
            raise self._damaged(f"its zip directory cannot be read: {error}") from None
        # The lowest storage is the lowest record: so addresses become places in the file, and all must agree.
        base = min(mapped, default=0) - min(records, default=0)
        if {address - base: size for address, size in mapped.items()} != {at: it.size for at, it in records.items()}:
            raise self._damaged("its records are not the storages it names")
        self.entries = {
            key: _entry(tensor, base, records)
            for key, tensor in self.checkpoint.weights.items()
            if isinstance(tensor, Tensor)
        }

    def _damaged(self, what: str) -> AdminError:
        return AdminError(f"{self.path}: not a whole checkpoint ({what}). Copy or train it again.")

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, key: str, storages: dict[int, Tensor]) -> Tensor:
        """An entry of the model.

        Args:
            key: its name.
            storages: those of this file that have been read and may be asked for again; the entry's is added.

        Raises:
            AdminError: the disk fails, or the bytes are not those once written.
        """
        entry = self.entries[key]
        if entry.start not in storages:
            storage = torch.empty(entry.record.size, dtype=torch.uint8)
            memory = storage.numpy().data
            try:
                self._file.seek(entry.start)
                self._file.readinto(memory)  # type: ignore[attr-defined]
            except OSError as error:
                raise AdminError(f"{self.path}: {key} cannot be read ({line(error)}).") from None
            if zlib.crc32(memory) != entry.record.crc:
                raise self._damaged(f"{key} does not match its checksum")
            storages[entry.start] = storage
        return storages[entry.start].view(entry.dtype).as_strided(entry.shape, entry.stride, entry.offset)


def _refuse_other_formats(path: Path) -> None:
    """Refuse what is not a zip file."""
    files.refuse_unreadable(path)
    if not zipfile.is_zipfile(path):
        files.read(path)  # says what it is instead
        raise AdminError(
            f"{path} is in the format of torch before 1.6, which cannot be read in parts; today's was expected. "
            "Load it and torch.save it again."
        )


def _records(file: BinaryIO) -> dict[int, Record]:
    """The storages of a zip file by their first byte; empty ones are left out. The pickle's checksum is compared."""
    records = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.filename.endswith("/data.pkl"):
                archive.read(info)  # compares the checksum
            if "/data/" in info.filename and info.file_size:
                # Before a record are a header of 30 bytes, whose last four are the lengths of the next two, a name and
                # a filler.
                file.seek(info.header_offset + 26)
                name, filler = struct.unpack("<HH", file.read(4))
                records[info.header_offset + 30 + name + filler] = Record(info.file_size, info.CRC)
    return records


def _entry(tensor: Tensor, base: int, records: dict[int, Record]) -> Entry:
    """A mapped tensor's place in the file, which is mapped at the address `base`."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr() - base if storage.nbytes() else 0
    record = records.get(start, Record(0, 0))
    return Entry(start, record, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
