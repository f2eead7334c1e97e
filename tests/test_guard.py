"""Locks: one process at a time, and no half-written files left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from conftest import ROOT

from fairseq_admin import cli
from recipes import processes
from recipes.steps import guard
from recipes.steps.common import write_lines


def python(code: str, *arguments: object, stderr: int = subprocess.PIPE) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


# A recipe whose step ignores signals.
RECIPE = """
import subprocess, sys
from pathlib import Path
from recipes.processes import supervise
from recipes.steps.common import run
from recipes.steps.guard import exclusive_folder
folder, script = Path(sys.argv[1]), sys.argv[2]
def work():
    with exclusive_folder(folder):
        sys.exit(subprocess.run(["bash", "-c", script], cwd=folder).returncode)
sys.exit(supervise(lambda: run(work)))
"""
BUSY = "touch omega.json.part; mkdir bin.part; (trap '' INT TERM; echo $BASHPID; exec sleep 600) | cat"


def test_a_file_system_without_locks_has_markers(tmp_path, monkeypatch):
    """Without flock (Lustre) or a lock daemon (NFS), a marker file still admits one process at a time."""
    for number in (errno.ENOSYS, errno.ENOLCK):

        def flock(*_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)
        path = tmp_path / "run/.guard"
        marker = tmp_path / "run/.marker.guard"
        with guard.locked(path):
            message = rf"run: process {os.getpid()} on \S+ since .* \(if it is gone, remove {marker}\) is at work"
            with pytest.raises(ValueError, match=message), guard.locked(path, wait=False):
                pass
        with guard.locked(path, wait=False):
            assert marker.exists()
        assert not marker.exists()


def test_an_environment_that_is_read_only_is_used(tmp_path, monkeypatch):
    """A cluster may mount the environment read-only on its nodes. Nothing can set it up there, so no lock is needed."""

    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "ready").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(os, "open", read_only)
    guard.use_environment()


def test_a_file_that_another_node_wrote_is_waited_for(tmp_path):
    path = tmp_path / "checkpoint1.pt"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(0.3), path.touch()))
        guard.await_files([path])


# A recipe whose command saves when asked to stop, as training does.
SAVING = """
import subprocess, sys
from pathlib import Path
from recipes.processes import stream, supervise
from recipes.steps.common import run
folder = Path(sys.argv[1])
script = f"trap 'sleep 1; touch {folder}/saved; exit {sys.argv[2]}' USR2; echo in; while true; do sleep 0.1; done"
sys.exit(supervise(lambda: run(lambda: stream(["bash", "-c", script, "-"], folder / "log"))))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGUSR2, 1)])
def test_a_training_saves_before_its_recipe_ends(tmp_path, number, status):
    """The recipe ends even if the training was at its end already, or failed."""
    recipe = python(SAVING, tmp_path, status)
    assert recipe.stdout.readline() == "in\n"
    recipe.send_signal(number)
    assert recipe.communicate(timeout=60)[1].splitlines()[-1] == "Interrupted. The same command goes on from here."
    assert recipe.returncode == 130 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'KeyError: it'; echo; exit 1", "status 1: KeyError: it Its whole output: "),
        ("echo 'update 7'; kill -KILL $$", "status -9: it was killed, as the system does when memory runs out. Its "),
    ],
)
def test_a_command_that_fails_says_why_in_its_last_words(tmp_path, script, reason):
    with pytest.raises(processes.Failed, match=reason):
        processes.stream(["bash", "-c", script], tmp_path / "log")


def test_what_a_failed_command_printed_is_where_the_message_says(tmp_path):
    """The output of a command that succeeds becomes the file; that of one that fails stays as a log."""
    out = tmp_path / "at-7/generate.txt"
    with pytest.raises(processes.Failed, match=rf"ended with status 3: sorry Its whole output: {tmp_path}/at-7/gen"):
        processes.produce([sys.executable, "-c", "print('sorry'); raise SystemExit(3)"], out)
    assert (out.parent / "generate.log").read_text() == "sorry\n" and not out.exists()
    processes.produce([sys.executable, "-c", "print('H-0')"], out)
    assert [path.name for path in out.parent.iterdir()] == ["generate.txt"] and out.read_text() == "H-0\n"


def test_a_verb_that_is_asked_to_stop_stops_the_recipe(monkeypatch):
    monkeypatch.setattr(cli, "main", lambda words: cli.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        processes.plugin("analyze", "dependency")


def gone(process: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_recipe_has_its_folder_and_ends_with_all_it_started(tmp_path, number):
    folder = tmp_path / "run"
    first = python(RECIPE, folder, BUSY)
    child = int(first.stdout.readline())
    out, error = python(RECIPE, folder, "echo in").communicate(timeout=60)
    assert out == "" and error.startswith(f"{folder}: process ") and len(error.splitlines()) == 1
    assert " is at work there. Wait for its end or stop it, or write elsewhere with RUNS=." in error
    os.killpg(first.pid, number)
    _, error = first.communicate(timeout=60)
    assert gone(child)
    if number != signal.SIGKILL:
        assert (first.returncode, error) == (130, "Interrupted. The same command goes on from here.\n")
    again = python(RECIPE, folder, "ls; exit 7")
    assert again.communicate(timeout=60) == ("", "") and again.returncode == 7


def test_on_a_terminal_that_it_was_interrupted_is_a_line_of_its_own(tmp_path):
    master, terminal = os.openpty()
    recipe = python(RECIPE, tmp_path, "printf 'a bar' >&2; echo; exec sleep 600", stderr=terminal)
    recipe.stdout.readline()
    os.close(terminal)
    recipe.send_signal(signal.SIGINT)
    assert recipe.wait(timeout=60) == 130
    shown = b""
    with suppress(OSError):  # on Linux, reading fails when the other end is closed
        while more := os.read(master, 1 << 10):
            shown += more
    os.close(master)
    assert shown == b"a bar\r\nInterrupted. The same command goes on from here.\r\n"


def test_it_ends_with_the_make_above(tmp_path):
    command = [sys.executable, "-c", RECIPE, str(tmp_path), "echo $$; exec sleep 600"]
    above = python("import os, sys, subprocess; os.environ['MAKELEVEL'] = '1'; subprocess.run(sys.argv[1:])", *command)
    child = int(above.stdout.readline())
    above.kill()
    assert gone(child) and above.communicate(timeout=60)[1] == "Interrupted. The same command goes on from here.\n"


def test_it_outlives_the_shell_that_it_was_called_from(tmp_path, monkeypatch):
    """A recipe under nohup, not called by make, outlives its shell."""
    monkeypatch.delenv("MAKELEVEL", raising=False)
    command = [sys.executable, "-c", RECIPE, str(tmp_path), "echo in; sleep 1; echo out"]
    above = python("import subprocess, sys; subprocess.run(sys.argv[1:])", *command)
    above.stdout.readline()
    above.kill()
    assert above.communicate(timeout=60) == ("out\n", "")


def test_a_command_ends_when_nobody_reads_what_is_shown_of_it(tmp_path, monkeypatch):
    """If nobody reads the command's output, it ends: otherwise it would go on without a log."""

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(processes, "print", closed, raising=False)
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(BrokenPipeError):
        processes.stream([sys.executable, "-c", source], tmp_path / "log")
    assert gone(int((tmp_path / "log").read_text()))


def test_what_is_half_written_goes_and_no_file_of_the_users(tmp_path):
    """Half-written files of steps, recipes and fairseq are deleted; the user's files with similar names stay."""
    halves = ["a.txt.x_1ab9.12.part/a.txt", "train.de.host.12.part.0", "model.pt.part", "generate.txt.part",
              "checkpoints/checkpoint_1_50.pt.tmp"]  # fmt: skip
    mine = ["my.part.txt", "thesis.part", "essay.txt.part", "page.2.part", "notes/thesis.part.2/page", "weights.pt.tmp"]
    for name in (*halves, *mine, "data/bin.part/dict.txt"):
        write_lines(tmp_path / name, [])
    guard.clear(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(mine)
