"""Does an update hold the same tokens on any machine, and is an impossible split refused?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.steps import batch

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("tokens", "a_device", "workers", "memory", "expected"),
    [
        # The papers' own: IWSLT'14; WMT'14 En-De on 4 GPUs; En-Fr 6L on 8, 60L-12L on 16.
        (4096, 4096, 1, 16, (4096, 1)),
        (32768, 8192, 4, 16, (8192, 1)),
        (640000, 8000, 8, 16, (8000, 10)),
        (1280000, 5000, 16, 16, (5000, 16)),
        # Fewer, smaller, larger, unknown GPUs.
        (32768, 8192, 1, 16, (8192, 4)),
        (32768, 8192, 1, 12, (4096, 8)),
        (32768, 8192, 1, 8, (2048, 16)),
        (32768, 8192, 1, 48, (16384, 2)),
        (32768, 8192, 2, 80, (16384, 1)),
        (32768, 8192, 1, None, (8192, 4)),
        # 640000 / 5 = 128000: 16 batches of 8000. 1280000 / 12 is no whole number, nor is 32768 / 3.
        (640000, 8000, 5, 16, (8000, 16)),
    ],
)
def test_an_update_is_split_whole(tokens, a_device, workers, memory, expected):
    found = batch.plan(tokens, workers, batch.most(a_device, memory))
    assert found == expected
    assert found.max_tokens * found.update_freq * workers == tokens


@pytest.mark.parametrize(
    ("tokens", "workers", "limit", "nearest"),
    [
        (4096, 8, 4096, "1, 2, 4"),  # 512 tokens a GPU: less than a sentence may have
        (32768, 3, 8192, "1, 2, 4, 8"),
        (640000, 7, 8000, "4, 5, 8, 10"),
    ],
)
def test_an_impossible_split_names_the_possible_ones(tokens, workers, limit, nearest):
    with pytest.raises(ValueError, match=rf"{tokens} tokens .* over {workers} devices .*NODES=: {nearest}\)"):
        batch.plan(tokens, workers, limit)


def test_a_batch_of_the_users_must_make_up_the_update():
    assert batch.given(32768, 2, 2048) == (2048, 8)
    with pytest.raises(ValueError, match="MAX_TOKENS=3000 on 2 devices .* Take 1024 or 2048 or 4096 or 8192, or leave"):
        batch.given(32768, 2, 3000)


def test_an_update_smaller_than_a_sentence_may_be_split_as_the_recipe_has_it():
    assert batch.plan(512, 1, 512) == (512, 1)


def command(*arguments: object) -> subprocess.CompletedProcess:
    """As the Makefile calls it before anything is installed: with no site-packages."""
    given = [sys.executable, "-S", "-m", "recipes.steps.batch", *map(str, arguments)]
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True)


def test_the_command_needs_only_the_standard_library():
    done = command(32768, "--a-device", 8192, "--devices", 2, "--nodes", 2, "--memory", 16)
    assert (done.returncode, done.stdout) == (0, "GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=1\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 3), "an update of 32768 tokens does not split over 3 devices"),
        (("--devices", 0), "GPUS is 0; expected 1 or more."),
        (("--devices", 2, "--nodes", -1), "NODES is -1; expected 1 or more."),
        (("--devices", 64, "--max-tokens", 512, "--check"), "GPUs, and the run needs 64. Give GPUS="),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message):
    done = command(32768, "--a-device", 8192, *arguments)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_gpus_are_asked_of_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 16384\necho 49152\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [round(memory) for memory in batch.gpus()] == [17, 52]
    done = command(32768, "--a-device", 8192, "--check")
    # Two GPUs, and the smaller one's memory counts.
    assert done.stdout == "GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=2\n"
    program.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert batch.gpus() == []
