"""`make setup` makes the requested environment, and repairs an incomplete one. (Python, pip and uv are fakes.)"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, make_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipes.set_up import BUILD

STUB = f"""#!/bin/bash
echo "$*" >> "$(dirname "$0")/said"
case "$*" in
  "-m venv "*) folder="${{!#}}"; mkdir -p "$folder/bin"; touch "$folder/pyvenv.cfg"; cp "$0" "$folder/bin/python"
    echo "$0" > "$folder/bin/base" ;;
  "-m pip config list") cat "$(dirname "$0")/../../pip.conf" 2>/dev/null ;;
  *" --dry-run "*) test ! -e "$(dirname "$0")/../../nobuild" ;;
  "-m uv "*) echo "$UV_INDEX|$UV_FIND_LINKS" > "$(dirname "$0")/uv"; test ! -e "$(dirname "$0")/../../nonet"
    status=$?; test ! -e "$(dirname "$0")/../../slow" || exec sleep 60; exit $status ;;
  "-m pip "*) test ! -e "$(dirname "$0")/../../nonet" ;;
  *ensurepip*) test -e "$0.headers" && echo there ;;
  *_base_executable*) cat "$(dirname "$0")/base" ;;
  *'sep="."'*) cat "$0.version" 2>/dev/null || exec {sys.executable} "$@" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
OTHER = "TORCH=torch==2.7.1"


def make(folder: Path, *given: str) -> subprocess.Popen[str]:
    command = ["make", "setup", f"VENV={folder}/venv", *given]
    plain = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env=make_environment(), **plain)


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the fake `python`."""
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


@pytest.fixture
def setup(folder: Path) -> Callable[..., tuple[bool, str]]:
    """setup("TORCH=...") -> whether `make setup` made an environment, and which torch it asked uv for."""

    def run(*given: str) -> tuple[bool, str]:
        logs = [folder / "said", folder / "venv/bin/said"]
        for log in logs:
            log.unlink(missing_ok=True)
        done = make(folder, *given)
        message = done.communicate()[1]
        whole = not (folder / "nonet").exists()
        assert (done.returncode == 0) == (folder / "venv/ready").exists() == whole, message
        python, uv = map(lines_of, logs)
        installed = {word for line in uv for word in line.split() if word.startswith("torch==")}
        return any(line.startswith(f"-m venv {folder}/venv") for line in python), "".join(installed)

    return run


@pytest.mark.parametrize(
    ("script", "given", "made"),
    [
        ("", ["PYTHON={}/python"], False),  # everything is installed
        ("", ["PYTHON={}/python", OTHER], True),
        ("", [OTHER], True),  # the environment's own Python is used: this torch may not exist for python3
        ("touch -d @0 venv/ready", [], False),  # setup.py or requirements.lock is newer, as after git pull
        ("touch -d @0 venv/ready; touch nonet", [], False),  # no network: it is not complete any more
        ("rm venv/ready", [], True),  # it was killed: a package may be half installed
        ("echo 3.12 > python.version", ["PYTHON={}/python"], True),
    ],
)
def test_an_environment_is_made_again_where_it_must(
    script: str, given: list[str], made: bool, folder: Path, setup: Callable[..., tuple[bool, str]]
) -> None:
    assert setup(f"PYTHON={folder}/python") == (True, "torch==2.13.0+cpu")
    (folder / "venv/lib").mkdir()
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    again = setup(*(option.format(folder) for option in given))
    assert again[0] == made != (folder / "venv/lib").exists()
    if OTHER in given:
        assert again[1] == OTHER.removeprefix("TORCH=")
        assert setup() == setup(OTHER) == (False, ""), "it is kept"
        (folder / "venv/ready").unlink()
        assert setup() == (True, OTHER.removeprefix("TORCH=")), "it is the one that is installed again"


NOT_OURS = "/venv was not made by make setup, and would have to be made again. Give"


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        ("./python -m venv venv", "PYTHON={}/python", NOT_OURS),  # as uv makes environments
        ("mkdir -p venv/share; touch venv/share/mine", "PYTHON={}/python", NOT_OURS),  # VENV=~/.local
        ("echo 3.10 > python.version", "PYTHON={}/python", "python is Python 3.10; expected 3.11 or newer, as in"),
        ("touch venv", "PYTHON={}/python", "venv'. Check its permissions and the disk, or give"),
        ("", "PYTHON={}/python TORCH=cu118", "TORCH=cu118 is unknown; expected one of cpu cuda cu126, or pip's, as"),
    ],
)
def test_what_someone_else_made_stays(script: str, given: str, message: str, folder: Path) -> None:
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    before = {path for path in folder.glob("venv/**/*") if path.name != "said"}
    done = make(folder, *given.format(folder).split())
    error = done.communicate()[1]
    assert message in error and "Traceback" not in error and done.returncode == 2
    assert {path for path in folder.glob("venv/**/*") if path.name not in ("said", "lock")} == before


def test_ctrl_c_is_one_line(folder: Path) -> None:
    (folder / "slow").touch()
    setup, end = make(folder, f"PYTHON={folder}/python"), time.monotonic() + 60
    while not (folder / "venv/bin/uv").exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(setup.pid, signal.SIGINT)
    error = setup.communicate(timeout=60)[1]
    assert f"{folder}/venv: interrupted; make setup begins again, and downloads nothing twice.\n" in error
    assert "Traceback" not in error and not (folder / "venv/ready").exists()


USING = """import sys; sys.prefix = sys.argv[1]
from recipes.steps.common import run
run(lambda: print(input("at work\\n")))"""


def test_an_environment_is_not_installed_again_under_running_work(folder: Path) -> None:
    """After a git pull, two setups wait for running work, one sets it up, and no work starts during setup."""
    assert make(folder, f"PYTHON={folder}/python").wait(60) == 0
    command = [sys.executable, "-c", USING, str(folder / "venv")]
    work = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lock = folder / "venv/lock"
    assert work.stdout.readline() == "at work\n"  # a test of the lock from here could be what the work meets
    os.utime(folder / "venv/ready", (0, 0))
    (folder / "venv/bin/said").unlink()
    setups = [make(folder) for _ in range(2)]
    assert all("venv must be set up again and is in use. Waiting;" in setup.stderr.readline() for setup in setups)
    assert not [line for line in lines_of(folder / "venv/bin/said") if line.startswith("-m pip")]
    assert work.communicate("the end\n", timeout=60)[0] == "the end\n"
    assert [setup.wait(60) for setup in setups] == [0, 0]
    assert sum(line.endswith(" -e .") for line in lines_of(folder / "venv/bin/said")) == 1
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"{folder}/venv is being set up. Wait for the end of that, and run again.\n"


@pytest.mark.parametrize(
    ("cards", "build"),
    [
        ("echo '8.0, 580.65.06'; echo '9.0, 580.65.06'", "torch==2.13.0"),
        ("echo '7.0, 580.65.06'", "torch==2.13.0+cu126"),  # a V100
        ("echo '9.0, 580.65.06'; echo '6.1, 580.65.06'", "torch==2.13.0+cu126"),
        ("echo '8.0, 550.54.15'", "torch==2.13.0+cu126"),  # a driver too old for CUDA 13
        ("echo 'No devices were found'; exit 6", "torch==2.13.0+cpu"),
    ],
)
def test_the_build_of_torch_is_by_the_card(cards: str, build: str, folder: Path, setup: Callable, monkeypatch) -> None:
    """The card selects torch's build. On a machine without a card, an existing build stays; TORCH= selects another."""
    driver = folder / "driver/nvidia-smi"
    driver.parent.mkdir()
    driver.write_text(f"#!/bin/sh\n{cards}\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=":")
    assert setup(f"PYTHON={folder}/python") == (True, build)
    driver.write_text("#!/bin/sh\nexit 6\n")
    os.utime(folder / "venv/ready", (0, 0))
    assert setup() == (False, build)
    assert setup(f"TORCH={build}") == (True, build)


def torch_line(folder: Path) -> str:
    """The words that `make setup` gave to uv for torch."""
    (line,) = (line for line in lines_of(folder / "venv/bin/said") if " torch==" in line and "--dry-run" not in line)
    return line.partition(" -q ")[2]


def test_a_build_comes_from_torchs_index_unless_pips_have_it(folder: Path) -> None:
    """uv gets pip's indexes and folders of wheels, pip's variables before its files."""
    (folder / "pip.conf").write_text(
        """:env:.find-links='/wheels'
global.cert='/none'
global.extra-index-url='\\nhttps://one/simple\\nhttps://two/simple'
global.find-links='/others'
"""
    )
    given = [f"PYTHON={folder}/python", "TORCH=cu126"]
    assert make(folder, *given).wait(60) == 0
    assert torch_line(folder) == "torch==2.13.0+cu126"
    assert (folder / "venv/bin/uv").read_text() == "https://one/simple https://two/simple|/wheels\n"
    (folder / "nobuild").touch()
    (folder / "venv/ready").unlink()
    assert make(folder).wait(60) == 0
    assert torch_line(folder) == "torch==2.13.0+cu126 --torch-backend cu126"


@pytest.mark.parametrize(
    ("script", "python"),
    [
        ("touch python3.12.headers", "python3.12"),
        ("true", "python3"),  # it has no headers, so it cannot compile fastBPE
        ("touch python3.12.headers; rm python3.12", "python3"),
    ],
)
def test_python312_is_preferred_because_fairseq_has_a_wheel_for_it(script, python, folder, monkeypatch) -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("fairseq-fixed has wheels for Linux on x86-64 only")
    for name in ("python3", "python3.12"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    if not (folder / "python3.12").exists():
        (folder / "python3.12").write_text("#!/bin/sh\nexit 127\n")  # as pyenv's, for a version that is not chosen
        (folder / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    done = make(folder)
    assert done.wait(60) == 0, done.stderr.read()
    base = (folder / "venv/bin/base").read_text()
    assert base == f"{folder}/{python}\n"
    if python == "python3.12":  # the environment's Python is removed, then there is a new lock file
        (folder / "venv/bin/python").unlink()
        os.utime(folder / "venv/ready", (0, 0))
        assert make(folder).wait(60) == 0 and (folder / "venv/bin/base").read_text() == base


def test_all_but_torch_is_locked(monkeypatch) -> None:
    """All packages but torch are locked by hash, including all requirements of setup.py."""
    pinned = re.split(r"\n(?=\w)", (ROOT / "requirements.lock").read_text())
    names = {one.partition("==")[0] for one in pinned}
    assert all("==" in one.splitlines()[0] and "--hash=sha256:" in one for one in pinned)
    assert not {"torch", "torchaudio"} & names
    package: dict = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: package.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    wanted = [Requirement(text) for text in package["install_requires"] + package["extras_require"]["dev"]]
    assert {canonicalize_name(one.name) for one in wanted} - names == {"torch"}
    assert names >= {*BUILD}
    assert {Requirement(text).name for text in package["install_requires"]} == {"torch", "tqdm"}


# -- what the Makefile refuses ---------------------------------------------------------------------------------------


def plain_make(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=make_environment())


def test_a_folder_with_a_space_is_one_line() -> None:
    done = plain_make("-n", "demo", "VENV=a b")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "VENV=a b is not one word; expected a folder without spaces in its name" in done.stderr


def test_the_makefile_needs_no_newer_make_than_3_81() -> None:
    """The Makefile works with GNU make 3.81: it uses nothing that make's NEWS lists for later versions.

    undefine, private, .ONESHELL and .RECIPEPREFIX came with 3.82; $(file), $(guile), ::= and != with 4.0; &: and
    .EXTRA_PREREQS with 4.3; $(let), $(intcmp) and .WAIT with 4.4.
    """
    text = (ROOT / "Makefile").read_text()
    newer = (
        r"\$\((file|guile|let|intcmp) |[:&]:?:=|!=|&:|^(undefine|private) |\.(ONESHELL|RECIPEPREFIX|EXTRA_PREREQS|WAIT)"
    )
    assert not re.findall(newer, text, re.MULTILINE)


def test_distclean_removes_virtual_environments_only(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    assert str(tmp_path) not in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout
    (tmp_path / "pyvenv.cfg").touch()
    assert f"rm -rf {tmp_path}\n" in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout
