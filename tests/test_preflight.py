"""The page before a run says what space it takes, and refuses runs that cannot work."""

from __future__ import annotations

import re
import shutil
import subprocess
from types import SimpleNamespace

import conftest
import pytest

from recipes import preflight as page
from recipes import recipe
from recipes.training import Run


def make(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    return conftest.front(f"{recipe}-preflight", *variables, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def test_the_disk_must_hold_archives_text_and_checkpoints(tmp_path, monkeypatch):
    """The disk must hold archives, text and checkpoints. An archive that is there, as in DATA=, still becomes text.

    The archive has 657,632,379 bytes, with 4 bytes of text for each. There are 14 checkpoints of 12 bytes per
    parameter. The average and the model have 4 bytes per parameter each.
    """
    name = "training-parallel-europarl-v7.tgz"
    for given, bytes_of_archive in ({"RUNS": str(tmp_path)}, 5), ({"RUNS": str(tmp_path), "DATA": str(tmp_path)}, 4):
        run = Run(recipe.read("wmt14-ende-6l", {"GPUS": "1", **given}))
        archives = [row for row in run.text.archives() if row.name == name]
        wanted = 657632379 * bytes_of_archive + 10**6 * (14 * 12 + 8)
        for free, fault in ((wanted, ""), (wanted - 10**6, "the disk is too small by 1.00MB; make room")):
            monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            found = page.disk(run, 10**6, archives)[1]
            assert found == fault or fault and found.startswith(fault)
        (tmp_path / name).touch()


@pytest.mark.slow
def test_a_recipe_that_works_has_a_page(tmp_path):
    done = make("demo", "LAYERS=1", "ARGS=--max-tokens 64", f"RUNS={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        r"demo: [\d,]+ parameters, on the CPU", r"plan: an update of 1024 tokens: 1 x 1 x 16 batches",
        r"disk: archives .*, text .*, checkpoints .* are free at ", r"It can work here\.",
    ):  # fmt: skip
        assert re.search(expected, done.stdout), (expected, done.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_missing_files_are_named(tmp_path):
    done = make("wmt14-ende-18l", f"RUNS={tmp_path}", "GPUS=4")
    (fault,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and fault.startswith("It cannot work here: torch ") and "runs on 0 GPUs" in fault
    (archives,) = [line for line in done.stdout.splitlines() if line.startswith("text: to download: ")]
    assert "training-parallel-europarl-v7.tgz" in archives
