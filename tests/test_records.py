"""A checkpoint's weights read one storage at a time: right, and only if they are what was written."""

from __future__ import annotations

import os
import pickle
import threading
import zipfile

import pytest
import torch
from test_checkpoint import admin, save

from fairseq_admin.checkpoints.records import Source
from fairseq_admin.errors import AdminError


def read_all(path):
    with Source(path) as source:
        return {key: source.tensor(key, {}) for key in source.entries}


def test_every_entry_is_what_torch_reads(tmp_path):
    model = admin().state_dict()
    model.update(
        count=torch.tensor(7), flag=torch.tensor([True, False]), half=torch.ones(3).half(), none=torch.empty(0, 3)
    )
    model.update(part=torch.arange(10.0)[2:8:2], brain=torch.full((2, 2), 3.0).bfloat16())
    path = save(tmp_path / "c.pt", model)
    found = read_all(path)
    assert list(found) == list(model)
    for key, tensor in torch.load(path, weights_only=True)["model"].items():
        assert found[key].dtype == tensor.dtype and found[key].shape == tensor.shape and torch.equal(found[key], tensor)


def test_a_storage_is_read_once_where_it_is_kept(tmp_path):
    with Source(save(tmp_path / "c.pt", admin().state_dict())) as source:
        storages = {}
        one = source.tensor("encoder.embed_tokens.weight", storages)
        assert (
            source.tensor("decoder.embed_tokens.weight", storages).data_ptr() == one.data_ptr() and len(storages) == 1
        )
        source.tensor("encoder.layers.0.fc1.weight", storages)
        assert len(storages) == 2


def place(path, suffix):
    """First byte and size of the zip record whose content ends in these bytes of a tensor."""
    whole = path.read_bytes()
    at = whole.index(suffix)
    return at, len(suffix)


@pytest.mark.parametrize(
    "key", ["encoder.embed_tokens.weight", "decoder.layers.1.fc2.bias", "decoder.output_projection.weight"]
)
def test_zeroed_bytes_are_found(tmp_path, key):
    """torch.load accepts them as weights, mapped or not."""
    model = {
        k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for k, v in admin().state_dict().items()
    }
    model[key] = model[key] + 1
    path = save(tmp_path / "c.pt", model)
    at, size = place(path, model[key].numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(at + size // 2)
        file.write(bytes(16))
    assert not torch.equal(torch.load(path, weights_only=True)["model"][key], model[key])
    with pytest.raises(AdminError, match=rf"c\.pt: not a whole checkpoint \({key} does not match its checksum\)"):
        read_all(path)


def test_what_is_not_read_is_not_checked(tmp_path):
    """Optimizer state is not even touched."""
    moments = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    path = save(tmp_path / "c.pt", {"w": torch.ones(3)}, last_optimizer_state={"m": moments})
    at, size = place(path, moments.numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes(size))
    assert read_all(path)["w"].eq(1).all()
    with Source(path) as source:
        assert "last_optimizer_state" not in source.checkpoint.state


@pytest.mark.parametrize("extra", [None, {}, {"epoch": 1, "ema": {"w": torch.zeros(3)}}])
def test_a_moving_average_is_not_read(tmp_path, extra):
    path = save(tmp_path / "c.pt", {"w": torch.ones(3)}, extra_state=extra)
    assert read_all(path)["w"].eq(1).all()
    with Source(path) as source:
        assert source.checkpoint.state["extra_state"] == ({"epoch": 1} if extra else extra)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated(tmp_path, share):
    path = save(tmp_path / "c.pt", admin().state_dict())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(AdminError, match=r"c\.pt.* (not a whole checkpoint|is not a torch file)"):
        read_all(path)


def test_any_damage_is_one_line_or_harmless(tmp_path):
    """64 zero bytes anywhere: the weights are right, or the refusal is ours and one line."""
    model = {f"layer{i}": torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    path = save(tmp_path / "c.pt", model, last_optimizer_state=None)
    whole, refusals = path.read_bytes(), 0
    for at in range(0, len(whole), 32):
        path.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
        try:
            found = read_all(path)
        except AdminError as error:
            refusals += 1
            assert "\n" not in str(error)
        else:
            assert found.keys() == model.keys() and all(torch.equal(found[key], model[key]) for key in model), at
    assert refusals > 10


def test_damaged_names(tmp_path):
    """torch looks at no checksum of the pickle, either: an entry under another name would pass for that one."""
    path = save(tmp_path / "c.pt", {"encoder.first": torch.ones(3)})
    path.write_bytes(path.read_bytes().replace(b"encoder.first", b"encoder.burst"))
    assert "encoder.burst" in torch.load(path, weights_only=True)["model"]
    with pytest.raises(AdminError, match=r"its zip directory cannot be read: Bad CRC-32 for file .*data\.pkl"):
        read_all(path)


def test_the_old_format_is_refused_with_a_way_out(tmp_path):
    state = {"model": {"w": torch.ones(2)}}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(AdminError, match=r"old\.pt is in the format of torch before 1\.6, .*torch\.save it again"):
        Source(tmp_path / "old.pt")


def test_what_is_no_torch_file_is_told_as_elsewhere(tmp_path):
    (tmp_path / "train.log").write_text("hello\n")
    with pytest.raises(AdminError, match=r"train\.log.* (is not a torch file|not a whole checkpoint)"):
        Source(tmp_path / "train.log")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/data/0", b"bytes")
    with pytest.raises(AdminError, match=r"other\.zip: not a whole checkpoint"):
        Source(tmp_path / "other.zip")
    (tmp_path / "c.pkl").write_bytes(pickle.dumps({"model": {}}))
    with pytest.raises(AdminError, match=r"c\.pkl"):
        Source(tmp_path / "c.pkl")


def test_a_pipe_is_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(
        AdminError, match=r"pipe\.pt is a pipe or a device; a file was expected\. Save what it gives to a file"
    ):
        # In its own thread, so that a read that blocks does not hang the suite.
        outcome = []
        thread = threading.Thread(target=lambda: outcome.append(_error(Source, tmp_path / "pipe.pt")), daemon=True)
        thread.start()
        thread.join(10)
        raise outcome[0]


def _error(action, *arguments):
    try:
        action(*arguments)
    except AdminError as error:
        return error


def test_a_record_that_is_no_storage(tmp_path):
    path = save(tmp_path / "c.pt", {"w": torch.ones(2)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("c/data/99", b"more")
    with pytest.raises(
        AdminError, match=r"c\.pt: not a whole checkpoint \(its records are not the storages it names\)"
    ):
        Source(path)


def test_a_file_replaced_meanwhile_is_read_as_it_was(tmp_path):
    path = save(tmp_path / "c.pt", {"w": torch.ones(2)})
    with Source(path) as source:
        os.replace(save(tmp_path / "other.pt", {"w": torch.zeros(2)}), path)
        assert source.tensor("w", {}).eq(1).all()
        path.unlink()
        assert source.tensor("w", {}).eq(1).all()


def test_a_file_written_over_meanwhile_is_refused(tmp_path):
    path = save(tmp_path / "c.pt", {"w": torch.ones(100000)})
    other = save(tmp_path / "other.pt", {"w": torch.zeros(100000)}).read_bytes()
    with Source(path) as source:
        path.write_bytes(other)
        with pytest.raises(AdminError, match="w does not match its checksum"):
            source.tensor("w", {})


def test_a_failing_disk_is_told_with_the_entry(tmp_path):
    class Failing:
        def seek(self, at):
            raise OSError(5, "Input/output error")

    with Source(save(tmp_path / "c.pt", {"w": torch.ones(2)})) as source:
        good, source._file = source._file, Failing()
        with pytest.raises(AdminError, match=r"c\.pt: w cannot be read \(.*Input/output error\)"):
            source.tensor("w", {})
        source._file = good


def test_the_file_is_closed(tmp_path):
    with Source(save(tmp_path / "c.pt", {"w": torch.ones(2)})) as source:
        pass
    assert source._file.closed
