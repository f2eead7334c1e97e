"""One process at a time, and what many of them record."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.steps import guard, lock, settings

ROOT = Path(__file__).parents[1]


def python(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_killed_holder_leaves_the_turn_and_a_new_one_is_named(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(guard, "SHORT", 0.1)
    path = tmp_path / "cell/.guard"
    code = "import sys, time; from recipes.steps.guard import *\n"
    code += "with alone(Path(sys.argv[1])): print('in', flush=True); time.sleep(float(sys.argv[2]))"
    killed = python(code, path, 600)
    assert killed.stdout.readline() == "in\n"
    killed.kill()
    killed.wait()
    with guard.alone(path):
        assert not caplog.messages, "the kernel ends a killed one's turn"
    slow = python(code, path, 0.5)
    assert slow.stdout.readline() == "in\n"
    with guard.alone(path):
        (said,) = caplog.messages
    assert said.startswith(f"{path}: taken by process {slow.pid} on ") and said.endswith(". Waiting for its end.")
    assert [file.name for file in path.parent.iterdir()] == [".guard"]
    slow.wait()


BUSY = "touch omega.json.part; mkdir bin.part; (trap '' INT TERM; echo $BASHPID; exec sleep 600) | cat"


def guarded(folder: Path, script: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "recipes.steps.guard", "--alone", str(folder), "--", "bash", "-c"]
    return subprocess.Popen(
        [*command, f"cd {folder}; {script}"], cwd=ROOT, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


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
def test_a_make_has_its_folder_and_ends_with_all_it_started(tmp_path, number):
    folder = tmp_path / "run"
    first = guarded(folder, BUSY)
    child = int(first.stdout.readline())
    out, error = guarded(folder, "echo in").communicate(timeout=60)
    assert out == "" and error.startswith(f"{folder}: process {first.pid} on ") and len(error.splitlines()) == 1
    os.killpg(first.pid, number)
    _, error = first.communicate(timeout=60)
    assert gone(child)
    if number != signal.SIGKILL:
        assert (first.returncode, error) == (128 + number, "Interrupted. The same command goes on from here.\n")
        assert [path.name for path in folder.iterdir()] == [".guard"]
    again = guarded(folder, "ls; exit 7")
    assert again.communicate(timeout=60) == ("", "") and again.returncode == 7
    assert [path.name for path in folder.iterdir()] == [".guard"]


def test_what_is_half_written_goes_and_no_file_of_the_users(tmp_path):
    """Names that the steps, the recipes, fairseq and Make write to; and others that only look like them."""
    halves = ["a.txt.host.example.12.part", "train.de.host.12.part.0", "model.pt.part", "generate.txt.part",
              "checkpoints/checkpoint_1_50.pt.tmp"]  # fmt: skip
    mine = ["my.part.txt", "thesis.part", "essay.txt.part", "page.2.part", "notes/thesis.part.2/page", "weights.pt.tmp"]
    for name in (*halves, *mine, "data/bin.part/dict.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    guard.clear(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(mine)


def test_who_else_is_at_work_below(tmp_path):
    """A folder's own make and the steps that it starts are not others; one that was killed is nobody."""
    code = "import sys; from recipes.steps.guard import *\nprint(others_in(Path(sys.argv[1])))"
    asked = [sys.executable, "-c", code, str(tmp_path)]
    own = subprocess.run(
        [sys.executable, "-m", "recipes.steps.guard", "--alone", tmp_path / "own", "--", *asked],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (own.stdout, own.stderr) == ("None\n", "")
    other = guarded(tmp_path, "mkdir run; echo in; sleep 600")
    assert other.stdout.readline() == "in\n"
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout
    assert found.startswith(f"{tmp_path} (process {other.pid} on ")
    with pytest.raises(ValueError, match=r"data was made with other settings \(width 1 -> 2\), and another make works"):
        settings.hold(tmp_path / "data/settings.json", {"width": "1"}, [], None)
        settings.hold(tmp_path / "data/settings.json", {"width": "2"}, [], tmp_path)
    assert settings.read(tmp_path / "data/settings.json") == {"width": "1"}
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()
    assert guard.others_in(tmp_path) is None


def test_it_ends_with_the_make_above(tmp_path):
    command = f"{sys.executable} -m recipes.steps.guard --alone {tmp_path} -- bash -c 'echo $$; exec sleep 600'; true"
    above = subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child = int(above.stdout.readline())
    above.kill()
    assert gone(child) and above.communicate(timeout=60)[1] == "Interrupted. The same command goes on from here.\n"


def test_records_of_many_processes_all_stay(tmp_path):
    """Twelve processes record at once; without the guard some would overwrite others."""
    code = "import sys; from recipes.steps.lock import *\n"
    code += "for n in range(8): hold(Path(sys.argv[1]), 's', f'{sys.argv[2]}-{n}', n)"
    running = [python(code, tmp_path / "lock", n) for n in range(12)]
    assert [process.wait(60) for process in running] == [0] * 12
    assert len(lock.read(tmp_path / "lock")["s"]) == 96


def test_what_was_recorded_stays_recorded(tmp_path):
    for _ in range(2):
        lock.hold(tmp_path / "lock", "lines", "x", 3)
    with pytest.raises(ValueError, match=r'x: found 4, but the first time it was 3 .*remove "x" there'):
        lock.hold(tmp_path / "lock", "lines", "x", 4)
    assert lock.recorded(tmp_path / "lock", "lines", "x") == 3


@pytest.mark.parametrize("text", ["{", "[]", '{"archives": 3}'])
def test_a_damaged_record_is_named_and_kept(tmp_path, text):
    (tmp_path / "lock").write_text(text)
    with pytest.raises(ValueError, match="lock: .*expected .*JSON.* Fix it, or remove it"):
        lock.hold(tmp_path / "lock", "archives", "x", 4)
    assert (tmp_path / "lock").read_text() == text
