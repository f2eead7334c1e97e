"""Downloads under every fault; taken from a folder; held to what was recorded; and the Multi30k recipe's use of it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import write_tar
from conftest import run_module
from server import Fault, Server

from recipes.steps import bar, download
from recipes.steps.table import read_table

ROOT = Path(__file__).parents[1]
NAME = "some.tgz"
QUICK = ("--timeout", 0.4, "--tries", 2, "--wait", 0.05)


def step(*args: object) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        done = run_module("recipes.steps.download", *args, log=Path(folder) / "log")
    return subprocess.CompletedProcess([*map(str, args)], done.status, "", done.output)


def refused(done: subprocess.CompletedProcess) -> str:
    """The last line of a step that ends with what the user must fix."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def names(folder: Path) -> set[str]:
    """The files in a folder, without the guards."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".guard")} if folder.exists() else set()


def noise(count: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    """Some 300 kB that do not compress, in an archive."""
    return write_tar(tmp_path / NAME, {"text": noise(300_000)}).read_bytes()


class Site:
    """Two mirrors, /a and /b, a table with the archive on them, and the command that gets it."""

    def __init__(self, folder: Path, server: Server, data: bytes, name: str = NAME):
        self.server, self.name, self.table, self.out = server, name, folder / "table.tsv", folder / "out" / name
        self.part, self.lock = folder / f"out/{name}.part", folder / "out/archives.lock.json"
        for mirror in "ab":
            self.serve(mirror, data)
        self.row(str(len(data)), hashlib.sha256(data).hexdigest())

    def serve(self, mirror: str, data: bytes) -> None:
        (self.server.folder / mirror).mkdir(parents=True, exist_ok=True)
        (self.server.folder / mirror / self.name).write_bytes(data)

    def row(self, count: str = "-", checksum: str = "-", mirrors: str = "ab") -> None:
        urls = " ".join(f"{self.server.url}/{mirror}/{self.name}" for mirror in mirrors)
        self.table.write_text(f"# A comment.\n\n{self.name}\t{count}\t{checksum}\t{urls}\n")

    @property
    def command(self) -> list[object]:
        return [self.name, "--out", self.out, "--table", self.table, *QUICK]

    def get(self, *args: object) -> subprocess.CompletedProcess:
        return step(*self.command, *args)

    def got(self, data: bytes, *args: object) -> str:
        """What it said; it must have got the data and left nothing else."""
        done = self.get(*args)
        assert done.returncode == 0, done.stderr
        assert self.out.read_bytes() == data and names(self.out.parent) <= {self.name, self.lock.name}
        return done.stderr

    def asked(self) -> list[str]:
        """The mirrors asked, each with where in the file to begin."""
        return [f"{one.path[1]} {one.range[6:-1]}" if one.range else one.path[1] for one in self.server.requests]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "served") as serving:
        yield serving


@pytest.fixture
def site(tmp_path: Path, server: Server, archive: bytes) -> Site:
    return Site(tmp_path, server, archive)


def test_a_download_is_checked_and_leaves_only_itself(site, archive):
    site.got(archive)
    assert names(site.out.parent) == {NAME}, "nothing is recorded of what the table knows"
    assert "there already" in site.got(archive) and site.asked() == ["a"], "the second time, nothing is asked"
    site.out.write_bytes(archive[:-1] + b"x")
    assert "found sha256" in site.got(archive) and site.asked() == ["a", "a"], "a wrong one is fetched again"


def test_another_base_address(site, archive):
    site.got(archive, "--url", f"{site.server.url}/b/")
    assert site.asked() == ["b"]
    assert "'ftp://x', expected one with http://" in refused(site.get("--url", "ftp://x"))


# -- faults of the server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=404), "the server answers 404 Not Found"),
        (Fault(page=b"<!DOCTYPE html>\n<title>Log\nin</title>"), 'found an HTML page ("Log in"), expected an archive'),
        (Fault(page=b"Not found", typed="text/html"), "found a page of type text/html"),
        (Fault(redirect="file:///etc/hosts"), "No connection adapters were found for 'file:///etc/hosts'"),
    ],
    ids=["404", "page", "other page", "redirect"],
)
def test_the_next_mirror_follows_at_once(site, archive, fault, message):
    site.server.faults = [fault]
    said = site.got(archive)
    assert message in said and f"next {site.server.url}/b/" in said and site.asked() == ["a", "b"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=503), "the server answers 503"),
        (Fault(status=429), "the server answers 429"),
        (Fault(hang=True), "no answer for 0.4 s"),
        (Fault(stall=1000), "stalled (no answer for 0.4 s) after 1000 of 300"),
        (Fault(drip=1000), "stalled ("),
        (Fault(cut=1000), "broke off after 1000 of 300"),
    ],
    ids=["503", "429", "hang", "stall", "drip", "cut"],
)
def test_what_may_pass_is_tried_again(site, archive, fault, message):
    """A dripping server sends 20 bytes a second: too few to count as progress."""
    site.server.faults = [fault]
    since = time.monotonic()
    said = site.got(archive)
    assert time.monotonic() - since < 8, "the time-out is the one given, not a socket's own"
    assert message in said and "again in 0.05 s" in said and [asked[0] for asked in site.asked()] == ["a", "a"]


def test_all_mirrors_down_is_one_line(site):
    site.server.faults = [Fault(status=404)] + [Fault(status=503)] * 2
    message = refused(site.get())
    assert f"{site.server.url}/a/{NAME}: the server answers 404 Not Found; " in message
    assert f"{site.server.url}/b/{NAME}: the server answers 503 Service Unavailable. Run again, or" in message
    assert "give its folder with DATA=DIR" in message
    assert site.asked() == ["a", "b", "b"] and not names(site.out.parent)
    done = site.get("--url", "http://127.0.0.1:9")
    assert f"http://127.0.0.1:9/{NAME}: [Errno 111] Connection refused. Run again" in refused(done)
    assert "again in 0.05 s" in done.stderr


def test_a_wrong_checksum_goes_to_the_next_mirror_and_is_removed(site, archive):
    bad = archive[:-1] + bytes([archive[-1] ^ 1])
    site.serve("a", bad)
    assert "found sha256" in site.got(archive) and site.asked() == ["a", "b"]
    site.out.unlink()
    site.serve("b", bad)
    message = refused(site.get())
    assert f"/b/{NAME}: found sha256 {hashlib.sha256(bad).hexdigest()}, expected" in message
    assert not names(site.out.parent)


def test_a_wrong_size_is_refused_before_anything_comes(site, archive):
    site.serve("a", archive[:1000])
    assert f"announces 1000 bytes, expected {len(archive)}" in site.got(archive)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found an empty file, expected an archive"),
        (b"  \n<html><head></head></html>", "found an HTML page, expected an archive"),
        (b"nonsense", "found b'nonsense'... at its start, expected a gzip file"),
    ],
    ids=["empty", "page", "nonsense"],
)
def test_what_is_not_an_archive_is_not_trusted(site, data, message):
    """A page that claims to be an archive, and no checksum to tell."""
    site.row(mirrors="a")
    site.serve("a", data)
    assert message in refused(site.get()) and not names(site.out.parent)


@pytest.mark.parametrize("name", ["x.tgz", "x.tar"])
def test_a_cut_that_nothing_announces_is_noticed(server, tmp_path, name):
    """No size, no checksum, no length: only the file itself shows that the first mirror's ends too early."""
    data = write_tar(tmp_path / name, {"text": noise(100_000)}).read_bytes()
    site = Site(tmp_path, server, data, name)
    site.row()
    site.serve("a", data[:50_000])
    server.length = False
    assert f"/a/{name}: found a truncated or corrupt archive (" in site.got(data)


def test_a_tar_is_known_by_its_mark(tmp_path, server, archive):
    site = Site(tmp_path, server, archive, "x.tar")
    site.row()
    assert "expected a tar archive" in refused(site.get())


def test_a_compressed_archive_stays_compressed(site, archive):
    """Some servers call a .tgz a .tar with Content-Encoding, which a client may undo."""
    site.server.encoding = "x-gzip"
    site.got(archive)


# -- going on --------------------------------------------------------------------------------------------------------


def went_on(site: Site, at: int) -> None:
    """The last request asked for the rest only, and no more was sent."""
    rest = (site.server.folder / "a" / site.name).stat().st_size - at
    # The server may write its record after the client has the last byte.
    deadline = time.monotonic() + 5
    while site.server.requests[-1].sent != rest and time.monotonic() < deadline:
        time.sleep(0.01)
    assert site.server.requests[-1].range == f"bytes={at}-" and site.server.requests[-1].sent == rest


def test_a_broken_transfer_goes_on_where_it_stopped(site, archive):
    """In the next try, on the next mirror, in the next run."""
    site.server.faults = [Fault(cut=100_000), Fault(cut=50_000), Fault(cut=25_000), Fault(cut=1000)]
    assert "(176kB are kept)" in refused(site.get())
    assert names(site.out.parent) == {f"{NAME}.part"}
    site.got(archive)
    assert site.asked() == ["a", "a 100000", "b 150000", "b 175000", "a 176000"]
    went_on(site, 176_000)


def test_what_does_not_fit_is_fetched_from_the_beginning(site, archive):
    """The part is another mirror's file, an older one, or rubbish: the checksum tells."""
    site.serve("a", bytes(reversed(archive)))
    site.server.faults = [Fault(cut=100_000), Fault(status=404)]
    assert "what was kept of it does not fit; all of it from" in site.got(archive)
    assert site.asked() == ["a", "a 100000", "b 100000", "b"]
    site.out.unlink()
    site.part.write_bytes(b"rubbish" * 100)
    site.server.requests.clear()
    site.server.faults = [Fault(), Fault(cut=100_000)]
    site.got(archive)
    assert site.asked() == ["a 700", "a", "a 100000", "b"], "a mirror is not asked for the whole again and again"


@pytest.mark.parametrize("length", [True, False], ids=["length", "no length"])
def test_a_server_without_ranges_starts_over(site, archive, length):
    site.server.ranges, site.server.length = False, length
    site.server.faults = [Fault(cut=100_000)]
    site.got(archive)
    assert site.asked() == ["a", "a 100000"]


def test_a_part_as_long_as_the_file_or_longer(site, archive):
    site.out.parent.mkdir()
    site.part.write_bytes(archive)
    site.got(archive)
    assert not site.asked(), "killed between its last byte and its check"
    site.out.unlink()
    site.part.write_bytes(archive + b"x")
    site.got(archive)
    assert site.asked() == [f"a {len(archive) + 1}", "a"]


def test_without_a_checksum_two_versions_are_never_joined(site, archive):
    """They have the same length; a part of the old with the rest of the new would be a sound gzip file."""
    changed = archive[:4] + b"\x05" + archive[5:]
    site.row()
    site.server.faults = [Fault(cut=100_000), Fault(cut=100_000), Fault(status=404)]
    assert "are kept" not in refused(site.get()) and not names(site.out.parent)
    site.serve("a", changed)
    site.got(changed)
    assert site.asked() == ["a", "a", "b", "a"]


def test_tries_that_bring_a_lot_do_not_count(tmp_path, server):
    """Cut nine times, each after more than 1 MiB; two tries without progress would be the end."""
    data = gzip.compress(noise(12 << 20), compresslevel=1, mtime=0)
    site = Site(tmp_path, server, data)
    server.faults = [Fault(cut=1_100_000)] * 9
    site.got(data)
    assert site.asked() == ["a", *(f"a {1_100_000 * n}" for n in range(1, 10))]


def test_a_bar_counts_what_was_kept(site, archive, monkeypatch, capsys):
    site.out.parent.mkdir()
    site.part.write_bytes(archive[:200_000])
    monkeypatch.setattr(bar.plain, "SECONDS", 1e-9)
    monkeypatch.setattr(sys, "argv", ["download", *map(str, site.command)])
    site.server.block = 10_000
    download.main()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{NAME}: ")]
    assert re.match(rf"{NAME}: 2\d\dk of 300kB \((6[6-9]|[789]\d) %\), ", lines[0])
    assert f"{NAME}: 300k of 300kB (100 %), " in lines[-1]


def test_a_user_may_turn_bars_off(site):
    command = [sys.executable, "-m", "recipes.steps.download", *map(str, site.command)]
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_killed_anywhere_it_goes_on(site, archive, start, tmp_path):
    """After SIGKILL, the second run asks for the rest, and is sent not a byte more."""
    site.server.block, site.server.pause = 4096, 0.005
    log = tmp_path / "log"
    process = start("recipes.steps.download", *site.command, log=log)
    deadline = time.monotonic() + 60
    while not site.part.is_file() or site.part.stat().st_size < 100_000:
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not site.out.exists()
    have = site.part.stat().st_size
    site.server.pause = 0.0
    site.got(archive)
    went_on(site, have)


def test_two_at_once_download_once(site, archive, start, tmp_path):
    """The second waits, and says for which process."""
    site.server.block, site.server.pause = 8192, 0.05
    logs = [tmp_path / f"log{n}" for n in range(2)]
    processes = [start("recipes.steps.download", *site.command, log=log) for log in logs]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert site.asked() == ["a"] and site.out.read_bytes() == archive
    said = "".join(log.read_text() for log in logs)
    first = "|".join(str(process.pid) for process in processes)
    assert re.search(rf"\.{NAME}\.guard: taken by process ({first}) on \S+ since 20", said)


# -- trust on first use ----------------------------------------------------------------------------------------------


def test_the_first_download_is_recorded_and_held(site, archive):
    site.row()
    digest = hashlib.sha256(archive).hexdigest()
    assert f"{NAME}: SHA-256 {digest}, recorded in {site.lock}" in site.got(archive)
    assert json.loads(site.lock.read_text()) == {"archives": {NAME: {"bytes": len(archive), "sha256": digest}}}
    site.out.unlink()
    site.server.faults = [Fault(cut=1000)]
    site.got(archive)
    assert site.asked()[-1] == "a 1000", "what is recorded is as good as published"
    site.out.unlink()
    for mirror in "ab":
        site.serve(mirror, archive[:-1] + b"x")
    message = refused(site.get())
    assert f"expected {digest}, recorded in {site.lock} at its first use (if this one is right, remove" in message
    assert not site.out.exists()


def test_an_md5_is_checked_and_the_sha256_recorded(site, archive):
    site.row(checksum=f"md5:{hashlib.md5(archive).hexdigest()}")
    site.got(archive)
    recorded = json.loads(site.lock.read_text())["archives"][NAME]
    assert recorded == {"bytes": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
    site.row(checksum=f"md5:{'0' * 32}")
    assert "found md5 " in refused(site.get())


# -- the disk --------------------------------------------------------------------------------------------------------


def test_too_little_room_is_refused_before_the_download(site, archive):
    site.row(str(10**18), hashlib.sha256(archive).hexdigest(), mirrors="a")
    site.server.length = False
    message = refused(site.get())
    assert re.search(r"found [\d.]+[kMGT]?B free, expected 1.00EB for some.tgz, and up to about 2.20EB more", message)
    assert not names(site.out.parent)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_while_writing(site):
    site.out.parent.mkdir()
    site.part.symlink_to("/dev/full")
    message = refused(site.get())
    assert re.search(rf"{site.out.parent}: the disk is full: found \S+B free, expected 300kB more\. Make room", message)
    assert not site.out.exists()


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x\t3", "line 1: found 2 columns, expected name, bytes, checksum, addresses"),
        ("../x\t3\t-\thttp://h/x", "the name is '../x', expected a file name"),
        ("x\tmany\t-\thttp://h/x", "bytes is 'many'"),
        ("x\t3\tabc\thttp://h/x", "the checksum is 'abc', expected 64 hex digits"),
        ("x\t3\t-\tfile:///x", "the address is 'file:///x', expected one with http://"),
        ("x\t3\t-\t", "found no address"),
        ("x\t3\t-\thttp://h/x\nx\t3\t-\thttp://h/x", "line 2: x comes twice"),
        ("y\t3\t-\thttp://h/y", "x: not in .*; expected one of y"),
    ],
)
def test_a_table_with_mistakes_is_refused(tmp_path, row, message):
    (tmp_path / "table").write_text(f"{row}\n")
    assert re.search(message, refused(step("x", "--out", tmp_path / "out/x", "--table", tmp_path / "table")))
    assert not names(tmp_path / "out")


def test_our_table_has_all_the_papers_archives():
    table = read_table(ROOT / "recipes/archives.tsv")
    assert set(table) == {
        "de-en.tgz", "dev.tgz", "test-full.tgz", "training-giga-fren.tar", "training-parallel-commoncrawl.tgz",
        "training-parallel-europarl-v7.tgz", "training-parallel-nc-v12.tgz", "training-parallel-nc-v9.tgz",
        "training-parallel-un.tgz",
    }  # fmt: skip
    assert {name for name, archive in table.items() if not (archive.checksum or "").startswith("sha256")} == {
        "de-en.tgz", "test-full.tgz",
    }  # fmt: skip
    assert len({archive.checksum for archive in table.values()}) == len(table)


# -- Multi30k --------------------------------------------------------------------------------------------------------

TEXT = "Ein Mann schl\u00e4ft.\n" * 50


class Multi30k:
    """The published layout, small, and the recipe's rule for one raw text."""

    def __init__(self, folder: Path, server: Server):
        self.folder, self.server = folder, server
        self.published = server.folder / "val.de.gz"
        self.published.write_bytes(gzip.compress(TEXT.encode(), mtime=0))
        self.sums = folder / "sums"
        self.sums.write_text(f"{hashlib.sha256(TEXT.encode()).hexdigest()}  val.de\n")
        self.raw = folder / "multi30k/raw"

    def make(self, *variables: str) -> subprocess.CompletedProcess:
        settings = [f"RUNS={self.folder}", f"SUMS={self.sums}", "PRESET=cpu", f"PYTHON={sys.executable}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(
            ["make", "-f", "recipes/multi30k/Makefile", f"{self.raw}/valid.de", *settings, *variables],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def download(self) -> subprocess.CompletedProcess:
        return self.make(f"URL={self.server.url}")


@pytest.fixture
def multi30k(tmp_path: Path) -> Iterator[Multi30k]:
    (tmp_path / "served").mkdir()
    with Server(tmp_path / "served") as server:
        yield Multi30k(tmp_path, server)


def test_multi30k_is_downloaded_and_checked(multi30k):
    done = multi30k.download()
    assert done.returncode == 0, done.stderr
    assert (multi30k.raw / "valid.de").read_text(encoding="utf-8") == TEXT
    assert names(multi30k.raw) == {"settings.json", "valid.de"}
    asked = len(multi30k.server.requests)
    assert multi30k.download().returncode == 0 and len(multi30k.server.requests) == asked, "nothing is asked again"


def test_multi30k_from_a_folder_compressed_or_plain(multi30k):
    assert multi30k.make(f"DATA={multi30k.server.folder}").returncode == 0
    (multi30k.folder / "plain").mkdir()
    (multi30k.raw / "valid.de").rename(multi30k.folder / "plain/val.de")
    assert multi30k.make(f"DATA={multi30k.folder}/plain").returncode == 0
    assert (multi30k.raw / "valid.de").read_text(encoding="utf-8") == TEXT
    (multi30k.raw / "valid.de").unlink()
    (multi30k.folder / "empty").mkdir()
    done = multi30k.make(f"DATA={multi30k.folder}/empty")
    assert done.returncode == 2 and f"{multi30k.folder}/empty: holds no val.de (of 0 files, it is empty)" in done.stderr
    assert not multi30k.server.requests and names(multi30k.raw) == {"settings.json"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-20], "found a truncated or corrupt archive"),
        (lambda data: b"not gzip", "val.de.gz: found b'not gzip'... at its start, expected a gzip file"),
        (lambda data: gzip.compress(b"another text\n"), "val.de: its text has SHA-256 "),
    ],
    ids=["truncated", "not gzip", "another text"],
)
def test_a_damaged_text_of_multi30k_is_refused_and_fetched_again(multi30k, damage, message):
    good = multi30k.published.read_bytes()
    multi30k.published.write_bytes(damage(good))
    done = multi30k.download()
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (multi30k.raw / "valid.de").exists()
    multi30k.published.write_bytes(good)
    assert multi30k.download().returncode == 0
    assert (multi30k.raw / "valid.de").read_text(encoding="utf-8") == TEXT


def test_every_published_text_has_a_checksum_and_an_address():
    splits = ("train", "val", "test_2016_flickr")
    texts = {f"{split}.{language}" for split in splits for language in ("de", "en", "fr")}
    listed = (ROOT / "recipes/multi30k/SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in listed} == texts and all(len(line.split()[0]) == 64 for line in listed)
    table = read_table(ROOT / "recipes/multi30k/archives.tsv")
    assert set(table) == {f"{text}.gz" for text in texts}
    assert all(archive.text_checked and archive.urls[0].endswith(f"/{name}") for name, archive in table.items())
