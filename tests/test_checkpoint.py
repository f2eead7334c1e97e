"""Checkpoints: reading runs no code, writing is all or nothing, and stock weights load."""

from __future__ import annotations

import argparse
import enum
import zipfile

import numpy
import pytest
import reference
import torch
from omegaconf import OmegaConf

from fairseq_admin.checkpoints import files
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.method import state_dict


def admin(seed=1, **options):
    return reference.build("transformer_admin_tiny", seed=seed, **options)


def save(path, model, updates=1, **more):
    history = [{"num_updates": 0}, {"num_updates": updates}]
    state = {"model": model, "optimizer_history": history, "last_optimizer_state": {"state": {0: torch.ones(3)}}}
    torch.save({**state, **more}, path)
    return path


# Reading --------------------------------------------------------------------------------------------------------------


def test_reads_what_fairseq_writes(tmp_path):
    model = admin().state_dict()
    options = OmegaConf.create({"task": {"data": "here", "sizes": [1, 2]}})
    extra = {"val_loss": numpy.float64(3.5), "best": numpy.arange(3)}
    path = save(tmp_path / "c.pt", model, args=argparse.Namespace(lr=[0.1]), cfg=options, extra_state=extra)
    state = files.read(path)
    assert state["args"].lr == [0.1] and state["cfg"].task.sizes[1] == 2 and state["extra_state"]["val_loss"] == 3.5
    assert state["extra_state"]["best"].tolist() == [0, 1, 2]
    assert all(torch.equal(state["model"][key], tensor) for key, tensor in model.items())


def test_reads_what_numpy_1_wrote(tmp_path):
    """numpy 1 pickled --eval-bleu's counts under module names that numpy 2 has moved. They still load."""
    extra = {"bleu": numpy.float64(3.5), "counts": numpy.arange(3)}
    path = save(tmp_path / "c.pt", {}, extra_state=extra)
    with zipfile.ZipFile(path) as new, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for record in new.infolist():
            old.writestr(record, new.read(record).replace(b"numpy._core.", b"numpy.core."))
    extra_read = files.read(tmp_path / "old.pt")["extra_state"]
    assert extra_read["bleu"] == 3.5 and extra_read["counts"].tolist() == [0, 1, 2]


class Choice(enum.Enum):
    last = "last"


def test_options_of_an_older_file_are_plain_values():
    """omegaconf options become plain values, even if they refer to other sections or hold enum members."""
    model = {"_name": "transformer", "max_source_positions": "${task.longest}", "kept": Choice.last}
    cfg = OmegaConf.create({"model": model, "task": {"longest": 64}, "criterion": {}})
    flat = Checkpoint({"args": None, "cfg": cfg}).options.model
    assert type(flat) is dict and flat == {"_name": "transformer", "max_source_positions": 64, "kept": "last"}


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [AdminError("not the same"), RuntimeError("in a forward"), KeyboardInterrupt()])
def test_a_check_that_fails_leaves_what_was_there(tmp_path, error):
    path = save(tmp_path / "c.pt", {})
    content = path.read_bytes()
    with pytest.raises(type(error)) as raised, files.saved({"model": {"new": torch.ones(1)}}, path) as written:
        assert files.read(written)["model"].keys() == {"new"}
        raise error
    assert raised.value is error and path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


# State dicts ----------------------------------------------------------------------------------------------------------


def test_entries_of_fairseq_0122_are_dropped():
    """Checkpoints of fairseq 0.12.2, stock or ours, load strictly with any version of fairseq."""
    for arch in ("transformer", "transformer_admin"):
        state = reference.build(arch, **reference.TINY).state_dict()
        state["encoder.layers.1.in_proj_weight"] = torch.full((192, 64), 7.0)
        state["encoder.layers.0.fc2_bias"] = torch.full((64,), 7.0)
        state["decoder.embed_positions._float_tensor"] = torch.full((1,), 7.0)
        model = admin()
        model.load_state_dict(state, strict=True)
        assert not any("in_proj_weight" in key or "fc2_bias" in key for key in model.state_dict())


def test_separate_embeddings_are_not_loaded_into_one():
    state = reference.build("transformer", **reference.TINY, share_all_embeddings=False).state_dict()
    message = "encoder.embed_tokens.weight and decoder.embed_tokens.weight differ in the checkpoint and are one tensor"
    with pytest.raises(AdminError, match=message):
        admin(share_all_embeddings=True).load_state_dict(state)


def load_in_place(model, state):
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(state[key])


LOADING = {
    "the model": lambda model, state: model.load_state_dict(state),
    "a module around it": lambda model, state: torch.nn.ModuleList([model]).load_state_dict(
        {f"0.{key}": tensor for key, tensor in state.items()}
    ),
    "in place": load_in_place,
}


@pytest.mark.parametrize("how", LOADING)
def test_loaded_weights_are_not_profiled_again(how):
    """The record in the state dict marks weights as profiled, however they are loaded."""
    saved = admin()
    saved(*reference.batch())
    model = admin(seed=2)
    LOADING[how](model, saved.state_dict())
    model(*reference.batch(seed=5))
    assert all(torch.equal(tensor, saved.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_loaded_weights_without_a_profile_are_profiled():
    model, unprofiled = admin(), admin(seed=2).state_dict()
    model(*reference.batch())
    model.load_state_dict(unprofiled)
    model(*reference.batch())
    assert any(omega.ne(1).any() for omega in state_dict.omegas(model.state_dict())["encoder"].values())


def test_omegas_are_in_forward_order():
    """Layer 10 comes after layer 9, not after layer 1."""
    omegas = state_dict.omegas(admin(encoder_layers=12).state_dict())
    assert list(omegas["encoder"]) == [f"layers.{n}.{kind}" for n in range(12) for kind in ("self_attn", "ffn")]
    assert state_dict.omegas(reference.build("transformer", **reference.TINY).state_dict()) == {}
