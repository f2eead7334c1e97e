"""The makefiles that are not the front's: what they refuse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, make, make_environment


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line that a user is told."""
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("recipe", "variable", "message"),
    [
        ("compare", "SEEDS=", "SEEDS= is empty; expected one or more"),
        ("compare", "SEEDS=1 2 1", "SEEDS=1 2 1 names one twice; expected each once"),
        ("compare", "RATES=1e-3 1e-x", "RATES=1e-3 1e-x is not a number"),
        ("compare", "SCHEMES=admin sandwich", "SCHEMES=admin sandwich is unknown; expected some of admin"),
        ("warmup", "PRESET=tpu", "PRESET=tpu is unknown; expected cpu, gpu or multi30k"),
        ("sensitivity", "BETA2S=0.9 1.5", "BETA2S=0.9 1.5 is not a number that a run can have; expected one of 0"),
        ("deeper", "HEADS=3", "=3; expected one. Give another WIDTH or HEADS"),
        ("gpu_trial", "DEVICE=tpu", "DEVICE=tpu is unknown; expected one of cuda cpu"),
    ],
)
def test_unknown_choices_are_refused(recipe, variable, message):
    done = make(recipe, "-n", "DATA=nowhere", variable)
    assert done.returncode == 2
    assert message in refused(done)


def plain_make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, env=make_environment())


@pytest.mark.parametrize(
    ("variable", "unfit"),
    [
        ("RUNS=a:b", ":"),
        ("RUNS=a#b", "#"),
        ("DATA=a b", "space"),
        ("VENV=a$(shell touch here)", "( ) $ space"),
    ],
)
def test_paths_that_make_cannot_take_are_refused(variable, unfit):
    """While the makefiles are read, in one line; by the recipes, and by the Makefile before them."""
    for arguments in (["-n", "-f", "recipes/compare/Makefile"], ["-n", "demo"]):
        message = refused(plain_make(*arguments, variable))
        assert f" {variable} has {unfit} in it, which make cannot take in the name of a file; expected" in message


def test_distclean_removes_virtual_environments_only(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    assert str(tmp_path) not in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout
    (tmp_path / "pyvenv.cfg").touch()
    assert f"rm -rf {tmp_path}\n" in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout


@pytest.mark.parametrize("makefile", ["Makefile", "recipes/compare/Makefile"])
def test_an_old_make_is_refused_in_one_line(makefile):
    """Before any line that such a make could not read."""
    message = refused(plain_make("-f", makefile, ".FEATURES=target-specific order-only else-if", "MAKE_VERSION=3.81"))
    assert "GNU make 3.81 is here; 4.3 or newer is needed" in message
