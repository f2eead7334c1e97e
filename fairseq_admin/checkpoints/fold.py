"""ω folded into stock Post-LN weights: the same function, one idea less (Liu et al. 2020, appendix C).

Sub-layer i adds its shortcut ω_i ⊙ x_{i-1} to its branch f_i(x_{i-1}), and x_{i-1} is the output of a LayerNorm with
weight γ and bias β, read by nothing else. With γ ⊙ ω_i and β ⊙ ω_i in that norm, the shortcut arrives scaled; the
branch undoes it by dividing the input columns of its first matrices by ω_i:

    self-attention: query, key, value   encoder-attention: query alone (the others read the encoder)   feed-forward: fc1

A stack's first shortcut is the embedding, mostly no norm's output (it is with --layernorm-embedding), and its ω is one
constant c > 0 for all channels. There LN(c·x + f) = LN(x + f/c), so c divides the last matrix and bias of the branch.
This is exact but for the norm's eps, 1e-5, which should be divided by c² and cannot be: at c ≠ 1 the output is off by
up to a share eps/(2·Var[x]), which only embeddings that are neither scaled nor normalised make large.

Of the other schemes, DeepNorm's constant folds as an ω does, and ReZero's factor of a layer's branches multiplies their
last matrices and biases. Those that only draw other initial weights, or put the norm first, are stock models already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import AdminError
from ..method import provenance
from ..method.schemes import SCHEMES
from ..method.state_dict import OMEGA_DELTA, OMEGA_INIT, STRAY, omegas
from ..version import __version__
from . import options

READERS = {
    "self_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn": ("encoder_attn.q_proj",),
    "ffn": ("fc1",),
}
"""What of a sub-layer's branch reads x_{i-1}."""

WRITERS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")
"""What of a layer's branches comes last."""

SHORTCUT_SCALE = ".shortcut_scale"
BRANCH_SCALE = ".branch_scale"

SMALLEST = 1e-6
"""Folding divides by ω; entries nearer to 0 than this are refused, unless the user names another bound."""


def _clamped(omega: Tensor, name: str, smallest: float, clamp: bool) -> Tensor:
    """ω with no entry nearer to 0 than `smallest`, in the entry's own direction. Shape (C,)."""
    if not omega.isfinite().all():
        raise AdminError(f"omega of {name} is not finite: the run has diverged. Fold an earlier checkpoint.")
    channel = int(omega.abs().argmin())
    if abs(omega[channel].item()) >= smallest:
        return omega
    if not clamp:
        raise AdminError(
            f"omega of {name} is {omega[channel].item():.3g} at channel {channel}; folding divides by it. Fold with "
            f"--min-omega {smallest:g} to clamp it, or keep the model unfolded, with --user-dir."
        )
    return omega.abs().clamp(min=smallest).copysign(omega)


def _shortcut_scales(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What multiplies the shortcut of every sub-layer, as `state_dict.omegas` gives it, float64.

    Shapes (C,), Admin's ω, or (1,), a layer's constant.
    """
    found = omegas(state)
    layers = [key[: -len(SHORTCUT_SCALE)].split(".layers.") for key in state if key.endswith(SHORTCUT_SCALE)]
    for stack, number in sorted(layers, key=lambda layer: int(layer[1])):
        scale = state[f"{stack}.layers.{number}{SHORTCUT_SCALE}"].double()
        for kind in READERS:
            if f"{stack}.layers.{number}.{_norm(kind)}.weight" in state:
                found.setdefault(stack, {})[f"layers.{number}.{kind}"] = scale
    return found


def _norm(kind: str) -> str:
    return f"{'final' if kind == 'ffn' else kind}_layer_norm"


def fold_weights(state: Mapping[str, Tensor], smallest: float = SMALLEST, clamp: bool = False) -> dict[str, Tensor]:
    """The state dict of the stock Transformer that computes what this model computes.

    Args:
        state: the state dict of a model of the scheme `admin`, or of another that multiplies shortcuts or branches, of
            any floating types. One that multiplies neither comes back as it is.
        smallest: the smallest |ω| to divide by.
        clamp: take `smallest` for entries below it, rather than refuse them.

    Returns:
        Stock names and shapes. What the fold touches is float64; the rest is the same tensors as in `state`.

    Raises:
        AdminError: an entry is too small or not finite, or a stack's first ω is not one positive number.
    """
    folded = {
        key: tensor
        for key, tensor in state.items()
        if not key.endswith((OMEGA_INIT, OMEGA_DELTA, SHORTCUT_SCALE, BRANCH_SCALE))
        and key != provenance.KEY
        and not STRAY.search(key)
    }

    def scale(key: str, factor: Tensor) -> None:
        folded[key] = folded[key].double() * factor

    for key, factor in state.items():
        if key.endswith(BRANCH_SCALE):
            layer = key[: -len(BRANCH_SCALE)]
            for name in WRITERS:
                if f"{layer}.{name}.weight" in state:
                    scale(f"{layer}.{name}.weight", factor.double())
                    scale(f"{layer}.{name}.bias", factor.double())
    for stack, sublayers in _shortcut_scales(state).items():
        norm_before = f"{stack}.layernorm_embedding"
        if f"{norm_before}.weight" not in state:
            norm_before = ""
        for name, omega in sublayers.items():
            _, number, kind = name.split(".")
            layer = f"{stack}.layers.{number}"
            norm = f"{layer}.{_norm(kind)}"
            if not norm_before:
                if not omega.eq(omega[0]).all() or not omega[0] > 0:
                    raise AdminError(
                        f"omega of {norm}, the first of its stack, runs from {omega.min().item():.3g} to "
                        f"{omega.max().item():.3g}; one positive number was expected. It cannot be folded: keep the "
                        "model unfolded, with --user-dir."
                    )
                scale(f"{layer}.self_attn.out_proj.weight", 1 / omega[0])
                scale(f"{layer}.self_attn.out_proj.bias", 1 / omega[0])
            else:
                omega = _clamped(omega, norm, smallest, clamp)
                scale(f"{norm_before}.weight", omega)
                scale(f"{norm_before}.bias", omega)
                for reader in READERS[kind]:
                    scale(f"{layer}.{reader}.weight", 1 / omega)
            norm_before = norm
    return folded


def fold(
    state: Mapping[str, Any], dtype: torch.dtype = torch.float32, min_omega: float | None = None
) -> dict[str, Any]:
    """A checkpoint of a model of ours as a stock fairseq one, without optimizer state, that loads without the plugin.

    Args:
        state: the checkpoint, as `checkpoint.read` gives it. Its tensors are not changed.
        dtype: what the weights are stored in.
        min_omega: clamp smaller |ω| to this. None: refuse those below SMALLEST.

    Raises:
        AdminError: it is no model of ours, or of a scheme that is no stock Transformer's; an ω cannot be divided
            by; or `dtype` cannot hold a folded weight.
    """
    model, found = state["model"], options.stored(state).model
    name = options.scheme(found)
    if options.kind(found) == "masked_lm_admin":
        raise AdminError(
            "the checkpoint is of masked_lm_admin; only transformer_admin and transformer_lm_admin can be folded. Keep "
            "the model unfolded, with --user-dir."
        )
    if options.kind(found) not in options.OURS or (SCHEMES[name].omega and not omegas(model)):
        raise AdminError(
            "the checkpoint has no omega: it is not (or no longer) an Admin model. There is nothing to fold."
        )
    if not SCHEMES[name].folds:
        raise AdminError(
            f"the checkpoint is of --admin-scheme {name}, whose layers no stock Transformer has. Keep the model "
            "unfolded, with --user-dir."
        )
    if found.get("cross_self_attention") and not SCHEMES[name].stock_layers:
        raise AdminError(
            "the model was trained with --cross-self-attention: its decoder's keys and values read the encoder's "
            "output and the shortcut through one matrix, so omega cannot be folded. Keep the model unfolded, with "
            "--user-dir."
        )
    folded = fold_weights(model, SMALLEST if min_omega is None else min_omega, clamp=min_omega is not None)
    layers = {
        stack: len({key.split(".")[2] for key in model if key.startswith(f"{stack}.layers.")})
        for stack in options.stacks(found)
    }
    record = provenance.decode(model[provenance.KEY]) if provenance.KEY in model else None
    updates = (state.get("optimizer_history") or [{}])[-1].get("num_updates", 0)
    return {
        "args": options.stock(state, layers),
        "model": _stored(folded, dtype),
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": updates}
        ],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 0},
            "admin_fold": {"version": __version__, "scheme": name, "provenance": record},
        },
    }


def _stored(state: Mapping[str, Tensor], dtype: torch.dtype) -> OrderedDict[str, Tensor]:
    """Every floating tensor in `dtype`; entries that were one tensor, as tied embeddings are, stay one."""
    done: dict[tuple[int, torch.Size], Tensor] = {}
    result: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in state.items():
        if tensor.is_floating_point():
            once = (tensor.data_ptr(), tensor.shape)
            if once not in done:
                done[once] = tensor.to(dtype)
                if tensor.isfinite().all() and not done[once].isfinite().all():
                    raise AdminError(
                        f"{key} reaches {tensor.abs().max().item():.3g} when folded, more than {dtype} holds "
                        f"({torch.finfo(dtype).max:.3g}). Fold with --dtype fp32."
                    )
            tensor = done[once]
        result[key] = tensor
    return result
