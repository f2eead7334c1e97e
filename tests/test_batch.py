"""Does an update hold the same tokens on any machine, and is an impossible split refused?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.steps import batch
from recipes.steps.progress import progress

ROOT = Path(__file__).parents[1]
BY = ("--by", "16:8192", "32:16384", "80:32768")


def command(*arguments: object, tokens: int = 32768, a_device: int = 8192) -> subprocess.CompletedProcess:
    """As the Makefile calls it before anything is installed: without site-packages."""
    given = ["-S", "-m", "recipes.steps.batch", tokens, "--a-device", a_device, *arguments]
    return subprocess.run([sys.executable, *map(str, given)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("tokens", "a_device", "workers", "expected"),
    [
        # The papers' own, where nothing is known of the memory: IWSLT'14; WMT'14 En-De on 4 GPUs; En-Fr on 8 and 16.
        (4096, 4096, 1, (4096, 1)),
        (32768, 8192, 4, (8192, 1)),
        (640000, 8000, 8, (8000, 10)),
        (1280000, 5000, 16, (5000, 16)),
        (640000, 8000, 5, (8000, 16)),
        # An update smaller than a sentence can be, as in the recipe.
        (512, 512, 1, (512, 1)),
    ],
)
def test_an_update_is_split_whole(tokens, a_device, workers, expected):
    found = batch.plan(tokens, workers, a_device)
    assert found == expected and found.max_tokens * found.update_freq * workers == tokens


@pytest.mark.parametrize(
    ("memory", "plan"),
    [
        (17.2, "GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=2 LESS=4096"),
        (42.9, "GPUS=2 MAX_TOKENS=16384 UPDATE_FREQ=1 LESS=8192"),
        (141.0, "GPUS=2 MAX_TOKENS=16384 UPDATE_FREQ=1 LESS=8192"),
    ],
)
def test_a_batch_is_the_tables_for_the_cards_memory(memory, plan):
    assert command("--devices", 2, "--memory", memory, *BY).stdout == f"{plan}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 3), "an update of 32768 tokens does not split over 3 devices into equal batches"),
        (("--devices", 3), "Take another number of devices (GPUS= times NODES=: 1, 2, 4, 8), or another batch"),
        (("--devices", 2, "--max-tokens", 3000), "MAX_TOKENS=3000 on 2 devices does not make up an update of 32768"),
        (("--devices", 2, "--max-tokens", 3000), "Take 1024 or 2048 or 4096 or 8192, or leave MAX_TOKENS out"),
        (("--devices", 1, "--memory", 11.5, *BY), "a GPU has 11.5 GB, and this model was planned for 16 GB or more"),
        (("--devices", 0), "GPUS is 0; expected 1 or more."),
        (("--devices", 2, "--nodes", -1), "NODES is -1; expected 1 or more."),
        (("--devices", 64, "--max-tokens", 512, "--check"), "and the run needs 64. Give GPUS="),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_gpus_are_asked_of_nvidia_smi(nvidia_smi, monkeypatch):
    nvidia_smi((16384, "A"), (49152, "B"))
    # Two GPUs, and the smaller one's memory counts.
    assert command(*BY).stdout.startswith("GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=2 ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert command(*BY).stdout.startswith("GPUS=1 MAX_TOKENS=16384 UPDATE_FREQ=2 ")


def test_several_nodes_train_on_every_visible_gpu(nvidia_smi):
    nvidia_smi(*[(32768, "A")] * 4)
    done = command("--nodes", 2, "--devices", 2)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "GPUS=2 of 4 with NODES=2" in done.stderr and "CUDA_VISIBLE_DEVICES=0,1" in done.stderr


def test_out_of_memory_names_the_batch_to_give():
    """Once, however often fairseq says so."""
    line = (
        "2026-01-01 00:00:00 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA out of memory."
    )
    shown = list(progress([line, line], less=4096))
    assert [text for text in shown if "MAX_TOKENS" in text] == [
        "Out of memory: stop this, and give MAX_TOKENS=4096; an update holds as many tokens as before."
    ]
