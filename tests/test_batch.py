"""Does an update hold the same tokens on any machine, and is an impossible split refused?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.steps import batch
from recipes.steps.activations import Sizes
from recipes.steps.memory import GB

ROOT = Path(__file__).parents[1]


EN_DE = {"words": 32764, "attention_dropout": 0.1, "activation_dropout": 0.1}


def device(layers: int, memory: float | None, workers: int = 1, **more) -> batch.Device:
    sizes = Sizes(layers, layers, **EN_DE, **more)
    return batch.Device(sizes, workers, None if memory is None else memory * GB, length=160)


@pytest.mark.parametrize(
    ("tokens", "a_device", "workers", "expected"),
    [
        # The papers' own, where nothing is known of the memory: IWSLT'14; WMT'14 En-De on 4 GPUs; En-Fr on 8 and 16.
        (4096, 4096, 1, (4096, 1)),
        (32768, 8192, 4, (8192, 1)),
        (640000, 8000, 8, (8000, 10)),
        (1280000, 5000, 16, (5000, 16)),
        (32768, 8192, 1, (8192, 4)),
        # 640000 / 5 = 128000: 16 batches of 8000. 1280000 / 12 is no whole number, nor is 32768 / 3.
        (640000, 8000, 5, (8000, 16)),
        # An update smaller than a sentence can be, as in the recipe.
        (512, 512, 1, (512, 1)),
    ],
)
def test_an_update_is_split_whole(tokens, a_device, workers, expected):
    found, _ = batch.plan(tokens, device(6, None, workers), a_device)
    assert found == expected
    assert found.max_tokens * found.update_freq * workers == tokens


@pytest.mark.parametrize("precision", ["fp16", "me-fp16", "bf16", "amp", "fp32"])
@pytest.mark.parametrize("layers", [6, 18, 100])
def test_the_largest_batch_that_fits_is_taken(layers, precision):
    sizes = []
    for memory in (16.9, 34.4, 85.9):
        there = device(layers, memory, workers=4, precision=precision)
        try:
            found, planned = batch.plan(32768, there)
        except ValueError:
            assert layers == 100 and memory < 20
            continue
        assert planned.fits(found.max_tokens, accumulate=found.update_freq > 1)
        assert found.max_tokens == 8192 or not planned.fits(2 * found.max_tokens, accumulate=True)
        if not planned.sizes.checkpoint:
            sizes.append(found.max_tokens)
    assert sizes == sorted(sizes) and len(sizes) >= 2


def test_a_hundred_layers_on_15_34_and_86_gb():
    """The numbers come from the formula; tests/test_memory.py checks that the formula is right."""
    found, planned = batch.plan(32768, device(100, 85.9, workers=4))
    assert (found, planned.sizes.checkpoint) == ((8192, 1), False)
    found, planned = batch.plan(32768, device(100, 34.4, workers=4))
    assert (found, planned.sizes.checkpoint) == ((4096, 2), False)
    with pytest.raises(ValueError, match=r"batch of 1024 tokens needs 1\d\.\d GB .* a device has 15.0 GB, even with "
                       r"--checkpoint-activations. Take PRECISION=me-fp16, a GPU"):  # fmt: skip
        batch.plan(32768, device(100, 15, workers=4))
    found, planned = batch.plan(32768, device(100, 15, workers=4, precision="me-fp16"))
    assert planned.sizes.checkpoint
    assert "; with --checkpoint-activations, as no sensible batch fits without" in batch.explained(
        found, planned, False
    )


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
        batch.plan(tokens, device(6, None, workers), limit)


def test_a_batch_of_the_users_must_make_up_the_update():
    there = device(6, None, 2)
    assert batch.given(32768, there, 2048) == ((2048, 8), there)
    with pytest.raises(ValueError, match="MAX_TOKENS=3000 on 2 devices .* Take 1024 or 2048 or 4096 or 8192, or leave"):
        batch.given(32768, there, 3000)
    with pytest.raises(ValueError, match="a batch of 32768 tokens needs .* even with --checkpoint-activations"):
        batch.given(32768, device(18, 6), 32768)


def command(*arguments: object) -> subprocess.CompletedProcess:
    """As the Makefile calls it before anything is installed: without site-packages."""
    given = [sys.executable, "-S", "-m", "recipes.steps.batch", *map(str, arguments)]
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True)


def test_the_command_needs_only_the_standard_library():
    done = command(32768, "--a-device", 8192, "--devices", 2, "--nodes", 2, "--memory", 32, "--encoder-layers", 18)
    plan, why = done.stdout.splitlines()
    assert (done.returncode, plan) == (0, "GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=1 CHECKPOINT=no")
    assert re.fullmatch(r"\d\.\d GB \(weights, .* activations [\d.]+, .*\) of 32.0 GB", why)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 3), "an update of 32768 tokens does not split over 3 devices"),
        (("--devices", 0), "GPUS is 0; expected 1 or more."),
        (("--devices", 2, "--nodes", -1), "NODES is -1; expected 1 or more."),
        (("--devices", 64, "--max-tokens", 512, "--check"), "and the run needs 64. Give GPUS="),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message):
    done = command(32768, "--a-device", 8192, *arguments)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_gpus_are_asked_of_nvidia_smi(nvidia_smi, monkeypatch):
    nvidia_smi((16384, "A"), (49152, "B"))
    # Two GPUs, and the smaller one's memory counts.
    done = command(32768, "--a-device", 8192)
    assert done.stdout.splitlines()[0].startswith("GPUS=2 MAX_TOKENS=16384 UPDATE_FREQ=1 ")
    assert done.stdout.rstrip().endswith(" of 17.2 GB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    done = command(32768, "--a-device", 8192)
    assert done.stdout.startswith("GPUS=1 ") and done.stdout.rstrip().endswith(" of 51.5 GB")


def test_several_nodes_train_on_every_visible_gpu(nvidia_smi, monkeypatch):
    nvidia_smi(*[(32768, "A")] * 4)
    done = command(32768, "--a-device", 8192, "--nodes", 2, "--devices", 2)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "GPUS=2 of 4 with NODES=2" in done.stderr and "CUDA_VISIBLE_DEVICES=0,1" in done.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert command(32768, "--a-device", 8192, "--nodes", 2, "--devices", 2).returncode == 0
