"""Fold omega into stock Post-LN weights that compute the same function (Liu et al. 2020, appendix C).

method/folding.py has the algebra; this file knows fairseq's names. The shortcut of a sub-layer is the output of the
norm before it, and only the sub-layer reads that output. In encoder-attention only the query reads it; key and value
read the encoder.

The first shortcut of a stack is the embedding. It is a norm's output only with --layernorm-embedding, and its ω is one
constant c > 0. That fold is exact except for the norm's eps, 1e-5, which should be divided by c² and cannot be. At
c ≠ 1 the output is off by a share of up to eps/(2·Var[x]), which is large only for embeddings that are neither scaled
nor normalised. This ω is a vector if layer 0 was pruned, or if the authors' code trained the model. Then the fold
multiplies the embeddings of words and positions by ω. So the stock model has a table of positions, and its embedding
matrices are no longer tied.

DeepNorm's constant folds as an ω does. ReZero's factor multiplies the last matrix and bias of each branch of its layer.
Schemes that only change initial weights, or put the norm first, are stock models already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from .. import fingerprint
from ..errors import AdminError
from ..method import folding, provenance
from ..method.state_dict import LEGACY_KEYS, OMEGA_DELTA, OMEGA_INIT, layers, omega
from ..version import __version__
from .building import check_weights
from .checkpoint import FOLD, Checkpoint
from .stock import max_positions, stock_options

READERS = {
    "self_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn": ("encoder_attn.q_proj",),
    "final": ("fc1",),
}
"""The modules of a branch that read its shortcut, by the first part of its norm's name."""

PAD = 1
"""Index of padding in every fairseq dictionary. Positions are numbered from the next index on."""

WRITERS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")
"""The last modules of a layer's branches."""

FOLDABLE = ("transformer_admin", "transformer_lm_admin")
"""The models of ours that have a stock counterpart."""

SHORTCUT_SCALE = ".shortcut_scale"
BRANCH_SCALE = ".branch_scale"


def fold_checkpoint(
    checkpoint: Checkpoint, min_omega: float | None = None, languages: tuple[str, str] | None = None
) -> Checkpoint:
    """Turn a checkpoint of our models into a stock one, without optimizer state, which loads without the plugin.

    Args:
        checkpoint: the checkpoint, which is not changed.
        min_omega: clamp smaller |ω| to this. None: refuse |ω| below folding.SMALLEST.
        languages: source and target language, for the options. None: keep those of the checkpoint.

    Returns:
        The stock checkpoint, in float32.

    Raises:
        AdminError: the checkpoint is damaged or not of one of our models; no stock Transformer computes its scheme; or
            an ω is too small to divide by.
    """
    check_weights(checkpoint)
    _refuse_unfoldable(checkpoint)
    folded = fold_weights(checkpoint, min_omega or folding.SMALLEST, clamp=min_omega is not None)
    tables = {stack: f"{stack}.embed_tokens.weight" for stack in checkpoint.stacks}
    first = [stack for stack, key in tables.items() if folded.get(key) is not checkpoint.weights.get(key)]
    changed: dict[str, Any] = {f"{stack}_learned_pos": True for stack in first}
    changed |= dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), False) if first else {}
    changed |= dict(zip(("source_lang", "target_lang"), languages or ()))
    options = stock_options(checkpoint, **changed)
    weights = fingerprint.with_fingerprints(_in_float32(folded), checkpoint.text)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": checkpoint.updates}
    note = {"version": __version__, "scheme": checkpoint.scheme_name, "provenance": checkpoint.record}
    return Checkpoint(
        {
            "args": options,
            "model": weights,
            "optimizer_history": [history],
            "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, FOLD: note},
        }
    )


def _refuse_unfoldable(checkpoint: Checkpoint) -> None:
    """Refuse checkpoints that cannot, or need not, be folded."""
    name, keep = checkpoint.name, "Keep the model unfolded, with --user-dir."
    if checkpoint.kind in ("masked_lm_admin", "deeper_admin"):
        raise AdminError(f"{name} is of {checkpoint.kind}; only {' and '.join(FOLDABLE)} can be folded. {keep}")
    if checkpoint.kind not in FOLDABLE or (checkpoint.scheme.omega and not checkpoint.omegas):
        raise AdminError(f"{name} has no omega: it is not (or no longer) an Admin model. There is nothing to fold.")
    if not checkpoint.scheme.folds:
        raise AdminError(
            f"{name} is of --admin-scheme {checkpoint.scheme_name}, whose layers no stock Transformer has. {keep}"
        )
    if checkpoint.options.model.get("cross_self_attention") and not checkpoint.scheme.stock_layers:
        raise AdminError(
            f"{name} was trained with --cross-self-attention: its decoder's keys and values read the encoder's output "
            f"and the shortcut through one matrix, so omega cannot be folded. {keep}"
        )


def fold_weights(checkpoint: Checkpoint, smallest: float = folding.SMALLEST, clamp: bool = False) -> dict[str, Tensor]:
    """Compute the state dict of the stock Transformer with the same function.

    Args:
        checkpoint: a model of the scheme `admin`, or of another that multiplies shortcuts or branches, with weights of
            any floating type. A model that multiplies neither is returned unchanged.
        smallest, clamp: see `folding.divisible`.

    Returns:
        Stock names and shapes. Folded tensors are float64; the others are the checkpoint's own.

    Raises:
        AdminError: an ω is too small, or a stack's first ω is a vector and its embedding not a plain matrix.
    """
    weights = checkpoint.weights
    scales = (OMEGA_INIT, OMEGA_DELTA, SHORTCUT_SCALE, BRANCH_SCALE)
    folded = {
        key: tensor
        for key, tensor in weights.items()
        if not key.endswith(scales) and key != provenance.KEY and not LEGACY_KEYS.search(key)
    }

    def scale_output(module: str, factor: Tensor) -> None:
        norm = module.replace("self_attn.out_proj", "attn_ln")  # the end of the branch with --scale-attn
        module = norm if f"{norm}.weight" in folded else module
        for key in (f"{module}.weight", f"{module}.bias"):
            folded[key] = folding.scale(folded[key], factor, 0)

    for sublayer in _scaled_sublayers(weights):
        where = f"{checkpoint.name}: omega of {sublayer.norm}"
        if sublayer.norm_before is None and (sublayer.omega.eq(sublayer.omega[0]) & sublayer.omega.gt(0)).all():
            scale_output(f"{sublayer.layer}.self_attn.out_proj", 1 / sublayer.omega[:1])
            continue
        factor = folding.divisible(sublayer.omega, where, smallest, clamp)
        if sublayer.norm_before is None:
            _scale_embedding(folded, checkpoint, sublayer.layer.partition(".")[0], factor)
        else:
            scale_output(sublayer.norm_before, factor)
        for key in (f"{sublayer.layer}.{reader}.weight" for reader in sublayer.readers):
            folded[key] = folding.scale(folded[key], 1 / factor, 1)
    for key, factor in weights.items():
        if key.endswith(BRANCH_SCALE):
            for writer in (key.replace(BRANCH_SCALE, f".{name}") for name in WRITERS):
                if f"{writer}.weight" in weights:
                    scale_output(writer, factor)
    return folded


def _scale_embedding(folded: dict[str, Tensor], checkpoint: Checkpoint, stack: str, omega: Tensor) -> None:
    """Multiply a stack's embedding by ω, shape (C,), in place: its words, and its positions as a table."""
    words, positions = (f"{stack}.embed_{part}.weight" for part in ("tokens", "positions"))
    if words not in folded or folded[words].size(1) != omega.numel():
        raise AdminError(
            f"{checkpoint.name}: the first omega of the {stack} is not one positive number, and its embedding is "
            "adaptive or of another width, which no fold reaches. Keep the model unfolded, with --user-dir."
        )
    folded[words] = folded[words].double() * omega
    if not checkpoint.options.model.get("no_token_positional_embeddings"):
        rows = max_positions(checkpoint, stack) + PAD + 1
        table = SinusoidalPositionalEmbedding.get_embedding(rows, omega.numel(), PAD)
        folded[positions] = folded.get(positions, table).double() * omega


class _Sublayer(NamedTuple):
    """A sub-layer with a scaled shortcut: the names of its modules, and the scale."""

    layer: str
    norm: str
    norm_before: str | None
    readers: tuple[str, ...]
    omega: Tensor


def _scaled_sublayers(weights: Mapping[str, Tensor]) -> Iterator[_Sublayer]:
    """Yield sub-layers in forward order. ω is float64, of shape (C,) for Admin and (1,) for a layer's constant."""
    for stack in ("encoder", "decoder"):
        norm_before = f"{stack}.layernorm_embedding" if f"{stack}.layernorm_embedding.weight" in weights else None
        for layer in (f"{stack}.layers.{number}" for number in range(layers(weights, stack))):
            for branch, readers in READERS.items():
                norm = f"{layer}.{branch}_layer_norm"
                scale = omega(weights, norm)
                scale = weights.get(layer + SHORTCUT_SCALE) if scale is None else scale
                if scale is not None and f"{norm}.weight" in weights:
                    yield _Sublayer(layer, norm, norm_before, readers, scale.double())
                    norm_before = norm


def _in_float32(weights: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    """Cast every floating tensor. Entries that are one tensor, such as tied embeddings, stay one."""
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    result: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in weights.items():
        if tensor.is_floating_point():
            tensor = cast.setdefault((tensor.data_ptr(), tensor.shape), tensor.float())
        result[key] = tensor
    return result
