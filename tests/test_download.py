"""Downloads under every fault; taken from a folder; held to what was recorded; and the Multi30k recipe's use of it."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil
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

from recipes.steps import lock
from recipes.steps.meter import Meter, size
from recipes.steps.table import read_table
from recipes.steps.transfer import attempt

ROOT = Path(__file__).parents[1]
NAME = "some.tgz"
QUICK = ("--timeout", 0.4, "--tries", 2, "--wait", 0.05, "--every", 0.2)


def step(*args: object) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        done = run_module("recipes.steps.download", *args, log=Path(folder) / "log")
    return subprocess.CompletedProcess([*map(str, args)], done.status, "", done.output)


def refused(done: subprocess.CompletedProcess) -> str:
    """The last line of a step that ends with what the user must mend."""
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def names(folder: Path) -> set[str]:
    """The files in a folder, without the guards."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".guard")} if folder.exists() else set()


@pytest.fixture
def archive() -> bytes:
    """Some 300 kB that do not compress, in an archive."""
    with tempfile.TemporaryDirectory() as folder:
        noise = random.Random(1).randbytes(300_000)
        return write_tar(Path(folder) / NAME, {"text": noise}).read_bytes()


@pytest.fixture
def server(tmp_path: Path, archive: bytes) -> Iterator[Server]:
    """Two mirrors of the archive, /a and /b."""
    for mirror in "ab":
        (tmp_path / "served" / mirror).mkdir(parents=True)
        (tmp_path / "served" / mirror / NAME).write_bytes(archive)
    with Server(tmp_path / "served") as serving:
        yield serving


class Site:
    """A table with one archive, and the command that gets it."""

    def __init__(self, folder: Path, server: Server, data: bytes):
        self.folder, self.server = folder, server
        self.table, self.out = folder / "table.tsv", folder / "out" / NAME
        self.lock = folder / "out/archives.lock.json"
        self.row(str(len(data)), hashlib.sha256(data).hexdigest())

    def row(self, count: str = "-", checksum: str = "-", mirrors: str = "ab") -> None:
        urls = " ".join(f"{self.server.url}/{mirror}/{NAME}" for mirror in mirrors)
        self.table.write_text(f"# A comment.\n\n{NAME}\t{count}\t{checksum}\t{urls}\n")

    @property
    def command(self) -> list[object]:
        return [NAME, "--out", self.out, "--table", self.table, *QUICK]

    def get(self, *args: object) -> subprocess.CompletedProcess:
        return step(*self.command, *args)

    def asked(self) -> list[str]:
        return [request.path[1] for request in self.server.requests]


@pytest.fixture
def site(tmp_path: Path, server: Server, archive: bytes) -> Site:
    return Site(tmp_path, server, archive)


# -- the good case ---------------------------------------------------------------------------------------------------


def test_a_download_is_checked_and_leaves_only_itself(site, archive):
    done = site.get()
    assert done.returncode == 0, done.stderr
    assert site.out.read_bytes() == archive
    assert names(site.out.parent) == {NAME}, "nothing is recorded of what the table knows"
    assert site.asked() == ["a"]
    assert "there already" in site.get().stderr and site.asked() == ["a"], "the second time, nothing is asked"


def test_a_wrong_file_in_its_place_is_fetched_again(site, archive):
    site.out.parent.mkdir()
    site.out.write_bytes(archive[:-1] + b"x")
    done = site.get()
    assert "found sha256" in done.stderr and site.out.read_bytes() == archive


def test_another_base_address(site, archive):
    assert site.get("--url", f"{site.server.url}/b/").returncode == 0
    assert site.asked() == ["b"]
    assert "'ftp://x', expected one with http://" in refused(site.get("--url", "ftp://x"))


# -- faults of the server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=404), "the server answers 404 Not Found"),
        (Fault(status=403), "the server answers 403"),
        (Fault(page=b"<!DOCTYPE html>\n<title>Log\nin</title>"), 'found an HTML page ("Log in"), expected an archive'),
        (Fault(page=b"Not found", typed="text/html"), "a page of type text/html"),
        (Fault(redirect="file:///etc/hosts"), "302 Found - Redirection to url 'file:///etc/hosts' is not allowed"),
    ],
    ids=["404", "403", "page", "other page", "redirect"],
)
def test_the_next_mirror_follows_at_once(site, archive, fault, message):
    site.server.faults = [fault]
    done = site.get()
    assert done.returncode == 0, done.stderr
    assert message in done.stderr and f"next {site.server.url}/b/" in done.stderr
    assert site.out.read_bytes() == archive and site.asked() == ["a", "b"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=503), "the server answers 503"),
        (Fault(status=429), "the server answers 429"),
        (Fault(hang=True), "no answer for 0.4 s"),
        (Fault(stall=1000), "stalled: no answer for 0.4 s"),
        (Fault(drip=1000), "stalled: "),
        (Fault(cut=1000), "broke off after 1000 of"),
    ],
    ids=["503", "429", "hang", "stall", "drip", "cut"],
)
def test_what_may_pass_is_tried_again(site, archive, fault, message):
    site.server.faults = [fault]
    # A dripping server sends 20 bytes a second: less than counts as moving.
    since = time.monotonic()
    done = site.get()
    assert time.monotonic() - since < 8, "the time-out is the one given, not a socket's own"
    assert done.returncode == 0, done.stderr
    assert message in done.stderr and "again in 0.05 s" in done.stderr
    assert site.out.read_bytes() == archive and site.asked() == ["a", "a"]


def test_all_mirrors_down_is_one_line(site):
    site.server.faults = [Fault(status=404)] + [Fault(status=503)] * 2
    message = refused(site.get())
    assert f"{site.server.url}/a/{NAME}: the server answers 404 Not Found; " in message
    assert f"{site.server.url}/b/{NAME}: the server answers 503 Service Unavailable. Run again, or" in message
    assert "give its folder with DATA=DIR" in message
    assert site.asked() == ["a", "b", "b"] and not names(site.out.parent)


def test_no_server_at_all(site):
    message = refused(site.get("--url", "http://127.0.0.1:9"))
    assert f"http://127.0.0.1:9/{NAME}: [Errno 111] Connection refused" in message
    assert "again in 0.05 s" in site.get("--url", "http://127.0.0.1:9").stderr


def test_a_wrong_checksum_goes_to_the_next_mirror_and_is_removed(site, archive):
    bad = archive[:-1] + bytes([archive[-1] ^ 1])
    (site.server.folder / "a" / NAME).write_bytes(bad)
    done = site.get()
    assert done.returncode == 0 and "found sha256" in done.stderr and site.asked() == ["a", "b"]
    assert site.out.read_bytes() == archive
    site.out.unlink()
    (site.server.folder / "b" / NAME).write_bytes(bad)
    message = refused(site.get())
    assert f"/b/{NAME}: found sha256 {hashlib.sha256(bad).hexdigest()}, expected" in message
    assert not names(site.out.parent)


def test_a_wrong_size_is_refused_before_anything_comes(site, archive):
    (site.server.folder / "a" / NAME).write_bytes(archive[:1000])
    done = site.get()
    assert f"announces 1000 bytes, expected {len(archive)}" in done.stderr and site.out.read_bytes() == archive


def test_an_md5_is_checked_and_the_sha256_recorded(site, archive):
    site.row(checksum=f"md5:{hashlib.md5(archive).hexdigest()}")
    assert site.get().returncode == 0
    found = lock.recorded(site.lock, "archives", NAME)
    assert found == {"bytes": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
    site.row(checksum=f"md5:{'0' * 32}")
    assert "found md5 " in refused(site.get())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found an empty file, expected an archive"),
        (b"  \n<html><head></head></html>", "found an HTML page, expected an archive"),
        (b"nonsense", "found b'nonsense'... at its start, expected a gzip file"),
    ],
    ids=["empty", "page", "nonsense"],
)
def test_what_is_no_archive_is_not_trusted(site, data, message):
    """A page that says it is an archive, and no checksum to see through it."""
    site.row(mirrors="a")
    (site.server.folder / "a" / NAME).write_bytes(data)
    assert message in refused(site.get())
    assert not names(site.out.parent)


def test_a_tar_is_known_by_its_mark(site, tmp_path, archive):
    tar = write_tar(tmp_path / "x.tar", {"text": b"line\n"}).read_bytes()
    (site.server.folder / "a/x.tar").write_bytes(tar)
    site.table.write_text(f"x.tar\t-\t-\t{site.server.url}/a/x.tar\n")
    assert step("x.tar", *site.command[1:]).returncode == 0
    site.out.unlink()
    (site.server.folder / "a/x.tar").write_bytes(archive)
    assert "expected a tar archive" in refused(step("x.tar", *site.command[1:], "--lock", tmp_path / "other"))


# -- going on --------------------------------------------------------------------------------------------------------


def resumed(site: Site, at: int) -> None:
    """The last request asked for the rest only."""
    rest = (site.server.folder / "a" / NAME).stat().st_size - at
    # The server may write its record after the client has the last byte.
    deadline = time.monotonic() + 5
    while site.server.requests[-1].sent != rest and time.monotonic() < deadline:
        time.sleep(0.01)
    assert site.server.requests[-1].range == f"bytes={at}-" and site.server.requests[-1].sent == rest


@pytest.mark.parametrize("etags", [True, False], ids=["ETag", "Last-Modified"])
@pytest.mark.parametrize("known", [True, False], ids=["checksum", "no checksum"])
def test_a_broken_transfer_goes_on_where_it_stopped(site, archive, etags, known):
    site.server.etags = etags
    if not known:
        site.row()
    site.server.faults = [Fault(cut=100_000)]
    assert site.get().returncode == 0
    assert site.out.read_bytes() == archive
    resumed(site, 100_000)
    assert site.server.requests[-1].if_range


def test_a_second_run_goes_on_too(site, archive):
    site.row(str(len(archive)), hashlib.sha256(archive).hexdigest(), mirrors="a")
    site.server.faults = [Fault(cut=100_000), Fault(cut=50_000)]
    assert "(150.0 kB are kept)" in refused(site.get())
    assert names(site.out.parent) == {f"{NAME}.part", f"{NAME}.part.json"}
    assert site.get().returncode == 0
    resumed(site, 150_000)
    assert names(site.out.parent) == {NAME}


def test_the_other_mirror_goes_on_if_a_checksum_will_tell(site, archive):
    site.server.faults = [Fault(cut=100_000), Fault(status=404)]
    assert site.get().returncode == 0
    assert site.asked() == ["a", "a", "b"] and site.out.read_bytes() == archive
    resumed(site, 100_000)


def test_without_a_checksum_no_two_mirrors_are_joined(site, archive):
    site.row()
    site.server.faults = [Fault(cut=100_000), Fault(status=404)]
    assert site.get().returncode == 0
    assert site.server.requests[-1].range is None and site.out.read_bytes() == archive


def test_mirrors_with_different_files_are_not_joined(site, archive):
    """The other mirror's rest does not fit the part: all comes from that mirror then."""
    (site.server.folder / "a" / NAME).write_bytes(bytes(reversed(archive)))
    site.server.faults = [Fault(cut=100_000), Fault(status=404)]
    done = site.get()
    assert "the parts of two addresses do not fit" in done.stderr
    assert done.returncode == 0 and site.out.read_bytes() == archive
    assert site.server.requests[-1].range is None and site.server.requests[-1].path[1] == "b"


@pytest.mark.parametrize("heeds", [True, False], ids=["If-Range", "no If-Range"])
def test_a_file_changed_between_two_tries_is_not_joined(site, archive, heeds):
    site.server.if_range = heeds
    # As long as before; a part of the old joined with the rest of this one would be a sound gzip file.
    changed = archive[:4] + b"\x05" + archive[5:]
    site.row(mirrors="a")
    site.server.faults = [Fault(cut=100_000), Fault(cut=0)]
    refused(site.get())
    (site.server.folder / "a" / NAME).write_bytes(changed)
    assert site.get().returncode == 0
    assert site.out.read_bytes() == changed


def test_a_server_without_ranges_starts_over(site, archive):
    site.server.ranges = False
    site.server.faults = [Fault(cut=100_000)]
    assert site.get().returncode == 0
    assert site.out.read_bytes() == archive
    assert site.server.requests[1].range == "bytes=100000-"


def test_a_part_beyond_the_file_starts_over(site, archive):
    """The server has a shorter file now: it answers 416."""
    site.row(mirrors="a")
    site.server.faults = [Fault(cut=100_000), Fault(cut=0)]
    refused(site.get())
    short = gzip.compress(b"short\n", mtime=0)
    (site.server.folder / "a" / NAME).write_bytes(short)
    site.server.if_range = False
    assert site.get().returncode == 0 and site.out.read_bytes() == short


def test_a_part_of_unknown_origin_is_not_used(site, archive):
    site.out.parent.mkdir()
    (site.out.parent / f"{NAME}.part").write_bytes(b"rubbish" * 100)
    assert site.get().returncode == 0
    assert site.out.read_bytes() == archive and site.server.requests[0].range is None


def test_a_body_without_length(site, archive):
    site.server.length = False
    site.server.faults = [Fault(cut=100_000)]
    assert site.get().returncode == 0, "the table's size tells that the first was cut"
    assert site.out.read_bytes() == archive


@pytest.mark.parametrize("name", ["x.tgz", "x.tar"])
def test_a_cut_that_nothing_announces_is_noticed(site, tmp_path, name):
    """No size, no checksum, no length: the first mirror's file ends too early, in itself."""
    data = write_tar(tmp_path / name, {"text": random.Random(4).randbytes(100_000)}).read_bytes()
    for mirror, served in (("a", data[:50_000]), ("b", data)):
        (site.server.folder / mirror / name).write_bytes(served)
    urls = " ".join(f"{site.server.url}/{mirror}/{name}" for mirror in "ab")
    site.table.write_text(f"{name}\t-\t-\t{urls}\n")
    site.server.length = False
    done = step(name, *site.command[1:])
    assert done.returncode == 0 and f"/a/{name}: found a truncated or corrupt archive (" in done.stderr
    assert site.out.read_bytes() == data


def test_tries_that_bring_a_lot_do_not_count(tmp_path):
    """Cut nine times, each after more than 1 MiB; two tries without progress would be the end."""
    data = gzip.compress(random.Random(3).randbytes(12 << 20), compresslevel=1, mtime=0)
    (tmp_path / "served/a").mkdir(parents=True)
    (tmp_path / "served/a" / NAME).write_bytes(data)
    with Server(tmp_path / "served") as server:
        site = Site(tmp_path, server, data)
        server.faults = [Fault(cut=1_100_000)] * 9
        assert site.get().returncode == 0 and site.out.read_bytes() == data
        starts = [int((request.range or "bytes=0-")[6:-1]) for request in server.requests]
        assert starts == [1_100_000 * n for n in range(10)]


@pytest.mark.parametrize("seed", range(3))
def test_killed_anywhere_it_goes_on(site, archive, start, tmp_path, seed):
    """SIGKILL after a random number of bytes; the second run asks for the rest, and is sent no byte more."""
    site.server.block, site.server.pause = 4096, 0.005
    log = tmp_path / "log"
    process = start("recipes.steps.download", *site.command, log=log)
    part = site.out.parent / f"{NAME}.part"
    goal = random.Random(seed).randrange(10_000, 200_000)
    deadline = time.monotonic() + 60
    while not part.is_file() or part.stat().st_size < goal:
        assert process.is_alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert not site.out.exists()
    have = part.stat().st_size
    site.server.pause = 0.0
    assert site.get().returncode == 0
    assert site.out.read_bytes() == archive
    resumed(site, have)


def test_two_at_once_download_once(site, archive, start, tmp_path):
    site.server.block, site.server.pause = 8192, 0.01
    processes = [start("recipes.steps.download", *site.command, log=tmp_path / f"log{n}") for n in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert site.asked() == ["a"] and site.out.read_bytes() == archive


# -- trust on first use ----------------------------------------------------------------------------------------------


def test_the_first_download_is_recorded_and_held(site, archive):
    site.row()
    done = site.get()
    digest = hashlib.sha256(archive).hexdigest()
    assert f"{NAME}: SHA-256 {digest}, recorded in {site.lock}" in done.stderr
    assert json.loads(site.lock.read_text()) == {"archives": {NAME: {"bytes": len(archive), "sha256": digest}}}
    site.out.unlink()
    assert site.get().returncode == 0 and site.out.read_bytes() == archive
    site.out.unlink()
    for mirror in "ab":
        (site.server.folder / mirror / NAME).write_bytes(archive[:-1] + b"x")
    assert f"expected {digest}" in refused(site.get())
    assert not site.out.exists()


def test_what_was_recorded_stays_recorded(tmp_path):
    lock.hold(tmp_path / "lock", "lines", "x", 3)
    lock.hold(tmp_path / "lock", "lines", "x", 3)
    with pytest.raises(ValueError, match=r'x: found 4, but the first time it was 3 .*remove "x" there'):
        lock.hold(tmp_path / "lock", "lines", "x", 4)
    assert lock.recorded(tmp_path / "lock", "lines", "x") == 3


@pytest.mark.parametrize("text", ["{", "[]", '{"archives": 3}'])
def test_a_damaged_lock_is_named(site, text):
    site.row()
    site.out.parent.mkdir()
    site.lock.write_text(text)
    assert "archives.lock.json: " in refused(site.get()) and site.lock.read_text() == text


def test_records_of_many_processes_all_stay(tmp_path):
    """Twelve processes record at once; without the guard some would write over others."""
    code = "import sys; from recipes.steps.lock import *\n"
    code += "for n in range(8): hold(Path(sys.argv[1]), 's', f'{sys.argv[2]}-{n}', n)"
    path = tmp_path / "lock"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        for n in range(12)
    ]
    assert [process.wait(60) for process in running] == [0] * 12
    assert len(lock.read(path)["s"]) == 96


# -- a folder --------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_instead_and_left_alone(site, archive, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / NAME).write_bytes(archive)
    assert site.get("--data", data).returncode == 0
    assert os.path.samefile(site.out, data / NAME), "linked"
    assert names(data) == {NAME} and not site.server.requests
    site.out.unlink()
    assert (data / NAME).read_bytes() == archive


def test_a_folder_elsewhere_is_copied(site, archive, tmp_path, monkeypatch):
    from recipes.steps import download

    data = tmp_path / "data"
    data.mkdir()
    (data / NAME).write_bytes(archive)

    def elsewhere(*args: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    monkeypatch.setattr(sys, "argv", ["download", *map(str, site.command), "--data", str(data)])
    download.main()
    assert site.out.read_bytes() == archive and not os.path.samefile(site.out, data / NAME)


def test_a_folder_without_the_file_is_no_reason_to_download(site, archive, tmp_path):
    message = refused(site.get("--data", tmp_path))
    assert f"{tmp_path}/{NAME}: found no such file, expected {NAME} in {tmp_path}" in message
    (tmp_path / NAME).write_bytes(archive[:1000])
    assert f"found 1000 bytes, expected {len(archive)}. Fetch it again, or leave DATA out." in refused(
        site.get("--data", tmp_path)
    )
    assert not site.server.requests and not names(site.out.parent)
    assert (tmp_path / NAME).read_bytes() == archive[:1000]


# -- the disk --------------------------------------------------------------------------------------------------------


def test_too_little_room_is_refused_before_the_download(site, archive):
    site.row(str(10**18), hashlib.sha256(archive).hexdigest(), mirrors="a")
    site.server.length = False
    message = refused(site.get())
    assert re.search(r"found [\d.]+ [GM]B free, expected 1000000000.0 GB for some.tgz, and up to about", message)
    assert not names(site.out.parent)


def test_a_full_disk_while_writing(server, archive, tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            if self.file.tell() > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    opened = Path.open

    def fills(path: Path, mode: str = "r", **options):
        file = opened(path, mode, **options)
        return Full(file) if mode == "ab" else file

    monkeypatch.setattr(Path, "open", fills)
    with pytest.raises(ValueError, match=r"the disk is full: found .* free, expected .* more\. Make room, and run"):
        attempt(f"{server.url}/a/{NAME}", tmp_path / "part", 1, Meter(NAME, 9))
    monkeypatch.undo()
    have = (tmp_path / "part").stat().st_size
    assert 0 < have < len(archive)
    attempt(f"{server.url}/a/{NAME}", tmp_path / "part", 1, Meter(NAME, 9))
    assert (tmp_path / "part").read_bytes() == archive and server.requests[-1].range == f"bytes={have}-"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_really_full_disk(site, archive, small_disk):
    """Its length is not announced, so that the room is not checked before."""
    site.row(mirrors="a")
    site.server.length = False
    site.out = small_disk / NAME
    assert f"{small_disk}: the disk is full: found" in refused(site.get())
    assert not site.out.exists()
    site.server.length = True
    (small_disk / f"{NAME}.part").unlink()
    assert f"kB free, expected {size(len(archive))} for some.tgz" in refused(site.get())


# -- progress, table -------------------------------------------------------------------------------------------------


def test_progress_is_a_line_now_and_then(site, archive):
    site.server.block, site.server.pause = 16384, 0.05
    lines = [line for line in site.get().stderr.splitlines() if "MB/s" in line]
    assert 2 <= len(lines) <= 8
    assert re.fullmatch(r"some.tgz: 0\.\d of 0\.3 MB \(\d+ %\), \d+\.\d\d MB/s, 0:0\d left", lines[0])


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
    assert os.listdir(multi30k.raw) == ["valid.de"]
    assert "is up to date" in multi30k.download().stdout


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
    assert not multi30k.server.requests and not os.listdir(multi30k.raw)


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
