"""Averaging: the newest of a folder, the mean of any checkpoints of a run, and little memory.

test_refusals.py has what cannot be averaged."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import admin, save

from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance

UPDATES = st.sets(st.integers(1, 2000), max_size=5)
OTHERS = ["checkpoint_best", "checkpoint_last", "checkpoint.best_loss_3.20", "checkpoint11.pt", "xcheckpoint12"]


@given(epochs=UPDATES, updates=UPDATES, by=st.sampled_from([None, "epochs", "updates"]), last=st.integers(1, 4))
def test_the_newest_of_a_folder_have_the_largest_numbers(epochs, updates, by, last):
    """Checkpoints may be in the folder itself, or in its folder `checkpoints`, as in the recipes' runs."""
    names = {
        "epochs": [f"checkpoint{n}" for n in sorted(epochs)],
        "updates": [f"checkpoint_1_{n}" for n in sorted(updates)],
    }
    expected = names[by or ("epochs" if epochs else "updates")]
    with tempfile.TemporaryDirectory() as run:
        for place in (Path(run), Path(run, "checkpoints")):
            place.mkdir(exist_ok=True)
            for name in (*names["epochs"], *names["updates"], *OTHERS):
                (place / f"{name}.pt").touch()
            if len(expected) < last:
                with pytest.raises(AdminError, match="no numbered checkpoint" if not expected else "Lower --last"):
                    averaging.choose([Path(run)], last, by)
            else:
                assert averaging.choose([Path(run)], last, by) == [place / f"{name}.pt" for name in expected[-last:]]


def checkpoints_of_a_run(generator):
    """Models of one run, in any order of their updates, each with its own type and its own ties between entries."""
    models, updates = [], generator.sample([1, 2, 3, 4], generator.randint(1, 4))
    for number in updates:
        dtype = generator.choice([torch.float32, torch.float16, torch.bfloat16])
        # Numbers whose sum needs more bits than they have, and one whose sum float16 does not hold.
        numbers = torch.Generator().manual_seed(generator.randrange(10**6))
        large = torch.tensor([60000.0 + 32 * number])
        tensors = [torch.cat([torch.randn(40, generator=numbers), large]).to(dtype) for _ in range(4)]
        model = {name: generator.choice(tensors) for name in "abcd"}
        record = provenance.encode({"rule": "log", "version": "0.1.0"}).to(dtype)
        # A count that float64 cannot hold, and weights that fairseq 0.12.2 stores and nothing reads.
        unread = {
            "x.layers.1.in_proj_weight": torch.full((2,), float(number)),
            "x.head._float_tensor": torch.tensor([torch.nan]),
        }
        models.append({**model, **unread, provenance.KEY: record, "count": torch.tensor(2**53 + number)})
    return list(zip(updates, models))


@given(generator=st.randoms(use_true_random=True))
def test_the_average_is_the_mean_in_the_newest_types_and_ties_what_every_file_ties(generator):
    run = checkpoints_of_a_run(generator)
    with tempfile.TemporaryDirectory() as folder:
        result = averaging.average([save(Path(folder, f"{n}.pt"), model, n) for n, model in run])
        mean = {key: tensor.clone() for key, tensor in result.weights.items()}
        pointers = {key: result.weights[key].data_ptr() for key in "abcd"}
    number, newest = max(run, key=lambda pair: pair[0])
    assert result.updates == number and mean.keys() == newest.keys()
    for key in "abcd":
        expected = sum(model[key].double() for _, model in run) / len(run)
        assert mean[key].dtype == newest[key].dtype and torch.equal(mean[key], expected.to(newest[key].dtype)), key
        for other in "abcd":
            tied = all(model[key] is model[other] for _, model in run)
            assert (pointers[key] == pointers[other]) == tied, (key, other)
    assert mean["count"].item() == 2**53 + number and mean["x.layers.1.in_proj_weight"].tolist() == [number] * 2
    assert mean["x.head._float_tensor"].isnan().all()
    assert provenance.decode(mean[provenance.KEY]) == {"rule": "log", "version": "0.1.0"}


def test_the_rest_is_of_the_newest_without_optimizer_and_moving_average(tmp_path):
    paths = []
    for name, updates in (("a", 20), ("b", 100), ("c", 3)):
        extra = {"ema": {"w": torch.ones(9)}, "ema_fp32_params": {"w": torch.ones(9)}, "epoch": name}
        args = argparse.Namespace(name=name)
        paths.append(save(tmp_path / name, {"w": torch.ones(1) * updates}, updates, args=args, extra_state=extra))
    state = averaging.average(paths).state
    assert state["args"].name == "b" and state["optimizer_history"][-1]["num_updates"] == 100
    assert state["extra_state"] == {"epoch": "b"} and "last_optimizer_state" not in state


def test_tied_embeddings_are_written_once(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n, last_optimizer_state=None) for n in (1, 2)]
    averaging.average(paths).write(tmp_path / "out.pt")
    model = files.read(tmp_path / "out.pt")["model"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in model.values()}) == len(model) - 2
    # The zip's records contain the file's name. Another copy of the embeddings would add 3 %.
    assert (tmp_path / "out.pt").stat().st_size < 1.01 * paths[0].stat().st_size


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_memory_is_the_result_and_little_more(tmp_path, monkeypatch):
    """Averaging four files of 96 MiB, with models of 32 MiB, never loads or sums a whole file.

    Memory-mapped pages that were only read do not count: the system can reclaim them.
    """
    size = 2**25
    for n in range(4):
        generator = torch.Generator().manual_seed(n)
        model = {f"w{i}": torch.randn(size // 64, generator=generator) for i in range(16)}
        save(tmp_path / f"{n}.pt", model, n, last_optimizer_state={"a": torch.zeros(size // 2)})
    paths = [tmp_path / f"{n}.pt" for n in range(4)]
    averaging.average(paths[:1])  # warm up: imports and caches
    at_start, used, mean = anonymous_memory(), [], averaging._mean
    monkeypatch.setattr(averaging, "_mean", lambda *it: used.append(anonymous_memory() - at_start) or mean(*it))
    averaging.average(paths)
    # The result takes 1 · size. Loading one whole file would exceed 3 · size.
    assert len(used) == 16 and max(used) < 1.5 * size


def anonymous_memory():
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_profiles_of_one_run_may_differ(tmp_path):
    """Half precision rounds them, and the authors' code trains our omega_init."""
    omega = "encoder.layers.0.final_layer_norm.omega_init"
    for fields, other, dtype in (
        ({"seed": 1}, 1.31, torch.float16),
        ({"rule": "reference", "code": "Transformer-Clinic"}, 1.52, torch.float32),
    ):
        record = provenance.encode(fields)
        models = [
            {"w": torch.ones(1), omega: torch.tensor([1.31]), provenance.KEY: record},
            {"w": torch.zeros(1), omega: torch.tensor([other]).to(dtype), provenance.KEY: record.to(dtype)},
        ]
        averaging.average([save(tmp_path / f"{n}.pt", model) for n, model in enumerate(models)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_told_with_file_and_entry(tmp_path, value):
    """NaN and infinity are refused, even if infinities cancel."""
    models = [{"w": torch.full((9,), float(n))} for n in range(3)]
    models[1]["w"][5], models[1]["w"][6] = value, -value
    message = r"1\.pt: w holds NaN or infinity, 2 of 9 values: the run had diverged\. Leave this file out"
    with pytest.raises(AdminError, match=message):
        averaging.average([save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)])


def test_files_of_torch_before_1_6(tmp_path):
    """Files in torch's old format, such as the authors', can be averaged, although they cannot be memory-mapped."""
    paths = [tmp_path / f"{n}.pt" for n in (1, 3)]
    for n, path in zip((1, 3), paths):
        torch.save({"model": {"w": torch.tensor([float(n)])}}, path, _use_new_zipfile_serialization=False)
    assert averaging.average(paths).weights["w"].item() == 2
    with pytest.raises(AdminError, match="hold the same weights"):
        averaging.average([paths[0], paths[0]])


def test_a_file_that_a_training_replaces_meanwhile_is_read_whole(tmp_path, monkeypatch):
    paths = [save(tmp_path / f"{n}.pt", {"w": torch.tensor([float(n)])}, n) for n in (1, 2)]
    mean = averaging._mean

    def replaced(*arguments):
        save(tmp_path / "new.pt", {"w": torch.tensor([7.0])}).replace(paths[1])
        return mean(*arguments)

    monkeypatch.setattr(averaging, "_mean", replaced)
    assert averaging.average(paths).weights["w"].item() == 1.5
