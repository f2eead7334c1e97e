"""The monitor: does it log the right numbers, once an update, without changing the training?"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from conftest import TRAIN, Completed
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_admin.core.omega import omega_from_depth
from fairseq_admin.method.profile_rules import variance
from fairseq_admin.method.schemes import stacks_of
from fairseq_admin.monitor.monitor import StackProbe

SIZES = {**reference.TINY, "encoder_layers": 3, "decoder_layers": 2}


def tiny(scheme: str = "admin", **options: Any) -> Any:
    return reference.build("transformer_admin", **{**SIZES, "dropout": 0.0, "admin_scheme": scheme, **options})


class Measured:
    """A sub-layer written out, which records Var[f] and β_{i,i} of one stack over its real positions (T, B)."""

    def __init__(self, scheme: str, real: Tensor) -> None:
        self.scheme, self.real = scheme, real
        self.variances: list[float] = []
        self.betas: list[float] = []

    def __call__(self, x: Tensor, f: reference.Branch, norm: Any) -> Tensor:
        branch = f(reference.normalised(x, norm) if self.scheme == "pre-ln" else x)
        total = (norm.omega if self.scheme == "admin" else 1.0) * x + branch
        total = total + f.bottom if self.scheme == "b2t" and f.bottom is not None else total
        shares = [f.var(unbiased=False) / t.var(unbiased=False) for f, t in zip(branch[self.real], total[self.real])]
        self.variances.append(reference.variance(branch, self.real))
        self.betas.append(math.sqrt(sum(shares) / len(shares)))
        return total if self.scheme == "pre-ln" else reference.normalised(total, norm)


@pytest.mark.parametrize("scheme", ["admin", "post-ln", "pre-ln", "b2t"])
@torch.no_grad()
def test_against_the_layers_written_out_in_float64(scheme: str) -> None:
    """Do variance, β and ω equal those of the layers' own branches, over all positions except padding?"""
    model, (src, lengths, prev) = tiny(scheme), reference.batch()
    model(src, lengths, prev)  # profiles
    for name, parameter in model.named_parameters():  # a different ω at every channel, as after training
        if name.endswith("omega_delta"):
            parameter.uniform_(-0.4, 0.6, generator=torch.Generator().manual_seed(3))
    words = {"encoder": src, "decoder": prev}
    measured = {side: Measured(scheme, tokens.t().ne(reference.PAD)) for side, tokens in words.items()}
    reference.by_hand(copy.deepcopy(model).double(), words, measured)
    probes = {side: StackProbe(stack, words[side], variances=True) for side, stack in stacks_of(model).items()}
    model(src, lengths, prev)
    for side, probe in probes.items():
        variances, betas = measured[side].variances, measured[side].betas
        assert len(betas) == 6 and max(betas) > 1.2 * min(betas)
        # Activations are float32: each is off by a few roundings of 6e-8.
        assert [branch.item() for branch in probe.branches] == pytest.approx(variances, rel=1e-5)
        assert [share.sqrt().item() for share in probe.shares] == pytest.approx(betas, rel=1e-5)
        expected = {"beta_mean": sum(betas) / 6, "beta_max": max(betas), "branch_variance": sum(variances) / 6}
        if scheme == "admin":
            omegas = torch.stack([m.omega for m in stacks_of(model)[side].modules() if hasattr(m, "omega")])
            assert omegas.min() < 0.9
            expected |= {f"omega_{name}": getattr(omegas, name)().item() for name in ("min", "mean", "max")}
        assert {name: value.item() for name, value in probe.values().items()} == pytest.approx(expected, rel=1e-5)


def steps(model: Any, batches: list[list[tuple]], updates: int = 5) -> list[dict[str, float]]:
    """Train as fairseq's trainer does, with several batches per update. Returns the logged values of each update."""
    optimizer, shown = torch.optim.Adam(model.parameters(), lr=1e-3), []
    metrics.reset()
    for update in range(updates):
        torch.manual_seed(update)
        model.train()
        with metrics.aggregate("train"):
            optimizer.zero_grad()
            for src, lengths, prev in batches[update % len(batches)]:
                model.set_num_updates(update)
                model(src, lengths, prev)[0].float().logsumexp(-1).sum().backward()
            model.all_reduce_grads()
            for weight in model.parameters():
                weight.grad = None if weight.grad is None else weight.grad / 10
            metrics.log_scalar("gnorm", nn.utils.clip_grad_norm_(model.parameters(), 1e9), weight=0)
            optimizer.step()
        shown.append({name: float(meter.val) for name, meter in metrics.get_meters("train").items()})
    return shown


@pytest.mark.parametrize("options", [{}, {"encoder_layerdrop": 0.5}], ids=["plain", "layerdrop"])
@pytest.mark.parametrize("fast", ["on", "off"])
def test_measuring_changes_no_weight(fast: str, options: dict) -> None:
    """Are weights and profiled ω the same, bit for bit, with and without measurements?"""
    batches = [[reference.batch(seed=seed)] for seed in range(3)]
    weights = []
    for every in (0, 1):
        model = tiny(dropout=0.1, admin_fast=fast, admin_monitor=every, log_interval=1000, **options)
        shown = steps(model, batches, updates=3)
        assert ("encoder_beta_mean" in shown[-1]) == bool(every)
        weights.append(model.state_dict())
        assert not any("residual_connection" in vars(module) for module in model.modules())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_layerdrop_hides_no_omega_and_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """With layerdrop, does the log show every layer's ω once each layer has run?

    β of a stack may count only in updates in which all its layers ran.
    """
    model = tiny(admin_monitor=1, admin_init="log", encoder_layerdrop=0.3)
    ran: dict[int, int] = {}
    compared: dict[int, set[str]] = {}
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda *_: ran.update({update: ran.get(update, 0) + 1}))
    monkeypatch.setattr(model.monitor.rule, "warnings", lambda at, shares, loss: compared.update({at: {*shares}}) or [])
    torch.manual_seed(1)
    for update in range(1, 21):
        metrics.reset()
        metrics.log_scalar("loss", 5.0)
        model.set_num_updates(update - 1)
        model(*reference.batch())[0].sum().backward()
        model.all_reduce_grads()
    assert {3} < set(ran.values()) and compared == {
        update: {"encoder", "decoder"} if ran.get(update) == 3 else {"decoder"} for update in range(1, 20)
    }
    assert model.monitor.shown["encoder_omega_mean"] == pytest.approx(omega_from_depth("log", 6), rel=1e-3)


def test_omega_alone_is_shown_unless_asked_for_more() -> None:
    """Without --admin-monitor, does the log show only ω, and nothing for a scheme without ω?"""
    batches = [[reference.batch()]]
    names = {f"{side}_omega_{value}" for side in ("encoder", "decoder") for value in ("min", "mean", "max")}
    assert set(steps(tiny(log_interval=1), batches, updates=3)[-1]) == {*names, "gnorm"}
    without = tiny("post-ln", log_interval=1)
    assert set(steps(without, batches, updates=3)[-1]) == {"gnorm"} and not without.monitor.every


def test_checkpointed_layers_are_measured_once() -> None:
    """Are the logged values the same if the backward recomputes layers?"""
    batches = [[reference.batch(seed=seed)] for seed in range(3)]
    plain, again = (
        steps(tiny(admin_monitor=1, checkpoint_activations=recomputed), batches) for recomputed in (False, True)
    )
    assert plain[-1] == pytest.approx(again[-1], rel=1e-5) and len(plain[-1]) == 15


@pytest.mark.parametrize(("which", "freq"), [(1, 1), (6, 2)])
def test_a_batch_that_runs_out_of_memory_is_not_shown(which: int, freq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch runs out of memory, is the next one measured, and the partial measurement dropped?"""
    real, calls = variance, itertools.count(1)

    def scarce(*arguments: Any) -> Tensor:
        if next(calls) == which:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return real(*arguments)

    metrics.reset()  # remove other tests' gradient norms
    model, whole = (tiny(admin_monitor=1, admin_init="log") for _ in range(2))
    whole.set_num_updates(0)
    whole(*reference.batch(seed=2))
    whole.set_num_updates(1)
    monkeypatch.setattr("fairseq_admin.monitor.monitor.variance", scarce)
    model.set_num_updates(0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        model(*reference.batch(seed=1, sentences=3, source=5))
    for seed in range(freq):
        model.set_num_updates(0)
        model(*reference.batch(seed=2 + seed))[0].sum().backward()
    model.all_reduce_grads()
    model.set_num_updates(1)
    assert model.monitor.shown == whole.monitor.shown and len(whole.monitor.shown) > 6
    assert not any("residual_connection" in vars(module) for module in model.modules())


def test_gradients_are_of_the_whole_update() -> None:
    """Are the stacks' gradient norms taken over all batches of an update, in the units of fairseq's own norm?"""
    batches = [[reference.batch(seed=seed), reference.batch(seed=seed + 1)] for seed in (1, 7)]
    shown = steps(tiny(admin_monitor=1), batches, updates=3)[-1]
    model = tiny()
    steps(model, batches, updates=2)
    # The model still holds the gradients of update 1, which the log shows with update 2.
    for side, stack in stacks_of(model).items():
        squares = sum(weight.grad.double().square().sum() for weight in stack.layers.parameters())
        assert shown[f"{side}_gnorm"] == pytest.approx(math.sqrt(squares), rel=1e-3)  # logged with four digits
    assert shown["encoder_gnorm"] != pytest.approx(shown["decoder_gnorm"], rel=0.01)


def test_the_first_batch_of_updates_1_3_and_7_is_measured() -> None:
    """With --admin-monitor 4, the log has them after updates 4 and 8."""
    model, due = tiny(admin_monitor=4), []
    for update in range(9):
        for batch in range(2):
            model.set_num_updates(update)
            due += [(update, batch)] * model.monitor.due
            model(*reference.batch())
        model.all_reduce_grads()
    assert due == [(0, 0), (2, 0), (6, 0)]


@pytest.mark.parametrize("start", [0, 5000])
def test_the_first_update_from_a_checkpoint_is_measured(start: int) -> None:
    """Is this update measured, even if the update count restarts (--finetune-from-model, --reset-optimizer)?"""
    model = tiny(admin_monitor=4)
    model.set_num_updates(5000)  # fairseq calls it before it loads the weights
    model.load_state_dict(tiny().state_dict())
    model.set_num_updates(start)
    assert model.monitor.due


def test_a_skipped_update_is_measured_again() -> None:
    """Do the logged values come from the attempt that became the update, not from one with overflowing gradients?"""
    (src, lengths, prev), shown = reference.batch(), []
    for skipped in (0, 2):
        model = tiny(admin_monitor=1)
        model(src, lengths, prev)  # profiles
        for attempt in range(skipped + 1):
            with torch.no_grad():
                model.encoder.layers[1].fc1.weight.mul_(1e30 if attempt < skipped else 1)
            for _ in range(2):  # batches
                model.set_num_updates(0)
                model(src, lengths, prev)
            model.all_reduce_grads()
            with torch.no_grad():
                model.encoder.layers[1].fc1.weight.div_(1e30 if attempt < skipped else 1)
        model.set_num_updates(1)
        shown.append(model.monitor.shown)
    assert shown[0] == shown[1] and math.isfinite(shown[1]["encoder_beta_mean"])


def test_the_values_are_in_the_log_and_on_tensorboard(
    corpus: Path, tmp_path: Path, run: Callable[..., Completed]
) -> None:
    """Does fairseq-train write the values of --admin-monitor to its log and to TensorBoard?"""
    arguments = [corpus, *TRAIN, "--log-format", "json", "--max-update", 4, "--no-save", "--disable-validation"]
    arguments += ["--save-dir", tmp_path, "--admin-monitor", 2, "--update-freq", 2]  # fairseq makes it anyway
    result = run("fairseq_cli.train", *arguments, "--tensorboard-logdir", tmp_path / "board")
    line = [line for line in result.output.splitlines() if "| train_inner |" in line][-1]
    last = {name: float(value) for name, value in json.loads(line.split(" | ")[-1]).items()}
    assert last["encoder_omega_max"] > last["encoder_omega_mean"] > last["encoder_omega_min"]
    assert 0.3 < math.hypot(last["encoder_gnorm"], last["decoder_gnorm"]) / last["gnorm"] < 3  # another update's
    (board,) = tmp_path.glob("board/train_inner/events*")
    assert all(name.encode() in board.read_bytes() for name in ("decoder_beta_max", "encoder_branch_variance"))


def test_fast_layers_show_what_plain_ones_do() -> None:
    """Do fast and plain layers log the same values? With dropout, their masks differ, so the values are close."""
    src, lengths, prev = reference.batch(sentences=40, source=20, target=30, seed=3)

    def shown(fast: str, dropout: float) -> dict[str, float]:
        model = tiny(dropout=dropout, admin_fast=fast, seed=2).train()
        torch.manual_seed(1)
        model(src, lengths, prev)  # profiles, by the plain layers
        stacks = stacks_of(model)
        probes = {side: StackProbe(stacks[side], {"encoder": src, "decoder": prev}[side], True) for side in stacks}
        torch.manual_seed(1)
        model(src, lengths, prev)
        return {f"{side} {name}": float(it) for side, probe in probes.items() for name, it in probe.values().items()}

    assert shown("on", 0.0) == pytest.approx(shown("off", 0.0), rel=1e-4)
    with_dropout, without = shown("on", 0.3), shown("on", 0.0)
    assert with_dropout == pytest.approx(shown("off", 0.3), rel=0.06)
    assert with_dropout["encoder branch_variance"] > 1.25 * without["encoder branch_variance"]
