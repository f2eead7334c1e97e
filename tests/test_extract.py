"""Extraction keeps the lines that fairseq's scripts keep, reports faulty archives, and leaves no half-written files."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import archives
import pytest
from archives import write_tar
from conftest import names

from recipes.steps.extract import extract

NOISE = bytes(range(32, 127)) * 2000 + b"\n"


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> Path:
    return archives.make(tmp_path_factory.mktemp("papers"), pairs=120)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out/text"


def refused(out: Path, archive: Path, members: list[str], **options: object) -> str:
    """The error for a faulty text. Checks that nothing is written."""
    with pytest.raises(ValueError) as refusal:
        extract(archive, members, out, **options)
    assert not names(out.parent) and "\n" not in str(refusal.value)
    return str(refusal.value)


# -- kept lines ------------------------------------------------------------------------------------------------------

TIDY = "grep -v -e '<url>' -e '<talkid>' -e '<keywords>' | sed -E 's/<[/]?(title|description)>//g'"
SEGMENTS = """grep '<seg id' | sed -e 's/<seg id="[0-9]*">\\s*//g' -e 's/\\s*<[/]seg>\\s*//g' """
STRAIGHT = SEGMENTS + """-e "s/\u2019/'/g" """


@pytest.mark.parametrize(
    ("archive", "member", "kind", "script"),
    [
        ("de-en.tgz", "de-en/train.tags.de-en.de", "tags", TIDY),
        ("de-en.tgz", "de-en/IWSLT14.TED.tst2010.de-en.de.xml", "segments", STRAIGHT),
        ("test-full.tgz", "test-full/newstest2014-fren-src.en.sgm", "segments", STRAIGHT),
        ("test-full.tgz", "test-full/newstest2014-fren-ref.fr.sgm", "segments", SEGMENTS),  # a reference stays as it is
        ("dev.tgz", "dev/newstest2013.fr", "plain", "cat"),
    ],
)
def test_texts_are_read_as_fairseqs_scripts_read_them(papers, out, archive, member, kind, script):
    """Texts equal the output of grep and sed in prepare-iwslt14.sh and prepare-wmt14en2de.sh."""
    extract(papers / archive, [member], out, kind, straight=script is STRAIGHT)
    command = ["bash", "-euo", "pipefail", "-c", f"tar xzOf {papers / archive} {member} | {script}"]
    assert out.read_bytes() == subprocess.check_output(command, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert names(out.parent) == {"text"}


def test_members_come_in_the_order_they_are_named_packed_or_not(papers, out, tmp_path):
    members = ["giga-fren.release2.fixed.fr", "giga-fren.release2.fixed.en"]
    held = archives.contents(120)["training-giga-fren.tar"]
    expected = b"".join(gzip.decompress(held[f"{member}.gz"]) for member in members)
    shutil.unpack_archive(papers / "training-giga-fren.tar", tmp_path / "unpacked")
    for archive in (papers / "training-giga-fren.tar", tmp_path / "unpacked"):
        extract(archive, members, out)
        assert out.read_bytes() == expected
        out.unlink()


# -- lines and faults ------------------------------------------------------------------------------------------------


def one(folder: Path, data: bytes) -> Path:
    return write_tar(folder / "x.tgz", {"other": b"other\n", "text": data, "more": b"more\n"})


@pytest.mark.parametrize(
    ("data", "invalid", "expected"),
    [
        (b"one\r\ntwo\nth\rree\r\n", "refuse", b"one\ntwo\nth\rree\nmore\n"),
        ("a\u2028b\x85\n\nlast".encode(), "refuse", "a\u2028b\x85\n\nlast\nmore\n".encode()),
        (b"one\nf\xfcnf \xff\n", "replace", "one\nf\ufffdnf \ufffd\nmore\n".encode()),
    ],
)
def test_lines_end_with_lf(tmp_path, out, data, invalid, expected):
    extract(one(tmp_path, data), ["text", "more"], out, invalid=invalid)
    assert out.read_bytes() == expected


@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_archive_is_refused(tmp_path, out, packed):
    """Truncated, corrupt, empty, or a web page: it is refused, even if the wanted member comes first."""
    path = write_tar(tmp_path / "x.tgz", {"text": NOISE, "more": NOISE}) if packed else tmp_path / "text.gz"
    data = path.read_bytes() if packed else gzip.compress(NOISE, mtime=0)
    middle = len(data) // 2
    corrupt = data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 64]) + data[middle + 64 :]
    changed = data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    for damaged in (data[:middle], data[:-4], changed, corrupt, b"", b"<!doctype html><title>404</title>"):
        path.write_bytes(damaged)
        message = refused(out, path, ["text"])
        assert message.startswith(f"{path}: text: ")
        assert any(said in message for said in ("truncated or corrupt archive (", "is not UTF-8", "no line is left"))


def test_an_archive_of_the_users_is_compared_with_the_table(tmp_path, out):
    archive, table = one(tmp_path, b"x\n"), tmp_path / "table"
    table.write_text(f"x.tgz\t{archive.stat().st_size + 1}\t-\thttp://x\n")
    message = refused(out, archive, ["text"], table=table)
    assert message.startswith(f"{archive}: found ") and message.endswith(". Fetch it again, or leave DATA out.")


@pytest.mark.parametrize(
    ("data", "members", "kind", "message"),
    [
        (b"x\n", ["text", "absent"], "plain", "x.tgz: absent: is not there; expected a plain file of that name"),
        (b"x\nf\xfc\n", ["text"], "plain", "x.tgz: text: line 2 is not UTF-8 (byte 0xfc at column 2)"),
        (b"no segment\n", ["text"], "segments", "text: no line is left of it as segments"),
        (b'<seg id="2">two\nmore</seg>\n', ["text"], "segments", "has no </seg>, expected one per line"),
    ],
)
def test_a_faulty_text_is_refused(tmp_path, out, data, members, kind, message):
    assert message in refused(out, one(tmp_path, data), members, kind=kind)


def test_no_link_is_followed_and_no_path_of_an_archive_written(tmp_path, out):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        for name, kind in (("link", tarfile.SYMTYPE), ("../../outside", tarfile.REGTYPE), ("text", tarfile.REGTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, "/etc/hosts", 5 * (kind == tarfile.REGTYPE)
            tar.addfile(entry, io.BytesIO(b"text\n"))
    assert "link: is not there; expected a plain file" in refused(out, tmp_path / "x.tgz", ["link"])
    before = set(tmp_path.rglob("*"))
    extract(tmp_path / "x.tgz", ["../../outside"], out)
    assert set(tmp_path.rglob("*")) - before <= {out.parent, out}
