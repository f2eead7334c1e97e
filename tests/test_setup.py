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


def make(*given: str, **variables: str) -> subprocess.Popen[str]:
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "setup", *given]
    return subprocess.Popen(command, cwd=ROOT, env={**mine, **variables}, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def setup(tmp_path):
    """setup("TORCH=...") -> what `make setup` said to Python, and to that of the environment; and the environment."""
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(STUB)
    python.chmod(0o755)

    def go(*given: str, named: bool = True) -> tuple[list[str], list[str]]:
        logs = [tmp_path / "said", venv / "bin/said"]
        for log in logs:
            log.unlink(missing_ok=True)
        done = make(f"VENV={venv}", *([f"PYTHON={python}"] if named else []), *given)
        said = done.communicate()[1]
        whole = not (tmp_path / "nonet").exists()
        assert (done.returncode == 0) == (venv / "ready").exists() == whole, said
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
    (venv / "lib/python3.11").mkdir(parents=True)
    python, own = go("TORCH=torch==2.7.1")
    assert made(python) == [f"-m venv {venv}"] and torch_of(own) == "torch==2.7.1" != newest
    assert not (venv / "lib").exists()
    assert made(go("TORCH=torch==2.7.1")[0]) == made(go()[0]) == []
    os.utime(venv / "ready", (0, 0))  # older than setup.py, as after git pull
    python, own = go()
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
    assert made(go()[0]) == [f"-m venv {venv}"]


def test_another_python_is_a_new_environment(setup, tmp_path):
    go, venv = setup
    go()
    Path(f"{tmp_path}/python.version").write_text("3.12\n")
    assert made(go()[0]) == [f"-m venv {venv}"]


def test_the_python_that_it_was_made_from_makes_it_anew(setup):
    """The advice for an old driver is `make setup TORCH=`; python3 may be one that has no such torch."""
    go, venv = setup
    go()
    assert made(go("TORCH=torch==2.7.1", named=False)[0]) == [f"-m venv {venv}"]


def test_a_python_that_cannot_be_run_is_told(setup):
    go, venv = setup
    go()
    for given, variables in ((["PYTHON=/no/python"], {}), ([], {"PYTHON": "/no/python"})):
        done = make(f"VENV={venv}", *given, **variables)
        assert "PYTHON=/no/python cannot be run; expected a Python of 3.11 or newer" in done.communicate()[1]
        assert done.returncode == 2


def test_two_makes_set_it_up_once(setup, tmp_path):
    """A second one waits, and then there is nothing left to do."""
    _, venv = setup
    python = tmp_path / "python"
    python.write_text(STUB.replace('"-m venv "*)', '"-m venv "*) sleep 3;'))
    both = [make(f"VENV={venv}", f"PYTHON={python}") for _ in range(2)]
    said = [it.communicate(timeout=60)[1] for it in both]
    assert [it.returncode for it in both] == [0, 0], said
    assert len(made((tmp_path / "said").read_text().splitlines())) == 1
    assert sum(f"Another process has {venv}/lock. Waiting for its end." in it for it in said) == 1


@pytest.mark.parametrize("fault, given", [("nopip", []), ("", ["TORCH=torch==2.7.1"])])
def test_an_environment_from_elsewhere_is_not_made_anew(setup, tmp_path, fault, given):
    """uv makes such without pip; and one may be named by VENV=."""
    _, venv = setup
    subprocess.run([tmp_path / "python", "-m", "venv", venv], check=True)
    (venv / "lib").mkdir()
    if fault:
        (venv / "bin" / fault).touch()
    done = make(f"VENV={venv}", f"PYTHON={tmp_path}/python", *given)
    assert f"{venv} was not made by make setup, and would have to be made anew. Give" in done.communicate()[1]
    assert done.returncode == 2 and (venv / "lib").exists()


@pytest.mark.parametrize("name", ["bin", "lib", "share"])
def test_folders_of_someone_elses_stay(setup, tmp_path, name):
    """VENV=~/.local: what is there is called as an environment's folders are."""
    _, venv = setup
    (venv / name).mkdir(parents=True)
    (venv / name / "mine").touch()
    done = make(f"VENV={venv}", f"PYTHON={tmp_path}/python")
    assert f"{venv} was not made by make setup, and would have to be made anew. Give" in done.communicate()[1]
    assert done.returncode == 2 and (venv / name / "mine").exists() and not (venv / "pyvenv.cfg").exists()


def test_a_folder_that_is_no_environment_is_not_cleared(setup):
    go, venv = setup
    venv.mkdir()
    (venv / "thesis").write_text("mine")
    assert made(go()[0]) == [f"-m venv {venv}"] and (venv / "thesis").exists()
