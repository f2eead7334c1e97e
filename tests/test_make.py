"""The Makefile: what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, make_environment


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line that a user is told."""
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def plain_make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, env=make_environment())


@pytest.mark.parametrize("venv", ["", "a b"])
def test_an_environment_that_make_cannot_name_is_refused(venv):
    message = refused(plain_make("-n", "demo", f"VENV={venv}"))
    assert f"VENV={venv} is not one word; expected a folder without spaces in its name" in message


def test_distclean_removes_virtual_environments_only(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    assert str(tmp_path) not in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout
    (tmp_path / "pyvenv.cfg").touch()
    assert f"rm -rf {tmp_path}\n" in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout


def test_an_old_make_is_refused_in_one_line():
    """Before any line that such a make could not read."""
    message = refused(plain_make(".FEATURES=target-specific order-only else-if", "MAKE_VERSION=3.81"))
    assert "GNU make 3.81 is here; 4.3 or newer is needed" in message
