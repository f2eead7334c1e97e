"""omega folded into stock Post-LN weights: the same function, one idea less (Liu et al. 2020, appendix C).

The algebra is pytorch/folding.py's; here are fairseq's names. The shortcut of a sub-layer is the output of the norm
before it, which nothing else reads. Encoder-attention reads it by its query alone: key and value read the encoder.

A stack's first shortcut is the embedding, usually not a norm's output (it is with --layernorm-embedding), and its ω is
one constant c > 0. The fold of that is exact except for the norm's eps, 1e-5, which should be divided by c² and cannot
be: at c ≠ 1 the output is off by a share of up to eps/(2·Var[x]), which is large only for embeddings that are neither
scaled nor normalised. Where it is a vector (a model pruned of its layer 0, or trained with the authors' code), the
embedding is multiplied by it, words and positions: the positions are then a table, and no two matrices are tied.

Of the other schemes, DeepNorm's constant folds as an ω does, and ReZero's factor on a layer's branches multiplies their
last matrices and biases. Those that only draw other initial weights, or put the norm first, are stock models already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from .. import fingerprint
from ..errors import AdminError
from ..method import provenance
from ..method.state_dict import OMEGA_DELTA, OMEGA_INIT, STRAY, layers
from ..pytorch import folding
from ..version import __version__
from .building import check
from .checkpoint import FOLD, Checkpoint
from .stock import max_positions, stock_options

READERS = {
    "self_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "encoder_attn": ("encoder_attn.q_proj",),
    "final": ("fc1",),
}
"""The modules of a branch that read its shortcut, by what the name of its norm begins with."""

PAD = 1
"""The padding's index in every fairseq dictionary; positions are numbered from the one after it."""

WRITERS = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")
"""The last modules of a layer's branches."""

FOLDABLE = ("transformer_admin", "transformer_lm_admin")
"""Those of our models that have a stock counterpart."""

SHORTCUT_SCALE = ".shortcut_scale"
BRANCH_SCALE = ".branch_scale"


def fold(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, min_omega: float | None = None) -> Checkpoint:
    """A checkpoint of one of our models as a stock fairseq one, without optimizer state, that loads without the plugin.

    Args:
        checkpoint: it is not changed.
        dtype: what the weights are stored in.
        min_omega: clamp smaller |ω| to this. None: refuse those below folding.SMALLEST.

    Raises:
        AdminError: it is not one of our models, or its scheme is one that no stock Transformer computes; it is damaged;
            an ω cannot be divided by; or `dtype` cannot hold a folded weight.
    """
    check(checkpoint)
    _refuse_unfoldable(checkpoint)
    folded = fold_weights(checkpoint, min_omega or folding.SMALLEST, clamp=min_omega is not None)
    first = [stack for stack in checkpoint.stacks if _embedding_scaled(folded, checkpoint.weights, stack)]
    untied = dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), False) if first else {}
    options = stock_options(checkpoint, **untied, **{f"{stack}_learned_pos": True for stack in first})
    weights = fingerprint.with_fingerprints(_cast(folded, dtype), checkpoint.text)
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
    """Refuse a checkpoint that no stock Transformer computes, or that is one already."""
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
    """The state dict of the stock Transformer that computes what this model computes.

    Args:
        checkpoint: a model of the scheme `admin`, or of another that multiplies shortcuts or branches, with weights of
            any floating types. One that multiplies neither comes back as it is.
        smallest, clamp: as `folding.divisible` takes them.

    Returns:
        Stock names and shapes. What the fold touches is float64; the rest are the checkpoint's own tensors.

    Raises:
        AdminError: an entry is too small, or a stack's first ω is a vector and its embedding no plain matrix.
    """
    weights = checkpoint.weights
    scales = (OMEGA_INIT, OMEGA_DELTA, SHORTCUT_SCALE, BRANCH_SCALE)
    folded = {
        key: tensor
        for key, tensor in weights.items()
        if not key.endswith(scales) and key != provenance.KEY and not STRAY.search(key)
    }

    def scale_output(module: str, factor: Tensor) -> None:
        for key in (f"{module}.weight", f"{module}.bias"):
            folded[key] = folding.scale(folded[key], factor, 0)

    for sublayer in _scaled_sublayers(weights):
        where = f"{checkpoint.name}: omega of {sublayer.norm}"
        if sublayer.norm_before is None and (sublayer.omega.eq(sublayer.omega[0]) & sublayer.omega.gt(0)).all():
            scale_output(f"{sublayer.layer}.self_attn.out_proj", 1 / sublayer.omega[:1])
            continue
        omega = folding.divisible(sublayer.omega, where, smallest, clamp)
        if sublayer.norm_before is None:
            _scale_embedding(folded, checkpoint, sublayer.layer.partition(".")[0], omega)
        else:
            scale_output(sublayer.norm_before, omega)
        for key in (f"{sublayer.layer}.{reader}.weight" for reader in sublayer.readers):
            folded[key] = folding.scale(folded[key], 1 / omega, 1)
    for key, factor in weights.items():
        if key.endswith(BRANCH_SCALE):
            for writer in (key.replace(BRANCH_SCALE, f".{name}") for name in WRITERS):
                if f"{writer}.weight" in weights:
                    scale_output(writer, factor)
    return folded


def _scale_embedding(folded: dict[str, Tensor], checkpoint: Checkpoint, stack: str, omega: Tensor) -> None:
    """Multiply what a stack's embedding gives by ω, shape (C,), in place: its words, and its positions as a table."""
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


def _embedding_scaled(folded: Mapping[str, Tensor], weights: Mapping[str, Tensor], stack: str) -> bool:
    words = f"{stack}.embed_tokens.weight"
    return words in folded and folded[words] is not weights[words]


class _Sublayer(NamedTuple):
    """A sub-layer whose shortcut is multiplied: the names of its modules, and by what."""

    layer: str
    norm: str
    norm_before: str | None
    readers: tuple[str, ...]
    omega: Tensor


def _scaled_sublayers(weights: Mapping[str, Tensor]) -> Iterator[_Sublayer]:
    """In forward order; each ω is float64, Admin's of shape (C,), a layer's constant of shape (1,)."""
    for stack in ("encoder", "decoder"):
        norm_before = f"{stack}.layernorm_embedding" if f"{stack}.layernorm_embedding.weight" in weights else None
        for layer in (f"{stack}.layers.{number}" for number in range(layers(weights, stack))):
            for branch, readers in READERS.items():
                norm = f"{layer}.{branch}_layer_norm"
                omega = weights.get(norm + OMEGA_INIT, weights.get(layer + SHORTCUT_SCALE))
                if omega is None or f"{norm}.weight" not in weights:
                    continue
                omega = omega.double()
                if norm + OMEGA_DELTA in weights:
                    omega = omega + weights[norm + OMEGA_DELTA].double()
                yield _Sublayer(layer, norm, norm_before, readers, omega)
                norm_before = norm


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> OrderedDict[str, Tensor]:
    """Every floating tensor in `dtype`; entries that were one tensor, as tied embeddings are, stay one."""
    seen: dict[tuple[int, torch.Size], Tensor] = {}
    result: OrderedDict[str, Tensor] = OrderedDict()
    for key, tensor in weights.items():
        if tensor.is_floating_point():
            cast = seen.setdefault((tensor.data_ptr(), tensor.shape), tensor.to(dtype))
            if not cast.isfinite().all():
                raise AdminError(
                    f"{key} reaches {tensor.abs().max().item():.3g} when folded, more than {dtype} holds "
                    f"({torch.finfo(dtype).max:.3g}). Fold with --dtype fp32."
                )
            tensor = cast
        result[key] = tensor
    return result
