"""What commands write: never over what they read, through a link to its file, and refused before the work."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_export import two_models, words

from fairseq_admin import cli, outputs
from fairseq_admin.analysis import command
from fairseq_admin.checkpoints import averaging, equivalence
from fairseq_admin.errors import AdminError
from fairseq_admin.text.tokens import Text
from fairseq_admin.translation import pipeline, streams


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of words, of one run."""
    folder = tmp_path_factory.mktemp("models")
    two_models(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models, and in `data` what translates with them; the working directory."""
    for name in ("model.pt", "other.pt"):
        os.link(made / name, tmp_path / name)
    (tmp_path / "data" / "bin").mkdir(parents=True)
    for language in ("de", "en"):
        words(60).save(str(tmp_path / f"data/bin/dict.{language}.txt"))
    Text("de", "en").write(tmp_path / "data/text.json")
    (tmp_path / "data/codes").write_text("a b 1\n")
    (tmp_path / "data/bin/valid.de-en.de.idx").write_text("of fairseq's")
    (tmp_path / "merges").write_text("a b 1\n")
    (tmp_path / "text").write_text("w1 w2\n")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/model.bin").write_text("of CTranslate2's")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def held(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys: pytest.CaptureFixture, folder: Path, command_line: str) -> str:
    """The one line of a command that must fail with status 2, and leave every file as it is."""
    before = held(folder)
    assert cli.main(command_line.split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert held(folder) == before
    return err


TRANSLATE = "translate model.pt text --tokenised --device cpu --data data -o"


@pytest.mark.parametrize(
    "line",
    [
        f"{TRANSLATE} model.pt",
        f"{TRANSLATE} text",
        f"{TRANSLATE} data/codes",
        f"{TRANSLATE} data/text.json",
        f"{TRANSLATE} data/bin/dict.en.txt",
        f"{TRANSLATE} link",
        f"--codes merges {TRANSLATE} merges",
        "translate engine text --data data -o engine/model.bin",
        "average model.pt other.pt --data data -o data/codes",
        "fold model.pt --data data/bin -o data/text.json",
        "fold model.pt --data data/bin -o data/bin/valid.de-en.de.idx",
        "analyze omega model.pt --data data -o data/text",
    ],
)
def test_what_is_read_is_not_written_over(line: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "link").symlink_to("model.pt")
    if line.startswith("--codes"):  # after the verb
        option, value, verb, *rest = line.split(" ")
        line = " ".join([verb, *rest, option, value])
    assert "would overwrite its input" in refused(capsys, folder, line)


def test_the_text_on_standard_input_is_not_written_over(folder: Path, capsys: pytest.CaptureFixture) -> None:
    kept = os.dup(0)
    try:
        with open("text") as text:
            os.dup2(text.fileno(), 0)
        line = TRANSLATE.replace(" text ", " ")
        assert "text would overwrite its input /dev/stdin" in refused(capsys, folder, f"{line} text")
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.parametrize(
    "name",
    ["train.log", "average.pt", "checkpoints/checkpoint_last.pt", "run.json", "generate-test.txt", "fold.txt",
     "analysis/dependency.json"],
)  # fmt: skip
def test_a_report_is_not_written_over_what_it_reads(name: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "analysis").mkdir()
    loss = json.dumps({"epoch": 1, "update": 0.5, "nll_loss": "5", "num_updates": "10"})
    (run / "train.log").write_text(f"num. shared model params: 7\n{loss}\n")
    for path in ("average.pt", "checkpoints/checkpoint_last.pt"):
        os.link(folder / "model.pt", run / path)
    for path, text in (("run.json", "{}"), ("generate-test.txt", "H-0\t-1\tw1\n"), ("fold.txt", "equal\n")):
        (run / path).write_text(text)
    (run / "analysis/dependency.json").write_text(json.dumps({"what": "dependency", "stacks": {}}))
    assert "would overwrite its input" in refused(capsys, folder, f"report run -o run/{name}")


@pytest.mark.parametrize("verb", ["average model.pt other.pt", "analyze variance", TRANSLATE.removesuffix(" -o")])
def test_a_link_stays_one(verb: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    """What it leads to is written, there or not there before, and nothing else is left in either folder."""
    suffix = ".json" if verb.startswith("analyze") else ""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/old").write_text("old")
    for target in ("old", "new"):
        link = folder / f"{target}{suffix}"
        link.symlink_to(f"elsewhere/{target}")
        more = " --json" if suffix else ""
        assert cli.main(f"{verb}{more} -o {link}".split(" ")) == 0, capsys.readouterr().err
        assert link.is_symlink() and link.read_bytes() != b"old"
    assert sorted(path.name for path in (folder / "elsewhere").iterdir()) == ["new", "old"]
    assert not list(folder.glob("*.part"))


def test_a_stream_of_the_systems_is_no_output(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """As /dev/stdout is a link there; as root it would be replaced by a file."""
    with open("f", "w") as file:
        (folder / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        message = refused(capsys, folder, "average model.pt other.pt -o stdout")
    assert "stdout is one of the system's own (/proc/" in message and "a file to write was expected" in message
    assert (folder / "stdout").is_symlink()
    with pytest.raises(AdminError, match=r"/dev/stdout is one of the system's own \(/dev/stdout\); a file"):
        outputs.check(Path("/dev/stdout"))
    if os.path.isdir("/dev/shm"):
        outputs.check(Path("/dev/shm/out"))


@pytest.mark.parametrize("output", [".", "/", "", "..", "data/.."])
def test_analyze_needs_a_name(output: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert "the name of the files to write was expected" in refused(capsys, folder, f"analyze variance -o {output}")


VERBS = [
    "average model.pt other.pt -o out",
    "fold model.pt -o out",
    "analyze variance --json -o out",
    f"{TRANSLATE} out",
]


@pytest.mark.parametrize("line", VERBS)
def test_a_name_that_cannot_be_given_is_one_line(
    line: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the file of that name is another user's, in a folder where all may write."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    assert "could not be written (Operation not permitted)" in refused(capsys, folder, line)


@pytest.mark.parametrize("line", VERBS)
def test_a_folder_without_rights_is_refused_before_the_work(
    line: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Root may write anywhere, so the refusal is made here.)"""
    work: Callable = lambda *_: pytest.fail("work was begun")  # noqa: E731
    monkeypatch.setattr(averaging, "average", work)
    monkeypatch.setattr(equivalence, "build", work)
    monkeypatch.setattr(command, "_subject", work)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    assert "out.json: " in (message := refused(capsys, folder, line)) or "out: " in message
    assert "could not be written (Permission denied)" in message


def test_what_else_fails_is_not_blamed_on_the_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine, say; and what was there before stays."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (folder / "out").write_text("old")
    monkeypatch.setattr(pipeline.Pipeline, "translate", fail)
    for output in ("", " -o out"):
        with pytest.raises(OSError, match="Input/output error"):
            cli.main(f"{TRANSLATE.removesuffix(' -o')}{output}".split(" "))
    assert (folder / "out").read_text() == "old"


def test_a_text_that_cannot_be_read_is_named(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(streams, "opened", lambda path: contextlib.nullcontext((Failing(), str(path))))
    message = refused(capsys, folder, f"{TRANSLATE} out")
    assert message.startswith("fairseq-admin: text: cannot be read (Input/output error).")


@pytest.mark.parametrize("data", [".", "../bin", "bin"])
def test_the_folder_bin_by_any_name(
    data: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merges and the settings are above it."""
    monkeypatch.chdir(folder / "data" if data == "bin" else folder / "data/bin")
    out = folder / "out.pt"
    assert (
        cli.main(["average", str(folder / "model.pt"), str(folder / "other.pt"), "--data", data, "-o", str(out)]) == 0
    )
    assert {"codes", "text.json"} <= averaging.Checkpoint.read(out).text.keys()


def test_a_fault_of_ours_is_not_called_a_full_disk(tmp_path: Path) -> None:
    """A figure that cannot be drawn, say; torch alone refuses a full disk by such an error."""
    with pytest.raises(RuntimeError, match="no such colour"), outputs.writing(tmp_path):
        raise RuntimeError("no such colour")
    with pytest.raises(AdminError, match="file write failed"), outputs.writing(tmp_path, RuntimeError):
        raise RuntimeError("file write failed")
