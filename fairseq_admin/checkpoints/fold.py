"""ω folded into stock Post-LN weights: the same function, one idea less (Liu et al. 2020, appendix C).

Sub-layer i adds its shortcut ω_i ⊙ x_{i-1} to its branch f_i(x_{i-1}), and x_{i-1} is the output of a LayerNorm with
weight γ and bias β, read by nothing else. With γ ⊙ ω_i and β ⊙ ω_i in that norm, the shortcut arrives scaled; the
branch undoes it by dividing the input columns of its first matrices by ω_i:

    self-attention: query, key, value   encoder-attention: query alone (the others read the encoder)   feed-forward: fc1

A stack's first shortcut is the embedding, usually not a norm's output (it is with --layernorm-embedding), and its ω is
one constant c > 0 for all channels. There LN(c·x + f) = LN(x + f/c), so c divides the last matrix and bias of the
branch. This is exact except for the norm's eps, 1e-5, which should be divided by c² and cannot be: at c ≠ 1 the output
is off by a share of up to eps/(2·Var[x]), which is large only for embeddings that are neither scaled nor normalised.

Of the other schemes, DeepNorm's constant folds as an ω does, and ReZero's factor on a layer's branches multiplies their
last matrices and biases. Those that only draw other initial weights, or put the norm first, are stock models already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from .. import fingerprint
from ..errors import AdminError
from ..method import provenance
from ..method.state_dict import OMEGA_DELTA, OMEGA_INIT, STRAY
from ..pytorch import folding
from ..pytorch.folding import SMALLEST
from ..version import __version__
from .building import check
from .checkpoint import FOLD, Checkpoint
from .stock import stock_options

READERS = {
    "self_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn": ("encoder_attn.q_proj",),
    "ffn": ("fc1",),
}
"""The modules of a sub-layer's branch that read x_{i-1}."""

WRITERS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")
"""The last modules of a layer's branches."""

FOLDABLE = ("transformer_admin", "transformer_lm_admin")
"""Those of our models that have a stock twin."""

SHORTCUT_SCALE = ".shortcut_scale"
BRANCH_SCALE = ".branch_scale"


def _shortcut_scales(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """What multiplies the shortcut of every sub-layer, as `state_dict.omegas` gives it, float64.

    Shapes (C,), Admin's ω, or (1,), a layer's constant.
    """
    weights, found = checkpoint.weights, {stack: dict(omegas) for stack, omegas in checkpoint.omegas.items()}
    layers = [key[: -len(SHORTCUT_SCALE)].split(".layers.") for key in weights if key.endswith(SHORTCUT_SCALE)]
    for stack, number in sorted(layers, key=lambda layer: int(layer[1])):
        scale = weights[f"{stack}.layers.{number}{SHORTCUT_SCALE}"].double()
        for kind in READERS:
            if f"{stack}.layers.{number}.{_norm(kind)}.weight" in weights:
                found.setdefault(stack, {})[f"layers.{number}.{kind}"] = scale
    return found


def _norm(kind: str) -> str:
    return f"{'final' if kind == 'ffn' else kind}_layer_norm"


def fold_weights(checkpoint: Checkpoint, smallest: float = SMALLEST, clamp: bool = False) -> dict[str, Tensor]:
    """The state dict of the stock Transformer that computes what this model computes.

    Args:
        checkpoint: a model of the scheme `admin`, or of another that multiplies shortcuts or branches, with weights of
            any floating types. One that multiplies neither comes back as it is.
        smallest: the smallest |ω| to divide by.
        clamp: take `smallest` for entries below it, rather than refuse them.

    Returns:
        Stock names and shapes. What the fold touches is float64; the rest are the checkpoint's own tensors.

    Raises:
        AdminError: an entry is too small, or a stack's first ω is not one positive number.
    """
    weights = checkpoint.weights
    folded = {
        key: tensor
        for key, tensor in weights.items()
        if not key.endswith((OMEGA_INIT, OMEGA_DELTA, SHORTCUT_SCALE, BRANCH_SCALE))
        and key != provenance.KEY
        and not STRAY.search(key)
    }

    def scale_output(module: str, factor: Tensor) -> None:
        for key in (f"{module}.weight", f"{module}.bias"):
            folded[key] = folding.scale_output(folded[key], factor)

    for key, factor in weights.items():
        if key.endswith(BRANCH_SCALE):
            layer = key[: -len(BRANCH_SCALE)]
            for writer in WRITERS:
                if f"{layer}.{writer}.weight" in weights:
                    scale_output(f"{layer}.{writer}", factor)
    for stack, sublayers in _shortcut_scales(checkpoint).items():
        norm_before = f"{stack}.layernorm_embedding" if f"{stack}.layernorm_embedding.weight" in weights else None
        for name, omega in sublayers.items():
            _, number, kind = name.split(".")
            layer = f"{stack}.layers.{number}"
            norm = f"{layer}.{_norm(kind)}"
            where = f"{checkpoint.name}: omega of {norm}"
            if norm_before is None:
                scale_output(f"{layer}.self_attn.out_proj", 1 / folding.first_constant(omega, where))
            else:
                omega = folding.divisible(omega, where, smallest, clamp)
                scale_output(norm_before, omega)
                for reader in READERS[kind]:
                    key = f"{layer}.{reader}.weight"
                    folded[key] = folding.divide_input(folded[key], omega)
            norm_before = norm
    return folded


def _refuse_unfoldable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that no stock Transformer computes, or that is one already."""
    name = checkpoint.name
    if checkpoint.kind in ("masked_lm_admin", "deeper_admin"):
        raise AdminError(
            f"{name} is of {checkpoint.kind}; only transformer_admin and transformer_lm_admin can be folded. Keep the "
            "model unfolded, with --user-dir."
        )
    if checkpoint.kind not in FOLDABLE or (checkpoint.scheme.omega and not checkpoint.has_omega):
        raise AdminError(f"{name} has no omega: it is not (or no longer) an Admin model. There is nothing to fold.")
    if not checkpoint.scheme.folds:
        raise AdminError(
            f"{name} is of --admin-scheme {checkpoint.scheme_name}, whose layers no stock Transformer has. Keep the "
            "model unfolded, with --user-dir."
        )
    if checkpoint.options.model.get("cross_self_attention") and not checkpoint.scheme.stock_layers:
        raise AdminError(
            f"{name} was trained with --cross-self-attention: its decoder's keys and values read the encoder's output "
            "and the shortcut through one matrix, so omega cannot be folded. Keep the model unfolded, with --user-dir."
        )


def fold(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    min_omega: float | None = None,
    text: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint of one of our models as a stock fairseq one, without optimizer state, that loads without the plugin.

    Args:
        checkpoint: it is not changed.
        dtype: what the weights are stored in.
        min_omega: clamp smaller |ω| to this. None: refuse those below SMALLEST.
        text: fingerprints to note besides the checkpoint's own, of what else its text was made with.

    Raises:
        AdminError: it is not one of our models, or its scheme is one that no stock Transformer computes; it is damaged;
            an ω cannot be divided by; or `dtype` cannot hold a folded weight.
    """
    _refuse_unfoldable(checkpoint)
    check(checkpoint)
    folded = fold_weights(checkpoint, SMALLEST if min_omega is None else min_omega, clamp=min_omega is not None)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": checkpoint.updates}
    note = {"version": __version__, "scheme": checkpoint.scheme_name, "provenance": checkpoint.record}
    return Checkpoint(
        {
            "args": stock_options(checkpoint),
            "model": fingerprint.noting(_stored(folded, dtype), {**(text or {}), **checkpoint.text}),
            "optimizer_history": [history],
            "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, FOLD: note},
        }
    )


def _stored(weights: Mapping[str, Tensor], dtype: torch.dtype) -> OrderedDict[str, Tensor]:
    """Every floating tensor in `dtype`; entries that were one tensor, as tied embeddings are, stay one."""
    done: dict[tuple[int, torch.Size], Tensor] = {}
    result: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in weights.items():
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
