"""Reading without running anything, taking over stock weights, writing whole files only."""

from __future__ import annotations

import argparse
import copy
import logging
import os
import pickle
import resource

import numpy
import pytest
import reference
import torch
from omegaconf import OmegaConf

from fairseq_admin import outputs
from fairseq_admin.checkpoints import files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance, state_dict


class Evil:
    """Unpickling it in the normal way leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def admin(seed=1, **options):
    return reference.build("transformer_admin_tiny", seed=seed, **options)


def save(path, model, updates=1, **more):
    history = [{"num_updates": 0}, {"num_updates": updates}]
    state = {
        "model": model,
        "optimizer_history": history,
        "last_optimizer_state": {"state": {0: torch.ones(3)}},
        **more,
    }
    torch.save(state, path)
    return path


def test_reads_what_fairseq_writes(tmp_path):
    state = {
        "model": admin().state_dict(),
        "args": argparse.Namespace(lr=[0.1]),
        "cfg": OmegaConf.create({"task": {"data": "here", "sizes": [1, 2]}}),
        "extra_state": {"val_loss": numpy.float64(3.5), "best": numpy.arange(3)},
    }
    torch.save(state, tmp_path / "c.pt")
    read = files.read(tmp_path / "c.pt")
    assert read["args"].lr == [0.1] and read["cfg"].task.sizes[1] == 2 and read["extra_state"]["val_loss"] == 3.5
    assert read["extra_state"]["best"].tolist() == [0, 1, 2]


def test_missing(tmp_path):
    with pytest.raises(AdminError, match=r"none\.pt: no such file; a fairseq checkpoint"):
        files.read(tmp_path / "none.pt")


def test_folder(tmp_path):
    with pytest.raises(AdminError, match="is a folder; a fairseq checkpoint"):
        files.read(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated(tmp_path, share):
    path = save(tmp_path / "c.pt", admin().state_dict())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(AdminError, match=r"c\.pt.* (not a whole checkpoint|is not a torch file)"):
        files.read(path)


@pytest.mark.parametrize(
    "text", ["hello\n", "2024-01-01 | INFO | fairseq_cli.train | loss 3.2\n" * 50, "\n", "(lp0\n", "}"]
)
def test_text(tmp_path, text):
    (tmp_path / "train.log").write_text(text)
    with pytest.raises(AdminError, match=r"train\.log.* (is not a torch file|not a whole checkpoint)"):
        files.read(tmp_path / "train.log")


@pytest.mark.parametrize("content", [torch.ones(3), [1, 2], {"weights": torch.ones(2)}, {"model": torch.ones(2)}])
def test_torch_file_that_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(AdminError, match=r"a torch file, but not a fairseq checkpoint \(it has no entry 'model'\)"):
        files.read(tmp_path / "c.pt")


@pytest.mark.parametrize("write", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state))])
def test_foreign_objects_are_named_and_not_run(tmp_path, write):
    path, touched = tmp_path / "c.pt", tmp_path / "touched"
    write({"model": {"w": torch.ones(2) if write is torch.save else 1}, "extra": Evil(touched)}, path)
    with pytest.raises(AdminError, match=r"c\.pt .*a fairseq checkpoint was expected\. Nothing in it was run"):
        files.read(path)
    assert not touched.exists()
    if write is torch.save:
        with pytest.raises(AdminError, match=r"holds an object of (io|_io)\.open"):
            files.read(path)
        torch.load(path, weights_only=False)["extra"].close()
        assert touched.exists()  # the unsafe way does run it


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("No space left on device\nframe #0: a C++ trace")]
)
def test_write_replaces_only_with_a_whole_file(tmp_path, monkeypatch, error):
    path = tmp_path / "c.pt"
    files.write({"model": {"w": torch.ones(2)}}, path)
    before = path.read_bytes()

    def full(state, part):
        part.write_bytes(before[:10])
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(AdminError, match=r"^.*c\.pt: could not be written \(.*No space left on device\)\..*\Z"):
        files.write({"model": {"w": torch.zeros(2)}}, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_write_into_a_missing_folder(tmp_path):
    with pytest.raises(
        AdminError, match=r"c\.pt: could not be written \(no folder .*none\)\. Make it, or give another"
    ):
        files.write({"model": {}}, tmp_path / "none" / "c.pt")


def test_write_on_a_full_disk(tmp_path):
    """Is it one line, is nothing left behind, and is what was there before still there?"""
    path = tmp_path / "c.pt"
    files.write({"model": {"w": torch.ones(2)}}, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A write past the limit fails as on a full disk, with another errno.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(AdminError, match=r"c\.pt: could not be written \(.+\)\. Is the disk full") as refusal:
            files.write({"model": {"w": torch.ones(1 << 20)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(refusal.value)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_write_under_ctrl_c_leaves_a_part_at_most(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    files.write({"model": {"w": torch.ones(2)}}, path)
    before = path.read_bytes()

    def interrupted(state, part):
        part.write_bytes(before[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write({"model": {}}, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["c.pt"]


@pytest.mark.parametrize("name", ["c.pt", "symbolic.pt", "hard.pt", "folder/../c.pt"])
def test_an_output_that_is_an_input_is_refused_by_any_name(tmp_path, name):
    source = save(tmp_path / "c.pt", {"w": torch.ones(2)})
    (tmp_path / "folder").mkdir()
    (tmp_path / "symbolic.pt").symlink_to(source)
    os.link(source, tmp_path / "hard.pt")
    (tmp_path / "free.pt").touch()
    with pytest.raises(AdminError, match=r"would overwrite its input .*c\.pt; give another --output"):
        outputs.check(tmp_path / name, [tmp_path / "missing.pt", source])
    outputs.check(tmp_path / "free.pt", [tmp_path / "missing.pt", source])
    outputs.check(tmp_path / "new.pt", [source])


SHARDED = r"shard0\.pt is one shard of a checkpoint; a whole one was expected\. Train without --use-sharded-state.*FSDP"


def test_shards_are_refused_by_name_unread(tmp_path):
    (tmp_path / "checkpoint_last-shard0.pt").write_text("of any content")
    with pytest.raises(AdminError, match=SHARDED):
        files.read(tmp_path / "checkpoint_last-shard0.pt")


def test_a_checkpoint_that_is_there_in_shards_only(tmp_path):
    (tmp_path / "checkpoint_last-shard0.pt").touch()
    with pytest.raises(AdminError, match=SHARDED):
        files.read(tmp_path / "checkpoint_last.pt")
    with pytest.raises(AdminError, match=r"checkpoint_last-shard1\.pt: no such file"):
        files.read(tmp_path / "checkpoint_last-shard1.pt")


@pytest.mark.parametrize("key", ["flat_param_0", "encoder.layers.0.flat_param_0"])
def test_shards_are_refused_by_content(tmp_path, key):
    path = save(tmp_path / "shard0.pt", {key: torch.ones(2)}, fsdp_metadata={"num_padded": [0]})
    with pytest.raises(AdminError, match=SHARDED):
        files.read(path)


def test_a_whole_checkpoint_of_sharded_training_is_read(tmp_path):
    path = save(tmp_path / "c.pt", admin().state_dict(), fsdp_metadata={"param_metadata": []})
    assert files.read(path)["model"].keys() == admin().state_dict().keys()


def test_write_then_read(tmp_path):
    model = admin().state_dict()
    files.write({"model": model}, tmp_path / "c.pt")
    read = files.read(tmp_path / "c.pt")["model"]
    assert read.keys() == model.keys() and all(torch.equal(read[key], model[key]) for key in model)
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_write_does_not_replace_what_is_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(AdminError, match="folder is a folder or a device; a file to write was expected"):
        files.write({"model": {}}, tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


DEPTHS = {"encoder": 2, "decoder": 2}


def test_adopt_completes_a_stock_model_with_omega_1(caplog):
    stock, expected = reference.build("transformer", **reference.TINY).state_dict(), admin().state_dict()
    for key in expected:
        if key.endswith(".omega_init"):
            expected[key].fill_(3)
    state = copy.copy(stock)
    with caplog.at_level(logging.INFO):
        state_dict.adopt(state, expected, DEPTHS)
    assert state.keys() == expected.keys()
    for key, tensor in state.items():
        if key.endswith(".omega_init"):
            assert tensor.eq(1).all() and tensor.shape == (64,)
        elif key.endswith(".omega_delta"):
            assert tensor.eq(0).all() and tensor.shape == (64,)
        elif key != provenance.KEY:
            assert tensor is stock[key]
    assert provenance.decode(state[provenance.KEY]) == {"rule": "stock checkpoint, omega = 1"}
    assert "every omega is 1, nothing will be profiled" in caplog.text


def test_what_only_fairseq_0122_stores_is_dropped():
    """Do its checkpoints, stock or ours, load strictly, whatever fairseq is installed?"""
    for arch in ("transformer", "transformer_admin"):
        state = reference.build(arch, **reference.TINY).state_dict()
        state["encoder.layers.1.in_proj_weight"] = torch.full((192, 64), 7.0)
        state["encoder.layers.0.fc2_bias"] = torch.full((64,), 7.0)
        state["decoder.embed_positions._float_tensor"] = torch.full((1,), 7.0)
        model = admin()
        model.load_state_dict(state, strict=True)
        assert not any("in_proj_weight" in key or "fc2_bias" in key for key in model.state_dict())


def test_adopt_leaves_an_admin_model_alone():
    model = admin()
    model(*reference.batch())
    state = model.state_dict()
    before = dict(state)
    state_dict.adopt(state, admin().state_dict(), DEPTHS)
    assert state == before


@pytest.mark.parametrize("stack, option", [("encoder", "--encoder-layers 2"), ("decoder", "--decoder-layers 2")])
def test_adopt_refuses_another_depth(stack, option):
    state = admin().state_dict()
    with pytest.raises(AdminError, match=f"checkpoint's {stack} has 2 layers and the model's has 3. Use .*{option}"):
        state_dict.adopt(state, state, {**DEPTHS, stack: 3})


def test_adopt_does_not_check_a_stack_to_be_pruned():
    state = admin().state_dict()
    state_dict.adopt(state, state, {"encoder": 2})


def test_adopt_refuses_pre_ln():
    pre_ln = reference.build("transformer", **reference.TINY, encoder_normalize_before=True).state_dict()
    with pytest.raises(AdminError, match=r"is a Pre-LN Transformer \(it has encoder\.layer_norm\)"):
        state_dict.adopt(pre_ln, admin().state_dict(), DEPTHS)


def test_omegas_stand_in_forward_order_and_include_what_was_learned():
    model = admin(encoder_layers=12)
    model(*reference.batch())
    with torch.no_grad():
        model.encoder.layers[10].final_layer_norm.omega_delta += 0.25
    found = state_dict.omegas(model.state_dict())
    assert list(found) == ["encoder", "decoder"]
    assert list(found["encoder"]) == [f"layers.{n}.{kind}" for n in range(12) for kind in ("self_attn", "ffn")]
    kinds = ("self_attn", "encoder_attn", "ffn")
    assert list(found["decoder"]) == [f"layers.{n}.{kind}" for n in range(2) for kind in kinds]
    norm = model.encoder.layers[10].final_layer_norm
    omega = found["encoder"]["layers.10.ffn"]
    assert omega.dtype == torch.float64 and torch.equal(omega, norm.omega_init.double() + norm.omega_delta.double())
    assert (omega - norm.omega_init).allclose(torch.tensor(0.25, dtype=torch.float64))
    assert found["encoder"]["layers.0.self_attn"].eq(1).all()


def test_stock_models_have_no_omega():
    assert state_dict.omegas(reference.build("transformer", **reference.TINY).state_dict()) == {}


def test_a_changed_byte_is_found(tmp_path):
    """torch.load itself would silently give the wrong weight."""
    path = save(tmp_path / "c.pt", {"encoder.w": torch.full((1000,), 1.5)})
    content = bytearray(path.read_bytes())
    at = content.index(torch.full((4,), 1.5).numpy().tobytes())
    content[at : at + 4] = bytes(4)
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["model"]["encoder.w"][0] == 0
    with pytest.raises(AdminError, match=r"c\.pt: not a whole checkpoint \(.*does not match its checksum\)"):
        files.read(path)


@pytest.mark.parametrize("error", [AdminError("not the same"), RuntimeError("in a forward"), KeyboardInterrupt()])
def test_a_check_that_fails_leaves_what_was_there(tmp_path, error):
    path = save(tmp_path / "c.pt", {})
    before = path.read_bytes()

    def check(written):
        assert files.read(written)["model"] == {"new": 1}
        raise error

    with pytest.raises(type(error)) as raised:
        files.write({"model": {"new": 1}}, path, check)
    assert raised.value is error and path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["c.pt"]
