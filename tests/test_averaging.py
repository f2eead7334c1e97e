"""Averaging: which checkpoints are chosen, which are refused and why, the right mean, and little memory."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch
from test_checkpoint import admin, save

from fairseq_admin.bar import Bar
from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance

TIED = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"]


def vectors(**values):
    """A model of one-element entries."""
    return {f"encoder.{name}": torch.tensor([float(value)]) for name, value in values.items()}


# Which files


def folder(tmp_path, *names):
    for name in names:
        (tmp_path / f"{name}.pt").touch()
    return tmp_path


EPOCHS = ["checkpoint9", "checkpoint10", "checkpoint2"]
UPDATES = ["checkpoint_1_90", "checkpoint_2_100", "checkpoint_2_1000"]
OTHERS = ["checkpoint_best", "checkpoint_last", "checkpoint.best_loss_3.20", "checkpoint11.pt", "xcheckpoint12"]


@pytest.mark.parametrize(
    "present, options, expected",
    [
        (EPOCHS + UPDATES, {}, ["checkpoint9", "checkpoint10"]),
        (UPDATES, {}, ["checkpoint_2_100", "checkpoint_2_1000"]),
        (EPOCHS + UPDATES, {"by": "updates"}, ["checkpoint_2_100", "checkpoint_2_1000"]),
        (EPOCHS + UPDATES, {"by": "epochs"}, ["checkpoint9", "checkpoint10"]),
    ],
)
@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_the_newest_of_a_folder(tmp_path, place, present, options, expected):
    """Checkpoints may be in the folder itself, or in its folder `checkpoints`, as in the recipes' runs."""
    (tmp_path / place).mkdir(exist_ok=True)
    (folder(tmp_path / place, *present, *OTHERS) / "checkpoint13.pt.part").touch()
    folder(tmp_path, "average")
    paths = averaging.choose([tmp_path], last=2, **options)
    assert paths == [tmp_path / place / f"{name}.pt" for name in expected]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["."], {}, "holds 3 checkpoints numbered by epochs and the last 5 were asked for. Lower --last"),
        (["."], {"by": "updates"}, r"no numbered checkpoint; expected names like checkpoint_3_900.pt \(updates\)"),
        (["two"], {}, r"no numbered checkpoint; .* checkpoint7.pt \(epochs\) or checkpoint_3_900.pt \(updates\)"),
        *(
            (inputs, {}, "is a folder; either one run folder or files were expected")
            for inputs in ([".", "two"], ["checkpoint9.pt", "two"], ["two", "two"])
        ),
    ],
)
def test_choices_that_are_refused(tmp_path, inputs, options, message):
    (tmp_path / "two").mkdir()
    folder(tmp_path, *EPOCHS, "checkpoint_last-shard0")
    with pytest.raises(AdminError, match=message):
        averaging.choose([tmp_path / name for name in inputs], last=5 if inputs == ["."] else None, **options)


# The mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_average_is_the_float64_mean(tmp_path, dtype):
    models = [admin(seed).to(dtype).state_dict() for seed in range(1, 6)]
    record = {"rule": "log", "version": "0.1.0"}
    for model in models:
        model[provenance.KEY] = provenance.encode(record).to(dtype)
    paths = [save(tmp_path / f"{n}.pt", model, updates=n) for n, model in enumerate(models)]
    mean = averaging.average(paths).weights
    assert mean.keys() == models[0].keys()
    for key, tensor in mean.items():
        expected = sum(model[key].double() for model in models) / 5
        assert tensor.dtype == dtype and torch.equal(tensor, expected.to(dtype)), key
    assert provenance.decode(mean[provenance.KEY]) == record


def test_the_rest_is_of_the_one_with_most_updates(tmp_path):
    """The newest file gives types, options and counts. Optimizer state and --store-ema's moving average are dropped."""
    paths = []
    for name, updates, dtype in (("a", 20, torch.float32), ("b", 100, torch.float16), ("c", 3, torch.bfloat16)):
        # A count that float64 cannot hold.
        model = {
            "encoder.w": torch.full((2,), updates, dtype=dtype),
            "encoder.count": torch.tensor(2**53 + updates + 1),
        }
        extra = {"ema": {"encoder.w": torch.ones(9)}, "ema_fp32_params": {"encoder.w": torch.ones(9)}, "epoch": name}
        args = argparse.Namespace(name=name)
        paths.append(save(tmp_path / name, model, updates, args=args, extra_state=extra))
    state = averaging.average(paths).state
    assert state["args"].name == "b" and state["optimizer_history"][-1]["num_updates"] == 100
    assert state["model"]["encoder.w"].tolist() == [41.0] * 2 and state["model"]["encoder.w"].dtype == torch.float16
    assert state["model"]["encoder.count"].item() == 2**53 + 101
    assert state["extra_state"] == {"epoch": "b"} and "last_optimizer_state" not in state


def test_entries_of_fairseq_0122_come_from_the_newest(tmp_path):
    """_float_tensor is uninitialised memory, which may be NaN. An adaptive softmax has one, too. Nothing reads it."""
    names, copy = ("embed_positions", "adaptive_softmax.head"), "encoder.layers.1.in_proj_weight"
    unread = {f"decoder.{name}._float_tensor": torch.tensor([float("nan")]) for name in names}
    models = [{**vectors(w=n), **unread, copy: torch.full((2,), float(n))} for n in range(3)]
    mean = averaging.average([save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]).weights
    assert mean["encoder.w"].item() == 1 and mean[copy].tolist() == [2.0, 2.0]
    assert all(mean[key].isnan().all() for key in unread)


# Tied tensors


def test_tied_entries_stay_tied_and_the_file_does_not_grow(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n, last_optimizer_state=None) for n in (1, 2)]
    averaging.average(paths).write(tmp_path / "out.pt")
    model = files.read(tmp_path / "out.pt")["model"]
    assert len({model[key].untyped_storage().data_ptr() for key in TIED}) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in model.values()}) == len(model) - 2
    # The zip's records contain the file's name. Another copy of the embeddings would add 3 %.
    assert (tmp_path / "out.pt").stat().st_size < 1.01 * paths[0].stat().st_size
    assert torch.equal(
        model[TIED[0]], ((admin(1).state_dict()[TIED[0]].double() + admin(2).state_dict()[TIED[0]]) / 2).float()
    )


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_checkpoints_that_disagree_about_what_is_tied(tmp_path, newest):
    """One file ties a, b and c, another a and b, the third none: each entry gets its own mean, whichever is newest."""
    all_tied, two_tied = torch.tensor([3.0]), torch.tensor([6.0])
    models = [
        {"a": all_tied, "b": all_tied, "c": all_tied, "d": all_tied},
        {"a": two_tied, "b": two_tied, "c": torch.tensor([12.0]), "d": two_tied},
        {"a": torch.tensor([0.0]), "b": torch.tensor([30.0]), "c": torch.tensor([60.0]), "d": torch.tensor([90.0])},
    ]
    models[2]["d"] = models[2]["b"]
    paths = [save(tmp_path / f"{n}.pt", model, 9 if n == newest else n) for n, model in enumerate(models)]
    mean = averaging.average(paths).weights
    assert {key: tensor.item() for key, tensor in mean.items()} == {"a": 3.0, "b": 13.0, "c": 25.0, "d": 13.0}
    # b and d are one tensor in every file; a and c only in some.
    assert mean["b"] is mean["d"] and len({tensor.data_ptr() for tensor in mean.values()}) == 3


# Memory


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
    at_start, used, mean = _status("RssAnon"), [], averaging._mean

    def seen(*arguments):
        used.append(_status("RssAnon") - at_start)
        return mean(*arguments)

    monkeypatch.setattr(averaging, "_mean", seen)
    averaging.average(paths)
    # The result takes 1 · size. Loading one whole file would exceed 3 · size.
    assert len(used) == 16 and max(used) < 1.5 * size


def _status(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


# Refusals


def refused(*paths):
    """The message of a refusal. It must be one line."""
    open_before = {*Bar._instances}  # tqdm registers every bar of the process
    with pytest.raises(AdminError) as refusal:
        averaging.average(paths)
    assert "\n" not in str(refusal.value)
    assert {*Bar._instances} <= open_before, "on a terminal the line would stand behind the bar"
    return str(refusal.value)


def record(**fields):
    return {**vectors(w=1), provenance.KEY: provenance.encode(fields) if fields else torch.zeros(256)}


PROFILE = "layers.0.final_layer_norm.omega_init"
STOCK = vectors(w=3)
OTHER_RUNS = {
    "another entry": (vectors(a=1), vectors(a=2, c=4), "the shape of encoder.c is missing in the first and (1,)"),
    "another shape": (STOCK, {"encoder.w": torch.ones(2)}, "the shape of encoder.w is (1,) in the first and (2,)"),
    "another rule": (record(rule="log"), record(rule="paper"), "omega's rule is log in the first and paper in the"),
    "another seed": (record(seed=7), record(seed=8), "omega's seed is 7 in the first and 8 in the second."),
    "not yet profiled": (record(), record(rule="log"), "omega's rule is missing in the first and log in the second"),
    "another dropout": (
        {**record(seed=1), **vectors(**{PROFILE: 1.31})},
        {**record(seed=1), **vectors(**{PROFILE: 1.52})},
        "the profiled omega of encoder.layers.0.final_layer_norm is 1.31 in the first and 1.52 in the second",
    ),
    "a stock model": (record(rule="log"), STOCK, f"the shape of {provenance.KEY} is (256,) in the first and missing"),
}


@pytest.mark.parametrize("what", OTHER_RUNS)
def test_a_checkpoint_of_another_run(tmp_path, what):
    *models, message = OTHER_RUNS[what]
    paths = [save(tmp_path / f"{n}.pt", {**model, "encoder.n": torch.ones(1) * n}) for n, model in enumerate(models)]
    refusal = refused(*paths)
    assert refusal.startswith(f"{paths[0]} and {paths[1]} are not of one run: ") and message in refusal
    three = [paths[0], save(tmp_path / "2.pt", {**models[0], "encoder.n": torch.zeros(1) - 1}), paths[1]]
    assert refused(*three) == refusal


def test_profiles_of_one_run_are_not_refused(tmp_path):
    """Profiles of one run may differ: half precision rounds them, and the authors' code trains our omega_init."""
    clinic = record(rule="reference", code="Transformer-Clinic")
    for name, first, second in (
        ("half", {**record(seed=1), **vectors(**{PROFILE: 1.31})}, vectors(**{PROFILE: 1.31})),
        ("clinic", {**clinic, **vectors(**{PROFILE: 1.31})}, vectors(**{PROFILE: 1.52})),
    ):
        second = {**first, **second, **vectors(w=2)}
        if name == "half":
            second = {key: tensor.half() for key, tensor in second.items()}
        averaging.average([save(tmp_path / f"{name}1.pt", first), save(tmp_path / f"{name}2.pt", second)])


@pytest.mark.parametrize("others", [0, 1])
def test_folded_models(tmp_path, others):
    paths = [save(tmp_path / "stock.pt", STOCK)][:others]
    folded = save(tmp_path / "folded.pt", vectors(w=1), 2, extra_state={"admin_fold": {"version": "0.1.0"}})
    assert "folded.pt is folded, and the fold is not linear in omega: average first" in refused(*paths, folded)


def test_the_same_weights_under_two_names(tmp_path):
    paths = [
        save(tmp_path / f"{name}.pt", vectors(w=1), n) for n, name in enumerate(("checkpoint3", "checkpoint_last"))
    ]
    paths.insert(1, save(tmp_path / "checkpoint2.pt", vectors(w=2)))
    (tmp_path / "symbolic.pt").symlink_to(paths[0])
    for again in (paths[2], tmp_path / "symbolic.pt", paths[0]):
        message = rf"{again.name} and .*checkpoint3\.pt hold the same weights; each checkpoint counts once"
        assert re.search(message, refused(*paths[:2], again))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_not_finite_is_told_with_file_and_entry(tmp_path, value, dtype):
    """NaN and infinity are refused, even if infinities cancel. Large half-precision values stay finite in the mean."""
    models = [{"encoder.w": torch.full((9,), 65504.0 - 32 * n).to(dtype)} for n in range(3)]
    paths = [save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]
    assert averaging.average(paths).weights["encoder.w"].eq(65472.0).all()
    models[1]["encoder.w"][5], models[1]["encoder.w"][6] = value, -value
    save(paths[1], models[1])
    message = r"1\.pt: encoder\.w holds NaN or infinity, 2 of 9 values: the run had diverged\. Leave this file out"
    assert re.search(message, refused(*paths))


def test_a_damaged_record_is_told_with_its_file(tmp_path):
    good, bad = save(tmp_path / "good.pt", record(rule="log")), record(rule="log")
    bad[provenance.KEY] = bad[provenance.KEY] / 2
    assert "bad.pt: admin_provenance holds no record" in refused(good, save(tmp_path / "bad.pt", bad))


def test_files_of_torch_before_1_6(tmp_path):
    """Files in torch's old format, such as the authors', can be averaged, although they cannot be memory-mapped."""
    paths = [tmp_path / f"{n}.pt" for n in (1, 3)]
    for n, path in zip((1, 3), paths):
        torch.save({"model": vectors(w=n)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(averaging.average(paths).weights["encoder.w"], torch.tensor([2.0]))
    assert "hold the same weights" in refused(paths[0], Path(shutil.copy(paths[0], tmp_path / "copy.pt")))


def test_a_file_that_is_replaced_meanwhile(tmp_path, monkeypatch):
    """If a running training replaces a checkpoint, the mean still uses the old file, never parts of both."""
    paths = [save(tmp_path / f"{n}.pt", vectors(w=n), n) for n in (1, 2)]
    mean = averaging._mean

    def replaced(*arguments):
        save(tmp_path / "new.pt", vectors(w=7)).replace(paths[1])
        return mean(*arguments)

    monkeypatch.setattr(averaging, "_mean", replaced)
    assert averaging.average(paths).weights["encoder.w"].item() == 1.5
