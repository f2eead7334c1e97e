"""Downloads under the faults that happen; and the Multi30k recipe's use of it."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import write_tar
from conftest import process
from server import Fault, Server

from recipes import recipe
from recipes.chain import Chain
from recipes.steps import download
from recipes.steps.table import read_table
from recipes.translation import Translation

ROOT = Path(__file__).parents[1]
NAME = "some.tgz"


def names(folder: Path) -> set[str]:
    """The files in a folder, without the guards."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".guard")} if folder.exists() else set()


class Site:
    """Two mirrors, /a and /b, a table with the archive on them, and what downloads it."""

    def __init__(self, folder: Path, server: Server):
        self.server, self.table, self.out = server, folder / "table.tsv", folder / "out" / NAME
        self.part = folder / f"out/{NAME}.part"
        # Some 300 kB that do not compress.
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

    def got(self, *site: str, data: bytes | None = None) -> None:
        """It must get the data and leave nothing else."""
        download.download(self.out, self.table, *site)
        assert self.out.read_bytes() == (data or self.data)
        assert names(self.out.parent) <= {NAME}

    def refused(self, *site: str) -> str:
        """What the user is told; the archive is not there."""
        with pytest.raises(ValueError) as refusal:
            download.download(self.out, self.table, *site)
        assert not self.out.exists() and "\n" not in str(refusal.value)
        return str(refusal.value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    with Server(tmp_path / "served") as serving:
        yield serving


@pytest.fixture
def site(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(download, "TIMEOUT", 0.4)
    monkeypatch.setattr(download, "RETRY", download.RETRY.new(total=1, backoff_factor=0))
    return Site(tmp_path, server)


def test_a_download_is_checked_and_leaves_only_itself(site):
    site.got()
    site.got()
    assert site.server.asked == ["a"], "the second time, nothing is asked"
    site.out.write_bytes(site.data[:-1] + b"x")
    site.got(f"{site.server.url}/b/")
    assert site.server.asked == ["a", "b"], "a wrong one is fetched again"


@pytest.mark.parametrize(
    ("faults", "said", "asked"),
    [
        ([Fault(status=404)], "404 Client Error: Not Found", ["a", "b"]),
        ([Fault(page=b"<!DOCTYPE html>")], "found 15 bytes, expected 300", ["a", "b"]),
        ([Fault(status=503)], "", ["a", "a"]),
        ([Fault(status=429)], "", ["a", "a"]),
        ([Fault(status=503)] * 2, "503 Server Error", ["a", "a", "b"]),
        ([Fault(hang=0)], "timed out", ["a", "b"]),
        ([Fault(hang=1000)], "timed out", ["a", "a 1000"]),
        ([Fault(cut=1000)], "", ["a", "a 1000"]),
        # What brings nothing more is left for the next mirror, which goes on.
        ([Fault(cut=100_000), Fault(cut=0)], "", ["a", "a 100000", "b 100000"]),
    ],
)
def test_a_fault_is_tried_again_or_the_next_mirror_asked(site, faults, said, asked, caplog):
    caplog.set_level("INFO")
    site.server.faults = faults
    site.got()
    assert said in caplog.text and site.server.asked == asked


def test_all_mirrors_down_is_one_line_and_the_next_run_goes_on(site):
    site.server.faults = [Fault(status=404)] + [Fault(status=503)] * 2
    message = site.refused()
    assert f"404 Client Error: Not Found for url: {site.server.url}/a/{NAME}; 503 Server Error" in message
    assert f"{site.server.url}/b/{NAME}. Run again, or download some.tgz yourself and give its folder with" in message
    assert not names(site.out.parent) and "Connection refused" in site.refused("http://127.0.0.1:9")
    site.server.faults = [Fault(cut=100_000), Fault(cut=75_000), Fault(cut=0), Fault(cut=1000), Fault(cut=0)]
    assert "(176000 bytes are kept)" in site.refused()
    site.got()
    assert site.server.asked[-1] == "a 176000"


def test_a_wrong_archive_goes_to_the_next_mirror_and_is_removed(site):
    bad = site.data[:-1] + bytes([site.data[-1] ^ 1])
    site.serve("a", bad)
    site.got()
    assert site.server.asked == ["a", "b"]
    site.out.unlink()
    site.serve("b", bad)
    assert f"found sha256 {hashlib.sha256(bad).hexdigest()}, expected" in site.refused() and not names(site.out.parent)


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"nonsense", b"\x1f\x8b\x08 cut"])
def test_what_is_not_an_archive_is_not_trusted(site, data):
    """Whoever has no checksum reads it to its end."""
    site.row()
    for mirror in "ab":
        site.serve(mirror, data)
    assert "found a truncated or corrupt archive (" in site.refused() and not names(site.out.parent)


def test_what_does_not_fit_is_fetched_from_the_beginning(site):
    """The part is another file's, or longer than the file: the checksum tells, or the server."""
    for part, asked in ((b"rubbish" * 100, ["a 700", "a"]), (site.data + b"x", [f"a {len(site.data) + 1}", "a"])):
        site.out.parent.mkdir(exist_ok=True)
        site.part.write_bytes(part)
        site.server.asked.clear()
        site.got()
        assert site.server.asked == asked
        site.out.unlink()


@pytest.mark.parametrize("length", [True, False])
def test_a_server_without_ranges_or_that_unpacks(site, length):
    """It starts over; and some call a .tgz a .tar with Content-Encoding, which a client may undo."""
    site.server.ranges, site.server.length, site.server.encoding = False, length, "x-gzip"
    site.server.faults = [Fault(cut=100_000)]
    site.got()
    assert site.server.asked == ["a", "a 100000"]


def test_without_a_checksum_two_versions_are_never_joined(site):
    """They have the same length; a part of the old with the rest of the new would be a sound gzip file."""
    changed = site.data[:4] + b"\x05" + site.data[5:]
    site.row()
    site.server.faults = [Fault(cut=100_000), Fault(cut=100_000)]
    assert "are kept" not in site.refused() and not names(site.out.parent)
    site.serve("a", changed)
    site.got(data=changed)


def test_two_at_once_download_once(site):
    site.server.block, site.server.pause = 8192, 0.05
    both = [process(download.download, site.out, site.table) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert [one.exitcode for one in both] == [0, 0] and site.server.asked == ["a"]


def test_an_md5_is_enough_to_go_on_with_a_part(site):
    site.row(checksum=f"md5:{hashlib.md5(site.data).hexdigest()}")
    site.server.faults = [Fault(cut=1000)]
    site.got()
    assert site.server.asked[-1] == "a 1000"


def test_too_little_room_is_refused_before_the_download(site):
    site.row(10**18, "0" * 64)
    site.server.length = False
    message = site.refused()
    assert re.search(r"found [\d.]+[kMGT]?B free, expected 1.00EB for some.tgz, and up to about 2.20EB more", message)
    assert not names(site.out.parent)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("some.tgz\tmany\t-\thttp://h/x", "expected name, bytes, checksum, addresses. Fix it."),
        ("y\t3\t-\thttp://h/y", "some.tgz: not in .*; expected one of y"),
        ("some.tgz\t3\t-\tfile:///x", "No connection adapters were found for 'file:///x'"),
    ],
)
def test_a_table_with_mistakes_is_refused(site, row, message):
    site.table.write_text(f"{row}\n")
    assert re.search(message, site.refused())


def test_our_tables_have_every_archive():
    table = read_table(ROOT / "recipes/archives.tsv")
    assert len(table) == 9 and {name for name, archive in table.items() if not archive.checksum} == {"de-en.tgz"}
    splits = ("train", "val", "test_2016_flickr")
    texts = {f"{split}.{language}" for split in splits for language in ("de", "en", "fr")}
    listed = (ROOT / "recipes/multi30k/SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in listed} == texts and all(len(line.split()[0]) == 64 for line in listed)
    table = read_table(ROOT / "recipes/multi30k/archives.tsv")
    assert {f"{text}.gz" for text in texts} == {name for name, archive in table.items() if archive.checksum}


# -- Multi30k --------------------------------------------------------------------------------------------------------

TEXT = "Ein Mann schl\u00e4ft.\n" * 50


@pytest.fixture
def multi30k(tmp_path: Path, server: Server):
    """multi30k(**settings) -> one raw text as the recipe makes it."""
    packed = gzip.compress(TEXT.encode(), mtime=0)
    (server.folder / "val.de.gz").write_bytes(packed)
    (tmp_path / "table").write_text(f"val.de.gz\t-\t{hashlib.sha256(packed).hexdigest()}\thttp://127.0.0.1:9/x\n")
    (tmp_path / "sums").write_text(f"{hashlib.sha256(TEXT.encode()).hexdigest()}  val.de\n")
    raw = tmp_path / "multi30k/raw/valid.de"

    def make(**settings: object) -> str:
        given = {"RUNS": str(tmp_path), "SUMS": f"{tmp_path}/sums", "TABLE": f"{tmp_path}/table", "PRESET": "cpu"}
        given |= {name: str(value) for name, value in settings.items()}
        Chain(Translation(recipe.read("multi30k", given)).steps()).make([raw])
        return raw.read_text(encoding="utf-8")

    return make


def test_multi30k_is_downloaded_once(multi30k, server, tmp_path):
    for _ in range(2):
        assert multi30k(URL=server.url) == TEXT
        (tmp_path / "archives/val.de.gz").unlink(missing_ok=True)
    assert len(server.asked) == 1


def test_multi30k_from_a_folder_compressed_or_plain(multi30k, server, tmp_path):
    """Compressed by whomever: the text is what has the checksum."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/val.de.gz").write_bytes(gzip.compress(TEXT.encode(), compresslevel=1))
    assert multi30k(DATA=tmp_path / "mine") == TEXT
    (tmp_path / "mine/val.de.gz").unlink()
    with pytest.raises(ValueError, match=f"{tmp_path}/mine: val.de: is not there; expected a plain file"):
        multi30k(DATA=tmp_path / "mine", SUMS=tmp_path / "table")
    (tmp_path / "mine/val.de").write_text(TEXT)
    (tmp_path / "multi30k/raw/valid.de").unlink()
    assert multi30k(DATA=tmp_path / "mine") == TEXT
    (tmp_path / "mine/val.de").write_text("another text\n")
    with pytest.raises(ValueError, match="val.de: its text has SHA-256 "):
        multi30k(DATA=tmp_path / "mine")
    assert not server.asked
