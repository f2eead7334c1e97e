"""Commands write whole files, never overwrite inputs, and report a full disk, Ctrl-C or closed pipe in one line."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import needs, one_line_error
from reference import dictionary
from test_export import two_models

from fairseq_admin import bar, cli, outputs
from fairseq_admin.checkpoints import equivalence


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two word-level models of one run."""
    path = tmp_path_factory.mktemp("models")
    two_models(path)
    return path


@pytest.fixture
def work(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models, their dictionaries, a text, and a run."""
    for name in ("run", "out"):
        (tmp_path / name).mkdir()
    for name in ("model.pt", "other.pt"):
        os.link(models / name, tmp_path / name)
    for language in ("de", "en"):
        dictionary(60).save(str(tmp_path / f"dict.{language}.txt"))
    (tmp_path / "text").write_text("w1 w2\nw3\n")
    (tmp_path / "run/train.log").write_text('{"epoch": 1, "update": 1, "nll_loss": "5", "num_updates": "9"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def refused(capsys: pytest.CaptureFixture, work: Path, command_line: str, status: int = 2) -> str:
    """Run a command that must fail, change no file and leave no new file. Returns its one-line error."""
    files = contents(work)
    err = one_line_error(capsys, *command_line.split(" "), status=status)
    assert contents(work) == files and not list(work.rglob("*.part"))
    return err


TRANSLATE = "translate model.pt text --tokenised --device cpu"
VERBS = {
    "average": "average model.pt other.pt -o out/new",
    "fold": "fold model.pt -o out/new",
    "export": "export model.pt --to ctranslate2 -o out/new",
    "translate": f"{TRANSLATE} -o out/new",
    "analyze": "analyze omega model.pt --json -o out/new",
    "report": "report run -o out/new",
}
INPUT = "would overwrite its input"


def test_standard_input_is_an_input(work: Path, capsys: pytest.CaptureFixture) -> None:
    """Otherwise `translate model.pt -o text < text` loses the text."""
    stdin = os.dup(0)
    try:
        with (work / "text").open() as text:
            os.dup2(text.fileno(), 0)
        for source in ("", " -"):
            assert INPUT in refused(capsys, work, f"translate model.pt{source} --tokenised --device cpu -o text")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def needs_engine(line: str) -> None:
    for engine in ("ctranslate2", "huggingface"):
        if engine in line:
            needs(engine)


@pytest.mark.parametrize("line", [*VERBS.values(), VERBS["export"].replace("ctranslate2", "huggingface")])
def test_a_full_disk_leaves_no_file(line: str, work: Path, capsys: pytest.CaptureFixture) -> None:
    """A full disk is one line and leaves no file. (An export fails halfway, while the engine writes the weights.)"""
    needs_engine(line)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if "export" in line else 8, limits[1]))
    try:
        message = refused(capsys, work, line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out/new" in message and "could not be written" in message


@pytest.mark.parametrize(("verb", "number"), [*((verb, signal.SIGTERM) for verb in VERBS), ("fold", signal.SIGINT)])
def test_a_signal_leaves_nothing(
    verb: str, number: int, work: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the work is done and the file is about to get its name."""
    needs_engine(VERBS[verb])
    monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), number))
    handler = signal.getsignal(signal.SIGTERM)
    assert refused(capsys, work, VERBS[verb], 130) == "fairseq-admin: interrupted.\n"
    assert signal.getsignal(signal.SIGTERM) is handler


def closed_pipe() -> int:
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("line", "stdout", "status"),
    [
        (VERBS["fold"], closed_pipe, 0),
        (TRANSLATE, closed_pipe, 0),
        ("omega model.pt", lambda: os.open("/dev/full", os.O_WRONLY), 2),
    ],
)
def test_closed_or_full_standard_output_loses_no_work(
    line: str, stdout: Callable[[], int], status: int, work: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """If stdout's reader is gone or its disk is full, no work is lost and no traceback is shown."""
    with os.fdopen(stdout(), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(line.split(" ")) == status
        print("Python flushes the rest when it exits", flush=True)
    assert "out/new" not in line or torch.load("out/new", weights_only=True)["model"]
    message = "standard output: could not be written (No space left on device). Is the disk full?"
    assert capsys.readouterr().err == (f"fairseq-admin: {message}\n" if status else "")


def test_closed_streams_lose_no_work(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a standard stream is closed, as for a daemon, a command still does its work."""
    for stream, line, status in (("stdout", "path", 0), ("stderr", VERBS["fold"], 0), ("stderr", "omega none.pt", 2)):
        with monkeypatch.context() as closed:
            closed.setattr(sys, stream, None)
            assert cli.main(line.split(" ")) == status
    assert torch.load("out/new", weights_only=True)["model"]


def test_standard_error_closed_is_no_success(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If stderr breaks in the middle of the work, the command fails and writes no file."""

    def say(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(equivalence, "log_probabilities", say)
    with pytest.raises(BrokenPipeError):
        cli.main(VERBS["fold"].split(" "))
    assert not (work / "out/new").exists()


@pytest.mark.parametrize("verb", ["average", "translate", "analyze"])
def test_a_link_stays_one(verb: str, work: Path, capsys: pytest.CaptureFixture) -> None:
    """If the output is a link, the command writes its target, new or existing, and leaves no other file.

    An existing file stays as private as it was.
    """
    suffix = ".json" if verb == "analyze" else ""
    (work / "out/old").write_text("old")
    (work / "out/old").chmod(0o600)
    for target in ("old", "new"):
        link = work / f"{target}{suffix}"
        link.symlink_to(f"out/{target}")
        assert cli.main(VERBS[verb].replace("out/new", str(link)).split(" ")) == 0, capsys.readouterr().err
        assert link.is_symlink() and link.read_bytes() != b"old"
    assert sorted(path.name for path in (work / "out").iterdir()) == ["new", "old"]
    assert (work / "out/old").stat().st_mode & 0o777 == 0o600 and not list(work.glob("*.part"))


@pytest.mark.parametrize("name", ["new", "folder/new"])
def test_the_content_is_on_the_disk_before_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power leaves no name without its content: each file is synchronised before the rename."""
    done: list[int | str] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("renamed") or replace(*paths))
    with outputs.replacing(tmp_path / name.partition("/")[0]) as part:
        file = part / "new" if "/" in name else part
        file.parent.mkdir(exist_ok=True)
        file.write_text("content")
    assert done == [(tmp_path / name).stat().st_ino, "renamed"]


@pytest.mark.parametrize("verb", ["average", "fold", "export", "translate"])
def test_long_steps_count_to_the_end(
    verb: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    needs_engine(VERBS[verb])
    monkeypatch.setattr(bar, "SECONDS", 1e-9)
    assert cli.main(VERBS[verb].split(" ")) == 0
    counted = {"average": "average", "translate": "translate"}.get(verb, "compare")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"fairseq-admin: {counted}: ")]
    assert re.search(r"\(100 %\), (\S+( \S+/s)?|\S+s/ lines), 00:00 left$", lines[-1]), lines


def test_a_line_is_translated_as_soon_as_it_ends(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Each line is translated as soon as it ends. Standard output holds translations only."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"w1 w2\n\x04")
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(TRANSLATE.replace(" text ", " ").split(" ")) == 0
    os.close(keyboard)
    out, err = capfd.readouterr()
    assert err == "fairseq-admin: type a sentence a line; Ctrl-D ends.\n"
    assert out.count("\n") == 1 and out.startswith("w")
