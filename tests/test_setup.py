"""Does `make setup` make the environment that was asked for, and a whole one? (With a stand-in for Python and pip.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

STUB = f"""#!/bin/bash
echo "$*" >> "$(dirname "$0")/said"
case "$*" in
  "-m venv "*) folder="${{!#}}"; [[ "$*" != *" --clear "* ]] || rm -rf "$folder"
    mkdir -p "$folder/bin"; touch "$folder/pyvenv.cfg"; cp "$0" "$folder/bin/python" ;;
  "-m pip --version") test ! -e "$(dirname "$0")/nopip" ;;
  "-m pip "*) test ! -e "$(dirname "$0")/../../nonet" ;;
  *'sep="."'*) cat "$0.version" 2>/dev/null || exec {sys.executable} "$@" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """setup("TORCH=...") -> what `make setup` said to Python, and to that of the environment; and the environment."""
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(STUB)
    python.chmod(0o755)

    def go(*given: str) -> tuple[list[str], list[str]]:
        logs = [tmp_path / "said", venv / "bin/said"]
        for log in logs:
            log.unlink(missing_ok=True)
        mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        command = ["make", "setup", f"VENV={venv}", f"PYTHON={python}", *given]
        done = subprocess.run(command, cwd=ROOT, env=mine, capture_output=True, text=True)
        whole = not (tmp_path / "nonet").exists()
        assert (done.returncode == 0) == (venv / "ready").exists() == whole, done.stderr
        return tuple(log.read_text().splitlines() if log.exists() else [] for log in logs)  # type: ignore[return-value]

    return go, venv


def made(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("-m venv")]


def torch_of(said: list[str]) -> str:
    (line,) = [line for line in said if line.startswith("-m pip install") and "torch==" in line]
    return line.split()[-1]


def test_another_torch_is_a_new_environment_and_is_kept(setup):
    go, venv = setup
    python, own = go()
    newest = torch_of(own)
    assert made(python) == [f"-m venv {venv}"]
    assert made(go()[0]) == [], "all is there"
    (venv / "mine").touch()
    python, own = go("TORCH=torch==2.7.1")
    assert made(python) == [f"-m venv --clear {venv}"] and torch_of(own) == "torch==2.7.1" != newest
    assert made(go("TORCH=torch==2.7.1")[0]) == made(go()[0]) == []
    python, own = go("-W", "setup.py")  # as after git pull
    assert made(python) == [] and torch_of(own) == "torch==2.7.1"


def test_a_torch_that_could_not_be_installed_is_still_the_one(setup, tmp_path):
    """Cut off on the way, and then another target, without TORCH=."""
    go, venv = setup
    go()
    (tmp_path / "nonet").touch()
    go("TORCH=torch==2.7.1")
    (tmp_path / "nonet").unlink()
    python, own = go()
    assert made(python) == [] and torch_of(own) == "torch==2.7.1"


def test_half_an_environment_is_made_again(setup):
    """python -m venv was killed, or Debian's python3-venv is missing: there is a Python, and no pip."""
    go, venv = setup
    go()
    (venv / "ready").unlink()
    (venv / "bin/nopip").touch()
    assert made(go()[0]) == [f"-m venv --clear {venv}"]


def test_another_python_is_a_new_environment(setup, tmp_path):
    go, venv = setup
    go()
    Path(f"{tmp_path}/python.version").write_text("3.9\n")
    assert made(go()[0]) == [f"-m venv --clear {venv}"]


def test_a_folder_that_is_no_environment_is_not_cleared(setup):
    go, venv = setup
    venv.mkdir()
    (venv / "thesis").write_text("mine")
    assert made(go()[0]) == [f"-m venv {venv}"] and (venv / "thesis").exists()
