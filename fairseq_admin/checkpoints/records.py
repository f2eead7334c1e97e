"""A checkpoint's weights read from its file one storage at a time, and checked as they are read.

A torch file is a zip whose records are the tensors' storages, as they lie in memory, each with a checksum. So a part of
a model can be read without the rest of it, or the optimizer's state.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import AdminError
from . import files
from .checkpoint import Checkpoint


class Entry(NamedTuple):
    """A tensor in a file: its storage (first byte, bytes, checksum), and its place there (counted in elements)."""

    start: int
    size: int
    crc: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Source:
    """A checkpoint whose weights stay on disk until asked for, and are checked against their checksums then.

    torch.load looks at no checksum, mapped or not. The file is held open: one that is replaced meanwhile is read as it
    was, and one that is written over fails its checksums.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            AdminError: what `files.read` refuses, damage, or a file in another format than torch's zip.
        """
        self.path = path
        if path.exists() and not path.is_file() and not path.is_dir():
            raise AdminError(f"{path} is a pipe or a device; a file was expected. Save what it gives to a file first.")
        # Address -> bytes of every storage, mapped from the file.
        mapped: dict[int, int] = {}

        def place(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
            if storage.nbytes():
                mapped[storage.data_ptr()] = storage.nbytes()
            return storage

        if path.is_file() and not zipfile.is_zipfile(path):
            files.read(path)  # tells what else it is
            raise AdminError(
                f"{path} is in the format of torch before 1.6, which cannot be read in parts; today's was expected. "
                "Load it and torch.save it again."
            )
        self.checkpoint = Checkpoint(files.read(path, place), path)
        try:
            self._file: BinaryIO = open(path, "rb")
            records = self._records()
        except Exception as error:  # zipfile, struct and the disk each raise their own
            raise self._damaged(f"its zip directory cannot be read: {error}") from None
        # Every record is one of the storages, so the lowest of one is the lowest of the other.
        base = min(mapped, default=0) - min(records, default=0)
        if {address - base: size for address, size in mapped.items()} != {
            at: size for at, (size, _) in records.items()
        }:
            raise self._damaged("its records are not the storages it names")
        self.entries: dict[str, Entry] = {}
        for key, tensor in self.checkpoint.weights.items():
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                start = storage.data_ptr() - base if storage.nbytes() else 0
                size, crc = records.get(start, (0, 0))
                offset = int(tensor.storage_offset())
                self.entries[key] = Entry(start, size, crc, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)
        self.checkpoint.state.pop("last_optimizer_state", None)

    def _records(self) -> dict[int, tuple[int, int]]:
        """Where in the file each storage starts, with its size in bytes and its checksum; empty ones are left out."""
        records = {}
        with zipfile.ZipFile(self._file) as archive:
            for info in archive.infolist():
                if info.filename.endswith("/data.pkl"):
                    archive.read(info)  # compares the checksum
                if "/data/" in info.filename and info.file_size:
                    self._file.seek(info.header_offset + 26)
                    name, extra = struct.unpack("<HH", self._file.read(4))
                    records[info.header_offset + 30 + name + extra] = info.file_size, info.CRC
        return records

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
            storage = torch.empty(entry.size, dtype=torch.uint8)
            memory = storage.numpy().data
            try:
                self._file.seek(entry.start)
                self._file.readinto(memory)  # type: ignore[attr-defined]
            except OSError as error:
                raise AdminError(f"{self.path}: {key} cannot be read ({error}).") from None
            if zlib.crc32(memory) != entry.crc:
                raise self._damaged(f"{key} does not match its checksum")
            storages[entry.start] = storage
        return storages[entry.start].view(entry.dtype).as_strided(entry.shape, entry.stride, entry.offset)
