"""Does an update hold the same tokens on any machine, and is an impossible split refused?"""

from __future__ import annotations

import re

import pytest

from recipes import machines
from recipes.kinds import Demo
from recipes.steps.progress import progress

DEEP = {"TOKENS": "32768", "DEVICE_TOKENS": "8192"}
BY = {16: 8192, 32: 16384, 80: 32768}


def planned(*words: str, by: dict[int, int] | None = None) -> machines.Machines:
    given = {
        **DEEP,
        **dict(word.split("=") for word in words),
        "MAX_TOKENS": dict(w.split("=") for w in words).get("MAX_TOKENS"),
    }
    return machines.plan(Demo(**given, DEVICE="gpu", BY_MEMORY=by or {}))


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
    found = machines.fewest(tokens, workers, a_device)
    assert found == expected and found.max_tokens * found.update_freq * workers == tokens


@pytest.mark.parametrize(
    ("memory", "plan"), [(17.2, (8192, 2, 4096)), (42.9, (16384, 1, 8192)), (141.0, (16384, 1, 8192))]
)
def test_a_batch_is_the_tables_for_the_cards_memory(memory, plan):
    found = planned("GPUS=2", f"MEMORY={memory}", by=BY)
    assert (found.max_tokens, found.update_freq, found.less) == plan and found.tokens == 32768


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GPUS=3"], "an update of 32768 tokens does not split over 3 devices into equal batches"),
        (["GPUS=3"], "Take another number of devices (GPUS= times NODES=: 1, 2, 4, 8), or another batch"),
        (["GPUS=2", "MAX_TOKENS=3000"], "MAX_TOKENS=3000 on 2 devices does not make up an update of 32768"),
        (["GPUS=2", "MAX_TOKENS=3000"], "Take 2048, or leave MAX_TOKENS out"),
        (["GPUS=1", "MEMORY=11.5"], "a GPU has 11.5 GB, and this model was planned for 16 GB or more"),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(*words, by=BY)


def test_gpus_are_asked_of_nvidia_smi(nvidia_smi, monkeypatch):
    nvidia_smi((16384, "A"), (49152, "B"))
    # Two GPUs, and the smaller one's memory counts.
    found = planned(by=BY)
    assert (found.gpus, found.max_tokens, found.update_freq) == (2, 8192, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = planned(by=BY)
    assert (found.gpus, found.max_tokens, found.update_freq) == (1, 16384, 2)


def test_several_nodes_train_on_every_visible_gpu(nvidia_smi):
    nvidia_smi(*[(32768, "A")] * 4)
    with pytest.raises(ValueError, match="GPUS=2 of 4 with NODES=2: .* CUDA_VISIBLE_DEVICES=0,1"):
        planned("NODES=2", "GPUS=2", "MASTER=h:1")


def test_out_of_memory_names_the_batch_to_give():
    """Once, however often fairseq says so."""
    line = (
        "2026-01-01 00:00:00 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA out of memory."
    )
    shown = list(progress([line, line], less=4096))
    assert [text for text in shown if "MAX_TOKENS" in text] == [
        "Out of memory: stop this, and give MAX_TOKENS=4096; an update holds as many tokens as before."
    ]
