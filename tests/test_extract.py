"""Texts out of archives: what fairseq's scripts keep, every fault an archive can have, and nothing half-written."""

from __future__ import annotations

import argparse
import errno
import gzip
import io
import json
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import archives
import pytest
from archives import write_tar
from conftest import run_module

from recipes.steps import extract, inputs
from recipes.steps.common import read_lines

PLAIN = ("--as", "plain")


def step(*args: object) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        done = run_module("recipes.steps.extract", *args, log=Path(folder) / "log")
    return subprocess.CompletedProcess([*map(str, args)], done.status, "", done.output)


def refused(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Path:
    return archives.make(tmp_path_factory.mktemp("papers"), pairs=120)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out/text"


def bash(script: str, **variables: object) -> str:
    """The output of a line of the published scripts."""
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", **{name: str(v) for name, v in variables.items()}}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environment, capture_output=True, check=True)
    return done.stdout.decode()


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["de", "en"])
def test_tags_are_read_as_fairseqs_script_reads_them(papers, out, tmp_path, language):
    """The reference is grep and sed, as in prepare-iwslt14.sh."""
    member = f"de-en/train.tags.de-en.{language}"
    assert step(papers / "de-en.tgz", member, "--as", "tags", "-o", out).returncode == 0
    tidy = "grep -v -e '<url>' -e '<talkid>' -e '<keywords>' | sed -E 's/<[/]?(title|description)>//g'"
    assert out.read_bytes().decode() == bash(f"tar xzOf $tgz $member | {tidy}", tgz=papers / "de-en.tgz", member=member)
    lines = read_lines(out)
    assert "Talk number 0" in lines and "TED talk: 0 & more." in lines and "" in lines
    assert not any(tag in line for line in lines for tag in ("<url>", "<talkid>", "<keywords>", "<title>"))


def test_other_metadata_stays_as_it_does_there():
    assert extract.tags("<reviewer>Anna</reviewer>") == "<reviewer>Anna</reviewer>"
    assert extract.tags("  <title>A < B</title> ") == "  A < B "
    assert extract.tags("see <url> here") is None


@pytest.mark.parametrize(
    ("archive", "member"),
    [
        ("de-en.tgz", "de-en/IWSLT14.TED.tst2010.de-en.de.xml"),
        ("test-full.tgz", "test-full/newstest2014-deen-ref.de.sgm"),
        ("test-full.tgz", "test-full/newstest2014-fren-src.en.sgm"),
    ],
)
def test_segments_are_read_as_fairseqs_script_reads_them(papers, out, archive, member):
    assert step(papers / archive, member, "--as", "segments", "-o", out, "--straight-apostrophe").returncode == 0
    script = (
        """tar xzOf $tgz $member | grep '<seg id' | sed -e 's/<seg id="[0-9]*">\\s*//g' -e 's/\\s*<[/]seg>\\s*//g' """
    )
    script += '-e "s/\u2019/\'/g"'
    assert out.read_bytes().decode() == bash(script, tgz=papers / archive, member=member)
    assert len(read_lines(out)) == archives.HELD_OUT and "Anna's R&amp;D | x" in read_lines(out)


def test_a_reference_is_what_sacrebleu_reads(papers, out, tmp_path):
    """Without the apostrophe's option: sacreBLEU's own reading of the same file, with its own code."""
    from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

    member = "test-full/newstest2014-fren-ref.fr.sgm"
    assert step(papers / "test-full.tgz", member, "--as", "segments", "-o", out).returncode == 0
    raw = tmp_path / "raw"
    raw.write_bytes(archives.contents(120)["test-full.tgz"][member])
    FakeSGMLDataset("x", data=[], description="", langpairs={})._convert_format(str(raw), str(tmp_path / "theirs"))
    # It turns every run of white space into one space, even French no-break ones; its BLEU splits at both.
    theirs = (tmp_path / "theirs").read_text(encoding="utf-8")
    assert [" ".join(line.split()) for line in read_lines(out)] == theirs.splitlines()
    assert any("\u2019" in line for line in read_lines(out))


@pytest.mark.parametrize(
    ("archive", "member"),
    [
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7.de-en.de"),
        ("training-parallel-commoncrawl.tgz", "commoncrawl.fr-en.fr"),
        ("training-parallel-un.tgz", "un/undoc.2000.fr-en.en"),
        ("dev.tgz", "dev/newstest2013.fr"),
        ("training-giga-fren.tar", "giga-fren.release2.fixed.fr"),
        ("training-giga-fren.tar", "giga-fren.release2.fixed.en.gz"),
    ],
)
def test_plain_text_comes_out_byte_by_byte(papers, out, archive, member):
    held = archives.contents(120)[archive]
    expected = held[member] if member in held and not member.endswith(".gz") else None
    if expected is None:
        expected = gzip.decompress(held[member.removesuffix(".gz") + ".gz"])
    done = step(papers / archive, member, *PLAIN, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == expected
    assert f"{expected.count(10)} lines of {member}" in done.stderr
    assert names(out.parent) == {"text"}


def test_members_come_in_the_order_they_are_named(papers, out):
    sets = ["TED.tst2012", "TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011"]
    members = [f"de-en/IWSLT14.{name}.de-en.de.xml" for name in sets]
    alone = []
    for member in members:
        assert step(papers / "de-en.tgz", member, "--as", "segments", "-o", out).returncode == 0
        alone += read_lines(out)
    assert step(papers / "de-en.tgz", *members, "--as", "segments", "-o", out).returncode == 0
    assert read_lines(out) == alone and len(set(alone)) > 50
    assert names(out.parent) == {"text"}


def test_an_unpacked_folder_will_do(papers, out, tmp_path):
    shutil.unpack_archive(papers / "training-giga-fren.tar", tmp_path / "unpacked")
    shutil.unpack_archive(papers / "dev.tgz", tmp_path / "unpacked", format="gztar")
    members = ["giga-fren.release2.fixed.en", "dev/newstest2013.en"]
    assert step(tmp_path / "unpacked", *members, *PLAIN, "-o", out).returncode == 0
    held = archives.contents(120)
    expected = gzip.decompress(held["training-giga-fren.tar"][f"{members[0]}.gz"]) + held["dev.tgz"][members[1]]
    assert out.read_bytes() == expected
    assert "is outside" in refused(step(tmp_path / "unpacked", "../secret", *PLAIN, "-o", out))


def test_archives_are_the_same_bytes_every_time(tmp_path):
    first, second = (archives.make(tmp_path / name, pairs=60) for name in "ab")
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}
    assert len(names(first)) == 9


# -- lines -----------------------------------------------------------------------------------------------------------


def one(tmp_path: Path, data: bytes, name: str = "x.tgz") -> Path:
    return write_tar(tmp_path / name, {"a/other": b"other\n", "a/text": data, "a/more": b"more\n"})


def test_crlf_is_read_as_lf_and_said(tmp_path, out):
    done = step(one(tmp_path, b"one\r\ntwo\nth\rree\r\n"), "a/text", *PLAIN, "-o", out)
    assert done.returncode == 0 and "read CRLF as LF at the end of 2 lines" in done.stderr
    assert out.read_bytes() == b"one\ntwo\nth\rree\n"


def test_a_last_line_without_newline_gets_one(tmp_path, out):
    assert step(one(tmp_path, "a\u2028b\x85\n\nlast".encode()), "a/text", "a/more", *PLAIN, "-o", out).returncode == 0
    assert read_lines(out) == ["a\u2028b\x85", "", "last", "more"]


def test_bytes_that_are_no_utf8_are_refused_or_replaced(tmp_path, out):
    archive = one(tmp_path, b"one\nf\xfcnf \xff\nthree\n")
    message = refused(step(archive, "a/text", *PLAIN, "-o", out))
    assert "x.tgz: a/text: line 2 is not UTF-8 (byte 0xfc at column 2)" in message and "--invalid replace" in message
    assert not names(out.parent)
    done = step(archive, "a/text", *PLAIN, "-o", out, "--invalid", "replace")
    assert "put U+FFFD into 1 lines" in done.stderr
    assert read_lines(out) == ["one", "f\ufffdnf \ufffd", "three"]


def test_no_two_lines_are_made_of_one(tmp_path, out):
    """A segment that continues on the next line would lose its end."""
    archive = one(tmp_path, b'<seg id="1">one</seg>\n<seg id="2">two\nmore</seg>\n')
    assert "has no </seg>, expected one per line" in refused(step(archive, "a/text", "--as", "segments", "-o", out))


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_missing_member_is_named_with_its_neighbours(papers, out):
    message = refused(step(papers / "dev.tgz", "dev/newstest2013.cs", *PLAIN, "-o", out))
    assert "dev.tgz: holds no dev/newstest2013.cs (of 6 files, nearest dev/newstest2013." in message
    assert not names(out.parent)
    message = refused(step(papers / "de-en.tgz", "de-en/README", "de-en/readme.txt", *PLAIN, "-o", out))
    assert "holds no de-en/readme.txt" in message and not names(out.parent)


def damage(data: bytes, kind: str) -> bytes:
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "without its end":
        return data[:-4]
    if kind == "checksum":
        return data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 64]) + data[middle + 64 :]


NOISE = random.Random(5).randbytes(60_000).hex().encode() + b"\n"


@pytest.mark.parametrize("kind", ["truncated", "without its end", "checksum", "corrupt"])
@pytest.mark.parametrize("shape", ["tgz", "gz", "gz in tar"])
def test_a_damaged_archive_is_refused(tmp_path, out, kind, shape):
    """The member wanted comes first, so only reading to the end can tell."""
    if shape == "gz":
        archive = tmp_path / "text.gz"
        archive.write_bytes(damage(gzip.compress(NOISE, mtime=0), kind))
    elif shape == "tgz":
        archive = write_tar(tmp_path / "x.tgz", {"text": NOISE, "more": NOISE})
        archive.write_bytes(damage(archive.read_bytes(), kind))
    else:
        archive = write_tar(tmp_path / "x.tar", {"text.gz": damage(gzip.compress(NOISE, mtime=0), kind)})
    message = refused(step(archive, "text", *PLAIN, "-o", out))
    assert f"{archive.name}: found a truncated or corrupt archive (" in message or "is not UTF-8" in message
    assert not names(out.parent)


def test_a_damaged_file_in_a_folder_is_the_one_named(tmp_path, out):
    """Not the folder, with the advice to remove it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.en").write_bytes(b"whole\n")
    (folder / "train.de.gz").write_bytes(damage(gzip.compress(NOISE, mtime=0), "truncated"))
    message = refused(step(folder, "train.en", "train.de", *PLAIN, "-o", out))
    assert message.startswith(f"{folder}/train.de.gz: found a truncated or corrupt archive (")
    assert "emove" not in message


def test_of_two_texts_of_one_name_none_is_taken(tmp_path, out):
    """The one that was edited is not the one that was compressed."""
    (tmp_path / "train.de").write_text("edited\n")
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"old\n"))
    message = refused(step(tmp_path, "train.de", *PLAIN, "-o", out))
    assert f"{tmp_path}: holds train.de and train.de.gz, expected one of them. Move the other away." in message


def test_an_archive_is_found_again_by_its_own_path(tmp_path):
    """DATA= may be the archive itself; what was recorded of it is what it is."""
    archive = write_tar(tmp_path / "texts.tgz", {"train.de": b"x\n"})
    recorded = {"texts.tgz": inputs.describe(archive)}
    assert inputs.present(recorded, archive, None) == inputs.present(recorded, tmp_path, None) == recorded
    assert inputs.present({"train.de": inputs.describe(archive)}, archive, None) == {"train.de": None}


def test_a_truncated_tar_is_refused(tmp_path, out):
    archive = write_tar(tmp_path / "x.tar", {"text": NOISE})
    archive.write_bytes(archive.read_bytes()[: len(NOISE) // 2])
    assert "x.tar: found a truncated or corrupt archive (" in refused(step(archive, "text", *PLAIN, "-o", out))
    assert not names(out.parent)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<!doctype html><title>404</title>", 'found an HTML page ("404"), expected an archive. Check the path'),
        (b"", "found an empty file, expected an archive"),
        (b"plain text\n", "at its start, expected a gzip file"),
    ],
    ids=["page", "empty", "text"],
)
def test_what_is_no_archive_is_named(tmp_path, out, data, message):
    (tmp_path / "x.tgz").write_bytes(data)
    assert message in refused(step(tmp_path / "x.tgz", "text", *PLAIN, "-o", out))
    assert not names(out.parent)


def test_a_missing_archive_is_named(tmp_path, out):
    assert "found no such file or folder" in refused(step(tmp_path / "x.tgz", "text", *PLAIN, "-o", out))


@pytest.mark.parametrize(("data", "kind"), [(b"", "plain"), (b"<url>x</url>\n", "tags"), (b"no segment\n", "segments")])
def test_an_empty_text_is_refused(tmp_path, out, data, kind):
    message = refused(step(one(tmp_path, data), "a/text", "--as", kind, "-o", out))
    assert f"a/text: no line is left of it as {kind}" in message and not names(out.parent)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_links_are_not_followed(tmp_path, out, kind):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        entry = tarfile.TarInfo("text")
        entry.type, entry.linkname = kind, "/etc/hosts"
        tar.addfile(entry)
    assert "text is a link or another special file" in refused(step(tmp_path / "x.tgz", "text", *PLAIN, "-o", out))
    assert not names(out.parent)


def test_no_path_of_an_archive_is_written(tmp_path, out):
    outside = "../../outside"
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        for name in (outside, "/tmp/absolute-outside", "text"):
            entry = tarfile.TarInfo(name)
            entry.size = 5
            tar.addfile(entry, io.BytesIO(b"text\n"))
    before = {path for path in tmp_path.rglob("*")}
    assert step(tmp_path / "x.tgz", outside, *PLAIN, "-o", out).returncode == 0
    assert {path for path in tmp_path.rglob("*")} - before == {out.parent, out}


def test_a_member_that_comes_twice_is_refused(tmp_path, out):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        for data in (b"one\n", b"two\n"):
            entry = tarfile.TarInfo("./text")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    assert "text comes twice" in refused(step(tmp_path / "x.tgz", "text", *PLAIN, "-o", out))
    assert "a member comes twice" in refused(step(tmp_path / "x.tgz", "text", "text", *PLAIN, "-o", out))


# -- the disk, kills, records ----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_really_full_disk(tmp_path, small_disk):
    archive = write_tar(tmp_path / "x.tar", {"text": NOISE * 3, "zipped.gz": gzip.compress(NOISE * 3)})
    message = refused(step(archive, "text", *PLAIN, "-o", small_disk / "text"))
    assert "expected 360kB for text. Make room" in message
    assert "the disk is full: found" in refused(step(archive, "zipped", *PLAIN, "-o", small_disk / "text"))
    assert not names(small_disk)


def test_a_write_that_fails_is_one_line(tmp_path, out, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    archive, opened = one(tmp_path, b"one\n"), Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r": Full() if mode == "wb" else opened(path, mode))
    args = argparse.Namespace(kind="plain", invalid="refuse", straight_apostrophe=False)
    with pytest.raises(ValueError, match="the disk is full: found .* free. Make room"):
        extract.extract(archive, ["a/text"], tmp_path / "part", args)


def test_killed_midway_nothing_looks_finished(tmp_path, out, start):
    """SIGKILL while it writes, then the same command again."""
    text = NOISE * 400
    archive = write_tar(tmp_path / "x.tar", {"text": text})
    command = [archive, "text", *PLAIN, "-o", out]
    process = start("recipes.steps.extract", *command, log=tmp_path / "log")
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in out.parent.glob("*")):
        assert time.monotonic() < deadline and process.is_alive(), (tmp_path / "log").read_text()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert all(name.endswith(".part") for name in names(out.parent))
    assert step(*command).returncode == 0 and out.read_bytes() == text


def test_lines_are_recorded_and_held(tmp_path, out):
    lock = tmp_path / "lock.json"
    archive = one(tmp_path, b"one\ntwo\n")
    assert step(archive, "a/text", *PLAIN, "-o", out, "--lock", lock).returncode == 0
    assert json.loads(lock.read_text()) == {"lines": {"x.tgz: a/text, plain": 2}}
    archive = one(tmp_path, b"one\n")
    out.unlink()
    done = step(archive, "a/text", *PLAIN, "-o", out, "--lock", lock)
    assert done.returncode == 2 and re.search("found 1, but the first time it was 2", done.stderr)
    assert not names(out.parent)


def test_the_text_can_be_held_to_a_checksum(tmp_path, out):
    archive = one(tmp_path, b"one\n")
    sums = tmp_path / "sums"
    sums.write_text("2c8b08da5ce60398e1f19af0e5dccc744df274b826abe585eaba68c525434806  text\n")
    assert step(archive, "a/text", *PLAIN, "-o", out, "--sums", sums).returncode == 0
    out.unlink()
    sums.write_text(f"{'0' * 64}  text\n")
    assert "its text has SHA-256 2c8b08" in refused(step(archive, "a/text", *PLAIN, "-o", out, "--sums", sums))
    assert "has no checksum of more" in refused(step(archive, "a/more", *PLAIN, "-o", out, "--sums", sums))
    assert "expected one. Extract one at a time" in refused(
        step(archive, "a/more", "a/text", *PLAIN, "-o", out, "--sums", sums)
    )
    assert not names(out.parent)
