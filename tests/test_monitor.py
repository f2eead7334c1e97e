"""The monitor: does it log the right numbers, once an update, without changing the training?"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from conftest import TRAIN, Run
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional

from fairseq_admin.errors import AdminError
from fairseq_admin.method.schemes import attentions_of, stacks_of
from fairseq_admin.monitor.monitor import StackProbe
from fairseq_admin.pytorch.omega import omega_from_depth, variance

SIZES = {**reference.TINY, "encoder_layers": 3, "decoder_layers": 2}


def tiny(scheme: str = "admin", **options: Any) -> Any:
    return reference.build("transformer_admin", **{**SIZES, "dropout": 0.0, "admin_scheme": scheme, **options})


def by_hand(stack: Any, run: Callable[[], Any], real: Tensor, pre_ln: bool) -> tuple[list[float], list[float]]:
    """Var[f_i] and β_{i,i} of a stack's sub-layers, from the outputs of fairseq's modules, in float64.

    The branch is the output of an attention or of fc2, without dropout. The sum is the branch plus ω times the output
    of the previous norm. If norms come before branches, it is the branch plus everything before it.
    """
    layers = list(stack.layers)
    given: list[Tensor] = []
    handles = [layers[0].register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))]
    for module in (module for layer in layers for module in (*attentions_of(layer), layer.fc2)):
        handles.append(
            module.register_forward_hook(
                lambda module, inputs, output: given.append(output if isinstance(output, Tensor) else output[0])
            )
        )
    run()
    for handle in handles:
        handle.remove()
    shortcut, *branches = [it.double() for it in given]
    norms = [module for layer in layers for name, module in layer.named_children() if name.endswith("layer_norm")]
    assert len(norms) == len(branches)
    variances, betas = [], []
    for branch, norm in zip(branches, norms):
        summed = shortcut * getattr(norm, "omega", torch.ones(1)).double() + branch
        variances.append(reference.variance(branch, real))
        shares = [f.var(unbiased=False) / total.var(unbiased=False) for f, total in zip(branch[real], summed[real])]
        betas.append(math.sqrt(sum(shares) / len(shares)))
        weight, bias = norm.weight.double(), norm.bias.double()
        shortcut = summed if pre_ln else functional.layer_norm(summed, summed.shape[-1:], weight, bias, norm.eps)
    return variances, betas


def train_omega(model: nn.Module) -> None:
    """Make ω differ from channel to channel, as after training."""
    torch.manual_seed(5)
    for module in model.modules():
        if getattr(module, "omega_delta", None) is not None:
            module.omega_delta.data.uniform_(-0.5, 0.5)


@pytest.mark.parametrize("scheme", ["admin", "post-ln", "pre-ln"])
@torch.no_grad()
def test_against_fairseqs_modules_in_float64(scheme: str) -> None:
    """Are variance, β and ω those of the layers' own branches, over all positions except padding?"""
    model, (src, lengths, prev) = tiny(scheme), reference.batch()
    model(src, lengths, prev)  # profiles
    train_omega(model)
    for side, tokens in (("encoder", src), ("decoder", prev)):
        stack = stacks_of(model)[side]
        probe = StackProbe(stack, tokens, variances=True)
        real = tokens.ne(reference.PAD).t()
        variances, betas = by_hand(stack, lambda: model(src, lengths, prev), real, pre_ln=scheme == "pre-ln")
        assert len(betas) == 6 and max(betas) > 1.2 * min(betas)
        # Activations are float32: each is off by a few roundings of 6e-8.
        assert [it.item() for it in probe.branches] == pytest.approx(variances, rel=1e-5)
        found = {name: value.item() for name, value in probe.values().items()}
        expected = {"beta_mean": sum(betas) / 6, "beta_max": max(betas), "branch_variance": sum(variances) / 6}
        if scheme == "admin":
            omegas = torch.stack([m.omega for m in stack.modules() if hasattr(m, "omega")])
            assert omegas.min() < 0.9
            expected |= {f"omega_{name}": getattr(omegas, name)().item() for name in ("min", "mean", "max")}
        assert found == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_b2t_counts_the_third_summand() -> None:
    """In B2T's last sub-layers, is β the branch's share of all three summands?"""
    model, (src, lengths, prev) = tiny("b2t"), reference.batch(padded=False)
    probe, branches, totals = StackProbe(model.encoder, src, variances=True), [], []
    for layer in model.encoder.layers:
        layer.fc2.register_forward_hook(lambda module, inputs, output: branches.append(output.var(-1)))
        norm = layer.final_layer_norm
        norm.register_forward_pre_hook(lambda module, inputs: totals.append((inputs[0] + module.bottom).var(-1)))
    model(src, lengths, prev)
    expected = [(branch / total).mean().item() for branch, total in zip(branches, totals)]
    assert [it.item() for it in probe.shares[1::2]] == pytest.approx(expected, rel=1e-5)


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
def test_training_is_the_same(fast: str, options: dict) -> None:
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
    """With layerdrop, does the log show every layer's ω once each has run, and β only of whole stacks count?"""
    model = tiny(admin_monitor=1, admin_init="log", encoder_layerdrop=0.3)
    ran: dict[int, int] = {}
    looked_at: dict[int, set[str]] = {}
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda *_: ran.update({update: ran.get(update, 0) + 1}))
    monkeypatch.setattr(
        model.monitor.rule, "warnings", lambda at, shares, loss: looked_at.update({at: {*shares}}) or []
    )
    torch.manual_seed(1)
    for update in range(1, 21):
        metrics.reset()
        metrics.log_scalar("loss", 5.0)
        model.set_num_updates(update - 1)
        model(*reference.batch())[0].sum().backward()
        model.all_reduce_grads()
    assert {3} < set(ran.values()) and looked_at == {
        update: {"encoder", "decoder"} if ran.get(update) == 3 else {"decoder"} for update in range(1, 20)
    }
    assert model.monitor.shown["encoder_omega_mean"] == pytest.approx(omega_from_depth("log", 6), rel=1e-3)


def test_omega_alone_is_shown_unless_asked_for_more() -> None:
    """Without --admin-monitor, does the log show only ω, and nothing for a scheme without ω?"""
    batches = [[reference.batch()]]
    names = {f"{side}_omega_{value}" for side in ("encoder", "decoder") for value in ("min", "mean", "max")}
    assert set(steps(tiny(log_interval=1), batches, updates=3)[-1]) == {*names, "gnorm"}
    assert set(steps(tiny("post-ln", log_interval=1), batches, updates=3)[-1]) == {"gnorm"}


def test_checkpointed_layers_are_measured_once() -> None:
    """Are the logged values the same if the backward recomputes layers?"""
    batches = [[reference.batch(seed=seed)] for seed in range(3)]
    plain, again = (steps(tiny(admin_monitor=1, checkpoint_activations=it), batches) for it in (False, True))
    assert plain[-1] == pytest.approx(again[-1], rel=1e-5) and len(plain[-1]) == 15


@pytest.mark.parametrize(("which", "freq"), [(1, 1), (6, 2), (10, 1)])
def test_a_batch_that_runs_out_of_memory_is_not_shown(which: int, freq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch runs out of memory, is the next one measured, and the partial measurement dropped?"""
    real, calls = variance, itertools.count(1)

    def scarce(*given: Any) -> Tensor:
        if next(calls) == which:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return real(*given)

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


def test_it_measures_the_first_batch_and_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --admin-monitor 4, are updates 1, 3 and 7 measured once each, so that the log has them after 4 and 8?"""
    seen = []
    real = StackProbe.__init__

    def noted(self: StackProbe, stack: Any, tokens: Tensor, variances: bool) -> None:
        seen.append((model.monitor.num_updates, tokens[0, 0].item()))
        real(self, stack, tokens, variances)

    monkeypatch.setattr(StackProbe, "__init__", noted)
    model = tiny(admin_monitor=4)
    batches = [reference.batch(seed=1, padded=False), reference.batch(seed=2, padded=False)]
    assert batches[0][0][0, 0] != batches[1][0][0, 0]
    steps(model, [batches], updates=9)
    assert seen[::2] == [(update, batches[0][0][0, 0]) for update in (0, 2, 6)]
    assert seen[1::2] == [(update, batches[0][2][0, 0]) for update in (0, 2, 6)]


@pytest.mark.parametrize("start", [0, 5000])
def test_the_first_update_from_a_checkpoint_is_measured(start: int) -> None:
    """Is it measured, even if the update count restarts (--finetune-from-model, --reset-optimizer)?"""
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


def test_a_number_of_updates_is_expected() -> None:
    with pytest.raises(AdminError, match="--admin-monitor is -1; expected"):
        tiny(admin_monitor=-1)


def test_command_line(corpus: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
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
