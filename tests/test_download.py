"""Downloads under realistic faults, and the Multi30k recipe's downloads."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from archives import write_tar
from conftest import names, process
from server import Fault, Server

from recipes import recipe
from recipes.steps import download
from recipes.training import Run

NAME = "some.tgz"


class Site:
    """Two mirrors, /a and /b, a table that lists the archive on both, and methods that download it."""

    def __init__(self, folder: Path, server: Server):
        self.server, self.table, self.out = server, folder / "table.tsv", folder / "out" / NAME
        # About 300 kB of incompressible data.
        self.data = write_tar(folder / NAME, {"text": random.Random(1).randbytes(300_000)}).read_bytes()
        self.serve("a", self.data)
        self.serve("b", self.data)
        self.row(len(self.data), hashlib.sha256(self.data).hexdigest())

    def serve(self, mirror: str, data: bytes) -> None:
        (self.server.folder / mirror).mkdir(parents=True, exist_ok=True)
        (self.server.folder / mirror / NAME).write_bytes(data)

    def row(self, count: object = "-", checksum: str = "-") -> None:
        urls = " ".join(f"{self.server.url}/{mirror}/{NAME}" for mirror in "ab")
        self.table.write_text(f"# A comment.\n\n{NAME}\t{count}\t{checksum}\t{urls}\n")

    def got(self, data: bytes | None = None) -> None:
        """Download, and check that the data is right and no other file is left."""
        download.download(self.out, self.table)
        assert self.out.read_bytes() == (data or self.data)
        assert names(self.out.parent) <= {NAME}

    def refused(self) -> str:
        """Try to download. Returns the error, and checks that the archive is absent."""
        with pytest.raises(ValueError) as refusal:
            download.download(self.out, self.table)
        assert not self.out.exists() and "\n" not in str(refusal.value)
        return str(refusal.value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    with Server(tmp_path / "served") as serving:
        yield serving


@pytest.fixture
def site(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(download, "RETRY", download.RETRY.new(total=1, backoff_factor=0))
    return Site(tmp_path, server)


def test_a_download_is_checked_and_leaves_only_itself(site):
    site.got()
    site.got()
    assert site.server.asked == ["a"], "the second time, nothing is asked"
    site.out.write_bytes(site.data[:-1] + b"x")
    site.got()
    assert site.server.asked == ["a", "a"], "a wrong one is fetched again"


@pytest.mark.parametrize(
    ("faults", "said", "asked"),
    [
        ([Fault(status=404)], "404 Client Error: Not Found", ["a", "b"]),
        ([Fault(page=b"<!DOCTYPE html>")], "found 15 bytes, expected 300", ["a", "b"]),
        ([Fault(status=503)], "", ["a", "a"]),
        ([Fault(status=503)] * 2, "503 Server Error", ["a", "a", "b"]),
        ([Fault(hang=1000)], "fell silent after 1000 of 300", ["a", "a 1000"]),
        ([Fault(silent=True)], "timed out", ["a", "b"]),  # it is not asked again
        # If a mirror gives no more data, the next mirror continues.
        ([Fault(cut=100_000), Fault(cut=0)], "", ["a", "a 100000", "b 100000"]),
    ],
)
def test_a_fault_is_tried_again_or_the_next_mirror_asked(site, faults, said, asked, caplog, monkeypatch):
    caplog.set_level("INFO")
    if faults[0].hang > 0 or faults[0].silent:
        monkeypatch.setattr(download, "TIMEOUT", 0.4)
    site.server.faults = faults
    site.got()
    assert said in caplog.text and site.server.asked == asked


def test_all_mirrors_down_is_one_line_and_the_next_run_goes_on(site):
    site.server.faults = [Fault(status=404)] + [Fault(status=503)] * 2
    message = site.refused()
    assert f"404 Client Error: Not Found for url: {site.server.url}/a/{NAME}; 503 Server Error" in message
    assert f"{site.server.url}/b/{NAME}. Run again, or download some.tgz yourself and give its folder with" in message
    assert not names(site.out.parent)
    site.server.faults = [Fault(cut=100_000), Fault(cut=75_000), Fault(cut=0), Fault(cut=1000), Fault(cut=0)]
    assert "(176000 bytes are kept)" in site.refused()
    site.got()
    assert site.server.asked[-1] == "a 176000"


def test_a_wrong_archive_is_removed(site):
    bad = site.data[:-1] + bytes([site.data[-1] ^ 1])
    for mirror in "ab":
        site.serve(mirror, bad)
    assert f"found sha256 {hashlib.sha256(bad).hexdigest()}, expected" in site.refused() and not names(site.out.parent)
    assert site.server.asked == ["a", "b"]
    site.table.write_text(f"{NAME}\t-\t-\thttp://127.0.0.1:9/x\n")
    assert "Connection refused" in site.refused()


@pytest.mark.parametrize("length", [True, False])
def test_a_server_without_ranges_or_that_unpacks(site, length):
    """Without ranges, the download starts over. Some servers declare a .tgz a .tar with Content-Encoding."""
    site.server.ranges, site.server.length, site.server.encoding = False, length, "x-gzip"
    site.server.faults = [Fault(cut=100_000)]
    site.got()
    assert site.server.asked == ["a", "a 100000"]


def test_without_a_checksum_two_versions_are_never_joined(site):
    """Without a checksum, two versions of equal length are never joined. The mixture would be a valid gzip file."""
    changed = site.data[:4] + b"\x05" + site.data[5:]
    site.row()
    site.server.faults = [Fault(cut=100_000), Fault(cut=100_000)]
    assert "are kept" not in site.refused() and not names(site.out.parent)
    site.serve("a", changed)
    site.got(data=changed)
    site.out.unlink()
    for mirror in "ab":
        site.serve(mirror, b"<html></html>")
    assert "found a truncated or corrupt archive (" in site.refused() and not names(site.out.parent)


def test_without_a_checksum_a_download_continues_where_the_servers_file_is_of_the_same_time(site):
    """It continues in the same run and in the next. The line has the address, and where the connection broke."""
    site.row()
    site.server.dated = True
    for mirror in "ab":
        os.utime(site.server.folder / mirror / NAME, (10**9, 10**9))
    site.server.faults = [Fault(cut=50_000), Fault(cut=50_000), *[Fault(cut=0)] * 2]
    message = site.refused()
    assert (
        f"{site.server.url}/a/{NAME}: broke off after 100000 of {len(site.data)} bytes; {site.server.url}/b/" in message
    )
    assert "(100000 bytes are kept)" in message and "(" not in message.replace("(100000 bytes", "")
    site.got()
    assert site.server.asked == ["a", "a 50000", "a 100000", "b 100000", "a 100000"]
    site.out.unlink()
    changed = site.data[:4] + b"\x05" + site.data[5:]
    site.server.faults = [Fault(cut=100_000), *[Fault(cut=0)] * 2]
    site.refused()
    site.serve("a", changed)
    site.server.asked.clear()
    site.got(data=changed)
    assert site.server.asked == ["a 100000", "a"], "a changed file begins again"


def test_two_at_once_download_once(site):
    site.server.pause = 0.05
    both = [process(download.download, site.out, site.table) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0] and site.server.asked == ["a"]


def test_room_for_all_archives_and_their_text_is_checked_before_the_first_download(site, monkeypatch):
    site.row()
    with site.table.open("a") as table:
        table.write("other.tgz\t1000000000\t-\thttp://127.0.0.1:9/x\n")
    free = 4 * 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    with pytest.raises(
        ValueError, match="found 4.00GB free, expected 1.00GB for archives and about 3.50GB for the text"
    ):
        download.download(site.out, site.table, names=["some.tgz", "other.tgz"], text=3.5)
    assert not site.server.asked
    free = 5 * 10**9
    download.download(site.out, site.table, names=["some.tgz", "other.tgz"], text=3.5)
    assert site.out.exists()


def test_multi30k_is_downloaded_once_or_taken_from_a_folder(server, tmp_path):
    """Multi30k is downloaded once or read from a folder. The checksum is of the plain text."""
    text, mine, raw = "Ein Mann schl\u00e4ft.\n" * 50, tmp_path / "mine", tmp_path / "raw/valid.de"
    packed = gzip.compress(text.encode(), mtime=0)
    (server.folder / "val.de.gz").write_bytes(packed)
    row = ("val.de.gz", "-", hashlib.sha256(packed).hexdigest(), f"{server.url}/val.de.gz")
    (tmp_path / "table").write_text("\t".join(row) + "\n")
    (tmp_path / "sums").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  val.de\n")

    def made(**settings: object) -> bool:
        options = f"--sums {tmp_path}/sums --table {tmp_path}/table"
        given = {"RUNS": tmp_path, "PREPARE_ARGS": options, "PRESET": "cpu"} | settings
        source = Run(recipe.read("multi30k", {name: str(it) for name, it in given.items()})).text
        source._extract(source.recipe.file.texts["valid"], "de", raw)
        return raw.read_text(encoding="utf-8") == text

    assert made()
    mine.mkdir()
    (mine / "val.de.gz").write_bytes(gzip.compress(text.encode(), compresslevel=1))
    assert made(DATA=mine)
    (mine / "val.de.gz").write_bytes(gzip.compress(b"another text\n"))
    with pytest.raises(ValueError, match="val.de: its text has SHA-256 "):
        made(DATA=mine)
    assert len(server.asked) == 1
