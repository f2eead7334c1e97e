"""The page before a run forecasts its time, cost and disk space, and refuses runs that cannot work."""

from __future__ import annotations

import re
import shutil
import subprocess
from types import SimpleNamespace

import conftest
import pytest

from recipes import preflight as page
from recipes import recipe
from recipes.settings import Demo
from recipes.translation import Translation


def make(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    return conftest.front(f"{recipe}-preflight", *variables, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


def test_a_forecast_is_of_the_updates_after_the_first_ones():
    """A forecast leaves out three slow updates.

    4,000 tokens are 40 updates. 10 epochs of 40 updates of 2 s take 800 s. On two devices, at a price of 9 an hour and
    device, they cost 4.00.
    """
    speeds = [0, 1, 1, *[50] * 7]
    found = [{"wps": speed, "wpb": 100} for speed in speeds]
    text = page.forecast(Demo(EPOCHS=10, PRICE=9.0), 2, 4000, found)
    assert "timed: 2.00 s an update, 40 updates an epoch, 400 in all: 0.2 hours, validations and" in text
    assert text.endswith("\ncost: 4.00, at 9 an hour and device")


def test_the_disk_must_hold_archives_text_and_checkpoints(tmp_path, monkeypatch):
    """The disk must hold archives, text and checkpoints. An archive that is there, as in DATA=, still becomes text.

    The archive has 657,632,379 bytes, with 4 bytes of text for each. There are 14 checkpoints of 12 bytes per
    parameter. The average and the model have 4 bytes per parameter each.
    """
    name = "training-parallel-europarl-v7.tgz"
    for given, bytes_of_archive in ({"RUNS": str(tmp_path)}, 5), ({"RUNS": str(tmp_path), "DATA": str(tmp_path)}, 4):
        run = Translation(recipe.read("wmt14-ende-6l", {"GPUS": "1", **given}))
        archives = [row for row in page.archives_of(run) if row.name == name]
        wanted = 657632379 * bytes_of_archive + 10**6 * (14 * 12 + 8)
        for free, fault in ((wanted, ""), (wanted - 10**6, "the disk is too small by 1.00MB; make room")):
            monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            found = page.disk(run.recipe, 10**6, archives)[1]
            assert found == fault or fault and found.startswith(fault)
        (tmp_path / name).touch()


@pytest.mark.slow
def test_a_recipe_that_works_has_a_page(tmp_path, corpus):
    """A working recipe gets a page, from ten real updates on an existing text. The trial leaves no files."""
    small = ["LAYERS=1", "WIDTH=16", "FFN=16", "MAX_TOKENS=64", "PRICE=2", f"RUNS={tmp_path}"]
    done = make("demo", *small)
    assert done.returncode == 0 and "not timed: the text is not prepared yet" in done.stdout, done.stderr
    for path in corpus.iterdir():
        name = path.name.replace("a-b", "de-en").replace(".a.", ".de.").replace(".b.", ".en.")
        (tmp_path / "demo/data/bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "demo/data/bin" / name)
    run = Translation(recipe.read("demo", {"RUNS": str(tmp_path)}))
    assert page.epoch_tokens(run) == sum(len(line.split()) + 1 for line in (corpus.parent / "train.b").open())
    done = make("demo", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        r"demo: [\d,]+ parameters, fp32, on the CPU", r"plan: an update of 64 tokens: 1 x 1 x 1 batches",
        r"disk: archives .*, text .*, checkpoints .* are free at ",
        r"timed: .* s an update, \d+ updates an epoch, 700 in all: .* hours, validations",
        r"cost: [\d.]+, at 2 an hour", r"It can work here\.",
    ):  # fmt: skip
        assert re.search(expected, done.stdout), (expected, done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}


@pytest.mark.slow
def test_missing_files_are_named(tmp_path):
    done = make("wmt14-ende-18l", f"RUNS={tmp_path}", "GPUS=4")
    (fault,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and fault.startswith("It cannot work here: torch ") and "runs on 0 GPUs" in fault
    (archives,) = [line for line in done.stdout.splitlines() if line.startswith("text: to download: ")]
    assert "training-parallel-europarl-v7.tgz" in archives
    assert "not timed: the recipe's device is not here" in done.stdout
