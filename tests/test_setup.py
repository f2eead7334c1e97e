"""Does `make setup` make the environment that was asked for, and a whole one? (With a stand-in for Python and pip.)"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

STUB = f"""#!/bin/bash
echo "$*" >> "$(dirname "$0")/said"
case "$*" in
  "-m venv "*) folder="${{!#}}"; mkdir -p "$folder/bin"; touch "$folder/pyvenv.cfg"; cp "$0" "$folder/bin/python"
    echo "$0" > "$folder/bin/base" ;;
  "-m pip --version") test ! -e "$(dirname "$0")/nopip" ;;
  "-m pip "*) test ! -e "$(dirname "$0")/../../nonet" ;;
  *_base_executable*) cat "$(dirname "$0")/base" ;;
  *turn.py*) exec {sys.executable} "$@" ;;
  *'sep="."'*) cat "$0.version" 2>/dev/null || exec {sys.executable} "$@" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
OTHER = "TORCH=torch==2.7.1"


def make(folder: Path, *given: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "setup", f"VENV={folder}/venv", *given]
    return subprocess.Popen(command, cwd=ROOT, env=inherited, stderr=subprocess.PIPE, text=True)


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-in as `python`."""
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


@pytest.fixture
def setup(folder: Path) -> Callable[..., tuple[bool, str]]:
    """setup("TORCH=...") -> whether `make setup` made an environment, and which torch it then told pip to install."""

    def run(*given: str) -> tuple[bool, str]:
        logs = [folder / "said", folder / "venv/bin/said"]
        for log in logs:
            log.unlink(missing_ok=True)
        done = make(folder, *given)
        message = done.communicate()[1]
        whole = not (folder / "nonet").exists()
        assert (done.returncode == 0) == (folder / "venv/ready").exists() == whole, message
        python, pip = map(lines_of, logs)
        installed = [line.split()[-1] for line in pip if line.startswith("-m pip install") and "torch==" in line]
        return f"-m venv {folder}/venv" in python, "".join(installed)

    return run


@pytest.mark.parametrize(
    ("script", "given", "made"),
    [
        ("", ["PYTHON={}/python"], False),  # all is there
        ("", ["PYTHON={}/python", OTHER], True),
        ("", [OTHER], True),  # with the Python that it was made from: python3 may be one that has no such torch
        ("touch -d @0 venv/ready", [], False),  # setup.py is newer, as after git pull
        ("rm venv/ready; touch venv/bin/nopip", [], True),  # python -m venv was killed, or python3-venv is missing
        ("echo 3.12 > python.version", ["PYTHON={}/python"], True),
    ],
)
def test_an_environment_is_made_again_where_it_must(
    script: str, given: list[str], made: bool, folder: Path, setup: Callable[..., tuple[bool, str]]
) -> None:
    first = setup(f"PYTHON={folder}/python")
    assert first[0] and first[1] != OTHER.removeprefix("TORCH=")
    (folder / "venv/lib").mkdir()
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    again = setup(*(option.format(folder) for option in given))
    assert again[0] == made != (folder / "venv/lib").exists()
    if OTHER in given:
        assert again[1] == OTHER.removeprefix("TORCH=")
        assert setup() == setup(OTHER) == (False, ""), "it is kept"


def test_a_torch_that_could_not_be_installed_is_still_the_one(folder: Path, setup: Callable) -> None:
    """Cut off on the way, and then another target, without TORCH=."""
    setup(f"PYTHON={folder}/python")
    (folder / "nonet").touch()
    setup(OTHER)
    (folder / "nonet").unlink()
    assert setup() == (False, OTHER.removeprefix("TORCH="))


NOT_OURS = "/venv was not made by make setup, and would have to be made anew. Give"


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        ("./python -m venv venv; touch venv/bin/nopip", "PYTHON={}/python", NOT_OURS),  # as uv makes them
        ("./python -m venv venv", "PYTHON={}/python " + OTHER, NOT_OURS),
        ("mkdir -p venv/share; touch venv/share/mine", "PYTHON={}/python", NOT_OURS),  # VENV=~/.local
        ("", "PYTHON=/no/python", "PYTHON=/no/python cannot be run; expected a Python of 3.11 or newer"),
    ],
)
def test_what_someone_else_made_stays(script: str, given: str, message: str, folder: Path) -> None:
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    before = {path for path in folder.glob("venv/**/*") if path.name != "said"}
    done = make(folder, *given.format(folder).split())
    assert message in done.communicate()[1] and done.returncode == 2
    assert {path for path in folder.glob("venv/**/*") if path.name not in ("said", "lock")} == before


def test_two_makes_set_it_up_once(folder: Path) -> None:
    """A second one waits, and then there is nothing left to do."""
    (folder / "python").write_text(STUB.replace('"-m venv "*)', '"-m venv "*) sleep 3;'))
    both = [make(folder, f"PYTHON={folder}/python") for _ in range(2)]
    messages = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], messages
    assert lines_of(folder / "said").count(f"-m venv {folder}/venv") == 1
    assert sum(f"Another process has {folder}/venv/lock. Waiting for its end." in it for it in messages) == 1
