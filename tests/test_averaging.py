"""Which checkpoints are averaged, which are refused and why, and is the mean right, in little memory?"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import reference
import torch
from test_checkpoint import Evil, admin, save

from fairseq_admin.checkpoints import averaging, files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance

TIED = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"]


def plain_mean(paths):
    """The mean as anyone would take it: whole files, float32, each entry on its own."""
    models = [torch.load(path, weights_only=True)["model"] for path in paths]
    return {key: sum(model[key].float() for model in models) / len(models) for key in models[0]}


def profiled(seed=1, rule="reference"):
    model = admin(seed, admin_init=rule)
    model(*reference.batch())
    return model.state_dict()


def vectors(**values):
    """A model of one-element entries."""
    return {f"encoder.{name}": torch.tensor([float(value)]) for name, value in values.items()}


def refused(*paths):
    """The message of a refusal, which is one line."""
    with pytest.raises(AdminError) as refusal:
        averaging.average(paths)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


# Which files


def folder(tmp_path, *names):
    for name in names:
        (tmp_path / f"{name}.pt").touch()
    return tmp_path


EPOCHS = ["checkpoint9", "checkpoint10", "checkpoint2"]
UPDATES = ["checkpoint_1_90", "checkpoint_2_100", "checkpoint_2_1000"]
OTHERS = ["checkpoint_best", "checkpoint_last", "checkpoint.best_loss_3.20", "checkpoint11.pt", "xcheckpoint12"]


def names(paths):
    return [path.name[: -len(".pt")] for path in paths]


@pytest.mark.parametrize(
    "there, options, expected",
    [
        (EPOCHS + UPDATES, {}, ["checkpoint9", "checkpoint10"]),
        (UPDATES, {}, ["checkpoint_2_100", "checkpoint_2_1000"]),
        (EPOCHS + UPDATES, {"by": "updates"}, ["checkpoint_2_100", "checkpoint_2_1000"]),
        (EPOCHS + UPDATES, {"by": "epochs"}, ["checkpoint9", "checkpoint10"]),
        (EPOCHS + UPDATES, {"upto": 9}, ["checkpoint2", "checkpoint9"]),
        (EPOCHS + UPDATES, {"by": "updates", "upto": 999}, ["checkpoint_1_90", "checkpoint_2_100"]),
    ],
)
def test_newest(tmp_path, there, options, expected):
    (folder(tmp_path, *there, *OTHERS) / "checkpoint13.pt.part").touch()
    assert names(averaging.newest(tmp_path, 2, **options)) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "holds 3 checkpoints numbered by epochs and the last 5 were asked for. Lower --last, or train with"),
        ({"upto": 9}, "holds 2 checkpoints numbered by epochs up to 9 and the last 5 were asked for"),
        ({"by": "updates"}, "holds 0 checkpoints numbered by updates and the last 5 were asked for"),
    ],
)
def test_newest_refuses_too_few(tmp_path, options, message):
    with pytest.raises(AdminError, match=message):
        averaging.newest(folder(tmp_path, *EPOCHS, "checkpoint_last-shard0"), 5, **options)


def test_newest_tells_of_a_folder_of_shards(tmp_path):
    with pytest.raises(AdminError, match=r"checkpoint7-shard0\.pt is one shard of a checkpoint"):
        averaging.newest(folder(tmp_path, "checkpoint7-shard1", "checkpoint7-shard0"), 1)


def test_choose_takes_files_as_they_are_named(tmp_path):
    paths = [folder(tmp_path, *EPOCHS) / f"{name}.pt" for name in EPOCHS]
    assert averaging.choose(paths) == paths
    assert averaging.choose([tmp_path / "missing.pt"]) == [tmp_path / "missing.pt"]


def test_choose_takes_the_last_10_of_a_folder(tmp_path):
    folder(tmp_path, *(f"checkpoint{n}" for n in range(1, 13)))
    assert names(averaging.choose([tmp_path])) == [f"checkpoint{n}" for n in range(3, 13)]
    assert names(averaging.choose([tmp_path], last=1, upto=7)) == ["checkpoint7"]


def test_choose_looks_into_the_folder_checkpoints_of_a_run(tmp_path):
    """As in the recipes' runs; a folder that holds checkpoints itself is a --save-dir."""
    (tmp_path / "checkpoints").mkdir()
    folder(tmp_path / "checkpoints", "checkpoint1", "checkpoint2", "checkpoint3")
    folder(tmp_path, "average")
    assert averaging.choose([tmp_path], last=2) == [tmp_path / f"checkpoints/checkpoint{n}.pt" for n in (2, 3)]
    with pytest.raises(AdminError, match=r"/checkpoints holds 3 checkpoints numbered by epochs and the last 4"):
        averaging.choose([tmp_path], last=4)
    folder(tmp_path, "checkpoint7")
    assert averaging.choose([tmp_path], last=1) == [tmp_path / "checkpoint7.pt"]


def test_choose_refuses_folders_beside_anything(tmp_path):
    one, two = (tmp_path / name for name in ("one", "two"))
    one.mkdir(), two.mkdir()
    folder(one, "checkpoint1")
    for inputs in ([one, two], [one / "checkpoint1.pt", two], [one, one]):
        with pytest.raises(AdminError, match=r"(one|two) is a folder; either one run folder or files were expected"):
            averaging.choose(inputs)


def test_choose_refuses_a_file_twice_by_any_name(tmp_path):
    path = folder(tmp_path, "a", "b") / "a.pt"
    (tmp_path / "symbolic.pt").symlink_to(path)
    (tmp_path / "hard.pt").hardlink_to(path) if hasattr(path, "hardlink_to") else path.link_to(tmp_path / "hard.pt")
    for name in ("a", "symbolic", "hard", "../" + tmp_path.name + "/a"):
        with pytest.raises(AdminError, match=r"a\.pt are one file; each checkpoint counts once"):
            averaging.choose([path, tmp_path / "b.pt", tmp_path / f"{name}.pt"])


# The mean


def test_average_is_the_plain_mean(tmp_path):
    """Float32 sums of 5 numbers near 1 are off by less than 5 half-units in the last place, 3e-7."""
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n) for n in range(5)]
    mean, expected = averaging.average(paths).weights, plain_mean(paths)
    assert list(mean) == list(expected)
    for key in mean:
        torch.testing.assert_close(mean[key], expected[key], rtol=1e-6, atol=1e-6, msg=key)


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


def test_average_is_stored_in_the_newests_types(tmp_path):
    half, whole = admin(2).half().state_dict(), admin(1).state_dict()
    paths = [save(tmp_path / "half.pt", half, 2), save(tmp_path / "whole.pt", whole, 1)]
    found = averaging.average(paths).weights
    assert all(tensor.dtype == half[key].dtype for key, tensor in found.items())
    assert {tensor.dtype for key, tensor in found.items() if key != provenance.KEY} == {torch.float16}


def test_average_of_one_is_itself(tmp_path):
    model = admin().state_dict()
    mean = averaging.average([save(tmp_path / "c.pt", model)]).weights
    assert all(torch.equal(mean[key], model[key]) for key in model)


def test_average_takes_the_rest_from_the_one_with_most_updates(tmp_path):
    paths = []
    for name, updates in (("a", 20), ("b", 100), ("c", 3)):
        # A count that no float64 holds.
        model = {**vectors(w=updates), "encoder.count": torch.tensor(2**53 + updates + 1), "encoder.note": name}
        paths.append(save(tmp_path / name, model, updates, args=argparse.Namespace(name=name)))
    state = averaging.average(paths).state
    assert state["args"].name == "b" and state["optimizer_history"][-1]["num_updates"] == 100
    assert state["model"]["encoder.w"].tolist() == [41.0] and state["model"]["encoder.count"].item() == 2**53 + 101
    assert state["model"]["encoder.note"] == "b" and list(state["model"]) == [
        "encoder.w",
        "encoder.count",
        "encoder.note",
    ]
    assert "last_optimizer_state" not in state


def test_an_average_has_no_moving_average(tmp_path):
    """--store-ema puts one into every file, and in float32 once more; that of the newest is not the average's."""
    paths = []
    for n in (1, 2):
        ema = torch.randn(10_000, generator=torch.Generator().manual_seed(n))
        extra = {"ema": {"encoder.w": ema}, "ema_fp32_params": {"encoder.w": ema.double()}, "epoch": n}
        paths.append(save(tmp_path / f"{n}.pt", vectors(w=n), n, extra_state=extra))
    whole = paths[1].read_bytes()
    at = whole.index(ema.numpy().tobytes())
    paths[1].write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])  # of which no checksum would tell
    averaging.average(paths).write(tmp_path / "out.pt")
    state = files.read(tmp_path / "out.pt")
    assert state["extra_state"] == {"epoch": 2} and state["model"]["encoder.w"].item() == 1.5
    assert (tmp_path / "out.pt").stat().st_size < 10_000


def test_what_only_fairseq_0122_stores_is_the_newests(tmp_path):
    """Its _float_tensor is uninitialised memory, which may read as NaN."""
    key, copy = "encoder.embed_positions._float_tensor", "encoder.layers.1.in_proj_weight"
    models = [{**vectors(w=n), key: torch.tensor([float("nan")]), copy: torch.full((2,), float(n))} for n in range(3)]
    mean = averaging.average([save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]).weights
    assert mean["encoder.w"].item() == 1 and mean[key].isnan().all() and mean[copy].tolist() == [2.0, 2.0]


def test_average_of_stock_models(tmp_path):
    models = [reference.build("transformer", seed=n, **reference.TINY).state_dict() for n in (1, 2)]
    paths = [save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]
    key = "decoder.layers.1.fc1.weight"
    assert torch.equal(averaging.average(paths).weights[key], ((models[0][key].double() + models[1][key]) / 2).float())


def test_average_leaves_its_inputs_alone(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n) for n in (1, 2)]
    before = [path.read_bytes() for path in paths]
    averaging.average(paths).write(tmp_path / "out.pt")
    assert [path.read_bytes() for path in paths] == before


def test_averaged_then_written_and_read_is_the_same(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n) for n in (1, 2)]
    state = averaging.average(paths).state
    files.write(state, tmp_path / "out.pt")
    read = files.read(tmp_path / "out.pt")
    assert read.keys() == state.keys()
    assert all(torch.equal(read["model"][key], tensor) for key, tensor in state["model"].items())


# Tied tensors


def test_tied_entries_stay_tied_and_the_file_does_not_grow(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(n).state_dict(), n, last_optimizer_state=None) for n in (1, 2)]
    averaging.average(paths).write(tmp_path / "out.pt")
    model = files.read(tmp_path / "out.pt")["model"]
    assert len({model[key].untyped_storage().data_ptr() for key in TIED}) == 1
    assert len({tensor.untyped_storage().data_ptr() for tensor in model.values()}) == len(model) - 2
    # The zip's records contain the file's name; another copy of the embeddings would be 3 %.
    assert (tmp_path / "out.pt").stat().st_size < 1.01 * paths[0].stat().st_size
    assert torch.equal(
        model[TIED[0]], ((admin(1).state_dict()[TIED[0]].double() + admin(2).state_dict()[TIED[0]]) / 2).float()
    )


@pytest.mark.parametrize("newest", [0, 1, 2])
def test_checkpoints_that_disagree_about_what_is_tied(tmp_path, newest):
    """a, b, c tied in one file, a, b in another, none in the third: each has its mean, whichever is newest."""
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
    # b and d are one tensor in every file, a and c in some only.
    assert mean["b"] is mean["d"] and len({tensor.data_ptr() for tensor in mean.values()}) == 3


def test_views_of_one_storage(tmp_path):
    """Are parts, transposes and overlaps of a flat storage each themselves? (Flat optimizers make such entries.)"""
    models = []
    for n in (1, 2):
        flat = torch.randn(24, generator=torch.Generator().manual_seed(n))
        models.append(
            {"a": flat[:8].view(2, 4), "b": flat[8:].view(4, 4).t(), "c": flat[4:12], "d": flat.view(2, 12)[:, 3]}
        )
        models[-1]["empty"] = torch.empty(0, 5)
    paths = [save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]
    mean = averaging.average(paths).weights
    for key in models[0]:
        assert torch.equal(mean[key], ((models[0][key].double() + models[1][key]) / 2).float()), key


# Memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets the peak as Linux does")
def test_memory_is_the_result_and_little_more(tmp_path):
    """The model is 32 MiB, each file 96 MiB; of four files, one loaded or summed whole would show."""
    size = 2**25
    for n in range(4):
        generator = torch.Generator().manual_seed(n)
        model = {f"w{i}": torch.randn(size // 64, generator=generator) for i in range(16)}
        save(tmp_path / f"{n}.pt", model, n, last_optimizer_state={"a": torch.zeros(size // 2)})
    paths = [tmp_path / f"{n}.pt" for n in range(4)]
    averaging.average(paths[:1])  # pays for what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    averaging.average(paths)
    # The result is 1. In the heap of a long test process the 2 MiB storages leave holes, up to 2.4 in all were seen; a
    # file loaded whole makes it more than 4.
    assert _status("VmHWM") - before < 3 * size


def _status(name):
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


# Refusals


def test_another_entry_is_named(tmp_path):
    ours, more = vectors(a=1, b=2), vectors(a=1, c=4, b=3, d=5)
    paths = [save(tmp_path / "ours.pt", ours), save(tmp_path / "more.pt", more)]
    for pair in (paths, paths[::-1]):
        assert re.search(r"ours\.pt has no encoder\.c, and .*more\.pt has; checkpoints of one model", refused(*pair))


def test_another_shape_is_named(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", admin(words=n).state_dict()) for n in (100, 90)]
    message = r"90\.pt: encoder\.embed_tokens\.weight has shape \(94, 64\), and \(104, 64\) in .*100\.pt"
    assert re.search(message, refused(*paths))


def test_another_profile_is_named(tmp_path):
    paths = [save(tmp_path / f"{rule}.pt", profiled(rule=rule), n) for n, rule in enumerate(("reference", "paper"))]
    message = (
        r"reference\.pt and .*paper\.pt are not of one run: omega was profiled with rule reference in the first and "
    )
    assert re.search(message + "paper in the second", refused(*paths))


def test_another_seed_is_named_between_the_first_and_the_one_that_differs(tmp_path):
    paths = []
    for n, seed in enumerate((7, 7, 8)):
        model = {**vectors(w=n), provenance.KEY: provenance.encode({"rule": "log", "seed": seed})}
        paths.append(save(tmp_path / f"{n}.pt", model, n))
    assert re.search(r"0\.pt and .*2\.pt are not of one run: .* with seed 7 in the first and 8 in", refused(*paths))
    assert averaging.average(paths[:2]).weights["encoder.w"].item() == 0.5


def test_not_yet_profiled_beside_profiled(tmp_path):
    early = save(tmp_path / "early.pt", admin().state_dict())
    late = save(tmp_path / "late.pt", profiled(), 2)
    for pair in ((early, late), (late, early)):
        assert re.search(r"early\.pt was saved before omega was profiled, and .*late\.pt after it", refused(*pair))


def test_a_record_that_is_none_is_told_with_its_file(tmp_path):
    good, bad = profiled(), profiled()
    bad[provenance.KEY] = bad[provenance.KEY] / 2
    paths = [save(tmp_path / "good.pt", good), save(tmp_path / "bad.pt", bad)]
    assert re.search(r"bad\.pt: admin_provenance holds no record", refused(*paths))


def test_a_model_without_omega_beside_one_with_it(tmp_path):
    with_it = save(tmp_path / "with.pt", admin().state_dict())
    without = save(tmp_path / "without.pt", reference.build("transformer", **reference.TINY).state_dict())
    for pair in ((with_it, without), (without, with_it)):
        message = refused(*pair)
        assert re.search(r"without\.pt has no omega \(it is folded, or a stock model\) and .*with\.pt has", message)
        assert "average first, then fold. The fold is not linear in omega" in message


@pytest.mark.parametrize("beside", [[], ["stock"], ["admin"]])
def test_folded_models(tmp_path, beside):
    model = reference.build("transformer", **reference.TINY).state_dict()
    others = {"stock": model, "admin": admin().state_dict()}
    paths = [save(tmp_path / f"{name}.pt", others[name], extra_state={"epoch": 1}) for name in beside]
    folded = save(tmp_path / "folded.pt", model, 2, extra_state={"admin_fold": {"version": "0.1.0"}})
    message = refused(*paths, folded)
    assert re.search(r"folded\.pt is folded, and the fold is not linear in omega: average first, then fold", message)


def test_the_same_weights_under_two_names(tmp_path):
    model = admin().state_dict()
    paths = [save(tmp_path / f"{name}.pt", model, n) for n, name in enumerate(("checkpoint3", "checkpoint_last"))]
    paths.insert(1, save(tmp_path / "checkpoint2.pt", admin(2).state_dict()))
    message = r"checkpoint_last\.pt and .*checkpoint3\.pt hold the same weights; each checkpoint counts once"
    assert re.search(message, refused(*paths))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_not_finite_is_told_with_file_and_entry(tmp_path, value, dtype):
    models = [admin(n).to(dtype).state_dict() for n in range(3)]
    models[1]["decoder.layers.1.fc2.weight"][3, 5:7] = value
    paths = [save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)]
    message = (
        r"1\.pt: decoder\.layers\.1\.fc2\.weight holds NaN or infinity, 2 of 8192 values: the run had diverged\. Leave"
    )
    assert re.search(message, refused(*paths))


def test_opposite_infinities_do_not_hide(tmp_path):
    paths = [save(tmp_path / f"{n}.pt", vectors(w=value), n) for n, value in enumerate((float("inf"), -float("inf")))]
    assert re.search(r"0\.pt: encoder\.w holds NaN or infinity, 1 of 1 values", refused(*paths))


def test_half_precision_near_its_bound_is_finite(tmp_path):
    models = [{"encoder.w": torch.full((1000,), 65504.0 - 32 * n).half()} for n in range(3)]
    mean = averaging.average([save(tmp_path / f"{n}.pt", model, n) for n, model in enumerate(models)])
    assert mean.weights["encoder.w"].eq(65472.0).all()


def test_nothing_in_a_file_is_run(tmp_path):
    good, touched = save(tmp_path / "good.pt", vectors(w=1)), tmp_path / "touched"
    bad = save(tmp_path / "bad.pt", vectors(w=2), 2, extra_state=Evil(touched))
    assert re.search(r"bad\.pt holds an object of (io|_io)\.open; .*Nothing in it was run", refused(good, bad))
    assert not touched.exists()


def test_a_missing_file_or_a_folder(tmp_path):
    good = save(tmp_path / "good.pt", vectors(w=1))
    assert re.search(r"none\.pt: no such file", refused(good, tmp_path / "none.pt"))
    assert re.search(r" is a folder", refused(good, tmp_path))


def test_a_shard(tmp_path):
    good, shard = save(tmp_path / "good.pt", vectors(w=1)), save(tmp_path / "c-shard0.pt", vectors(w=2))
    assert re.search(r"c-shard0\.pt is one shard of a checkpoint", refused(good, shard))
