"""Weights record their dictionary. fairseq itself accepts any dictionary of the same size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.distributed import utils
from kinds import KINDS
from omegaconf import OmegaConf
from test_checkpoint import save
from torch import nn

from fairseq_admin import fingerprint
from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.method.schemes import stacks_of

BUILDS: dict[str, Callable[[], nn.Module]] = {
    "post-ln": lambda: KINDS["translation"].build(admin_scheme="post-ln"),
    **{name: kind.build for name, kind in KINDS.items()},
}


def other(build: Callable[[], Any], stack: str) -> Any:
    """A model in which one stack's dictionary has two words swapped."""
    model = build()
    dictionary = copy.deepcopy(stacks_of(model)[stack].dictionary)
    words = dictionary.symbols
    words[10], words[11] = words[11], words[10]
    stacks_of(model)[stack].dictionary = dictionary
    model.fingerprints[stack] = fingerprint.of_dictionary(dictionary)
    return model


@pytest.mark.parametrize("name", BUILDS)
def test_another_dictionary_of_the_same_size_is_refused(name: str, tmp_path: Path) -> None:
    """Another dictionary of the same size is refused for every scheme, even if the state dict has only stock keys."""
    model = BUILDS[name]()
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    state = files.read(tmp_path / "model.pt")["model"]
    expected = {side: fingerprint.of_dictionary(stack.dictionary) for side, stack in stacks_of(model).items()}
    assert fingerprint.read_fingerprints(state) == expected
    BUILDS[name]().load_state_dict(copy.copy(state))
    for stack in stacks_of(model):
        match = f"the checkpoint's {stack} was trained with another dictionary than the data's"
        with pytest.raises(AdminError, match=match):
            other(BUILDS[name], stack).load_state_dict(copy.copy(state))
        other(BUILDS[name], stack).load_state_dict(dict(state))  # older and stock checkpoints record no dictionary


def test_a_wrapper_keeps_the_fingerprints() -> None:
    """It works through wrappers such as data parallelism's, which prefix keys and bypass load_state_dict."""
    state = nn.ModuleDict({"module": BUILDS["translation"]()}).state_dict()
    assert set(fingerprint.read_fingerprints(state)) == {"encoder", "decoder"}
    with pytest.raises(AdminError, match="the checkpoint's decoder was trained with another dictionary"):
        nn.ModuleDict({"module": other(BUILDS["translation"], "decoder")}).load_state_dict(state)


def test_fairseqs_broadcast_keeps_the_fingerprints() -> None:
    """It works with several processes: the first one reads the checkpoint, and sends it to the others like this."""
    model, tensors = BUILDS["translation"](), []
    state = {"model": model.state_dict(), "cfg": OmegaConf.create({"task": "translation"})}
    received = utils._put_tensors_in_obj(utils._split_tensors_from_obj(state, tensors), tensors)
    assert fingerprint.read_fingerprints(received["model"]) == model.fingerprints and received["cfg"] == state["cfg"]


def saved(path: Path, model: nn.Module, updates: int) -> Path:
    """Save a checkpoint of the model, with changed weights."""
    with torch.no_grad():
        next(model.parameters()).add_(updates)
    return save(path, model.state_dict(), updates)


def test_averages_are_of_one_dictionary(tmp_path: Path) -> None:
    """An average needs one dictionary. For stock layers, only the fingerprint distinguishes the runs."""
    build = BUILDS["post-ln"]
    paths = [saved(tmp_path / f"{n}.pt", build(), n) for n in (1, 2)]
    averaged = averaging.average(paths)
    assert averaged.text == Checkpoint.read(paths[0]).text != {}
    older = Checkpoint.read(saved(tmp_path / "2.pt", build(), 3))
    older.state["model"] = dict(older.weights)  # it records no dictionary
    older.write(tmp_path / "older.pt")
    averaging.average([paths[0], tmp_path / "older.pt"])
    older.state["task_state"] = {fingerprint.KEY: {"encoder": "another"}}  # as before 0.2.0
    older.write(tmp_path / "3.pt")
    foreign = saved(tmp_path / "4.pt", other(build, "encoder"), 3)
    for path in (tmp_path / "3.pt", foreign):
        with pytest.raises(AdminError, match=r"1.pt and .*\.pt are not of one run: the dictionary of the encoder is "):
            averaging.average([paths[0], path])
