"""What fairseq-admin shows while it works, and how it ends before its time: signals, and streams that are closed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_export import two_models

from fairseq_admin import bar, cli, outputs
from fairseq_admin.checkpoints import averaging, equivalence
from fairseq_admin.export import ctranslate2
from fairseq_admin.translation import in_fairseq


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of words, another of the same run, and what translates with them."""
    folder = tmp_path_factory.mktemp("whole")
    some = two_models(folder)
    for language in ("de", "en"):
        some.save(str(folder / f"dict.{language}.txt"))
    (folder / "text").write_text("w1 w2\nw3\n")
    return folder


def arguments(verb: str, folder: Path, output: Path) -> list[str]:
    model, other = folder / "model.pt", folder / "other.pt"
    given = {
        "omega": [model],
        "average": [model, other, "-o", output],
        "fold": [model, "-o", output],
        "export": [model, "--to", "ctranslate2", "-o", output],
        "translate": [model, folder / "text", "--tokenised", "--device", "cpu", "-o", output],
    }
    return [verb, *map(str, given[verb])]


def stopped_by(number: int, verb: str, whole: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status of a verb that is sent a signal while it works."""

    def stop(*_: object, **__: object) -> None:
        assert verb == "average" or any(output.parent.iterdir())  # something unfinished is there
        os.kill(os.getpid(), number)
        pytest.fail("nothing has stopped it")

    if verb == "export":
        pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    place, name = {
        "average": (averaging, "_means"),
        "fold": (equivalence, "log_probabilities"),
        "export": (ctranslate2, "build"),
        "translate": (in_fairseq, "build"),
    }[verb]
    monkeypatch.setattr(place, name, stop)
    return cli.main(arguments(verb, whole, output))


@pytest.mark.parametrize("verb", ["average", "fold", "export", "translate"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_and_leaves_nothing(
    number: int, status: int, verb: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    before = signal.getsignal(signal.SIGTERM)
    assert stopped_by(number, verb, whole, tmp_path / "out", monkeypatch) == status
    out, err = capfd.readouterr()
    said = {130: "fairseq-admin: interrupted.\n", 143: "fairseq-admin: stopped by SIGTERM.\n"}
    assert (out, err) == ("", said[status])
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_during_the_imports_is_one_line(tmp_path: Path) -> None:
    """torch takes seconds to import; the command's own script then says what `main` would."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "fairseq-admin").write_text("from fairseq_admin.cli import main")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, tmp_path / "fairseq-admin"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "fairseq-admin: interrupted.\n")


@pytest.mark.parametrize("verb", ["export", "fold", "translate"])
def test_what_a_killed_run_left_is_removed(verb: str, whole: Path, tmp_path: Path) -> None:
    """Its own of this machine alone: not another output's, a living process's or another machine's."""
    if verb == "export":
        pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = outputs.platform.node()
    left = tmp_path / f"out.{host}.{dead.pid}.part"
    left.mkdir()
    (left / "model.bin").touch()
    others = [tmp_path / f"out.{host}.{os.getppid()}.part", tmp_path / f"out.elsewhere.{dead.pid}.part"]
    others += [tmp_path / f"out2.{host}.{dead.pid}.part", tmp_path / "out.part"]
    for path in others:
        path.mkdir()
    assert cli.main(arguments(verb, whole, tmp_path / "out")) == 0
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "out"])


def shell(script: str) -> subprocess.CompletedProcess:
    """A script in which `run` is fairseq-admin."""
    start = f'run() {{ {sys.executable} -m fairseq_admin.cli "$@"; }}\n'
    return subprocess.run(["bash", "-c", start + script], cwd=ROOT, capture_output=True, text=True)


def test_closed_streams_lose_no_work(whole: Path, tmp_path: Path) -> None:
    """A reader that is gone, a full disk, and streams that were never open."""
    model, folded = whole / "model.pt", tmp_path / "folded.pt"
    translate = f"run translate {model} --tokenised --device cpu"
    done = shell(
        f"run fold {model} -o {folded} | true; echo ${{PIPESTATUS[0]}}\n"
        f"run omega {model} | (exec <&-; sleep 5); echo ${{PIPESTATUS[0]}}\n"
        f"run omega {model} > /dev/full; echo $?\n"
        f"{translate} {whole / 'text'} >&-; echo $?\n"
        f"{translate} <&-; echo $?\n"
        # What is opened next gets no standard number, which libraries write to.
        f"{sys.executable} -c '"
        'from fairseq_admin import ending; ending.open_closed_streams(); print(open("setup.py").fileno() < 3)\' '
        "<&- 2>&-\n"
    )
    assert done.stdout.split() == ["0", "0", "2", "2", "2", "False"], done.stderr
    assert torch.load(folded, weights_only=True)["model"]
    told = done.stderr.splitlines()
    assert len(told) == 3, done.stderr
    assert told[0] == (
        "fairseq-admin: standard output: could not be written (No space left on device). Is the disk full?"
    )
    assert told[1] == "fairseq-admin: standard output is closed, where the translation goes. Give --output."
    assert told[2] == "fairseq-admin: standard input is closed; a text was expected there. Give a file."


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """n of N and the time left, a line each, at most one in SECONDS; a short step says nothing."""
    list(bar.each("compare", range(5), " batches"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bar, "SECONDS", 1e-9)
    list(bar.each("compare", range(5), " batches"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in lines][-5:] == [
        f"fairseq-admin: compare: {n} of 5 batches ({20 * n} %)" for n in range(1, 6)
    ]
    assert all(line.endswith(" left") for line in lines)


@pytest.mark.parametrize(
    ("verb", "counted"),
    [("average", "average: "), ("fold", "compare: "), ("export", "compare: "), ("translate", "translate: ")],
)
def test_what_takes_long_counts_to_its_end(
    verb: str, counted: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    if verb == "export":
        pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    monkeypatch.setattr(bar, "SECONDS", 1e-9)
    assert cli.main(arguments(verb, whole, tmp_path / "out")) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"fairseq-admin: {counted}")]
    assert re.search(r"\(100 %\), \S+( \S+/s)?, 00:00 left$", lines[-1]), lines


def test_translating_by_hand(whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """Is each line asked for on standard error, and are translations alone on standard output?"""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"w1 w2\n\x04")
    with os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(["translate", str(whole / "model.pt"), "--tokenised", "--device", "cpu"]) == 0
    os.close(keyboard)
    out, err = capfd.readouterr()
    assert err == "fairseq-admin: type a sentence a line; Ctrl-D ends.\n> > \n"
    assert out.count("\n") == 1 and out.startswith("w")
