"""What can be exported: a stock Post-LN Transformer and the files of its text, whatever fairseq trained it as.

T units of a sentence   V vocabulary
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from ..checkpoints import fold
from ..checkpoints import options as stored_options
from ..checkpoints.equivalence import EOS, PAD, Batch, random_batches, real_batches, vocabulary
from ..errors import AdminError
from ..method.state_dict import STRAY
from ..text.assets import Assets
from ..text.bpe import CODES
from ..text.tokens import FILE, Text

UNKNOWN_TO_BOTH = {
    "cross_self_attention": "a decoder that attends to both sides at once",
    "no_cross_attention": "a decoder without encoder-attention",
    "no_token_positional_embeddings": "a model without positions",
    "adaptive_softmax_cutoff": "an adaptive softmax",
    "adaptive_input": "adaptive input embeddings",
}
"""Options that make of fairseq's Transformer what neither CTranslate2 nor FSMT computes."""

KNOWN_WEIGHTS = re.compile(
    r"(encoder|decoder)\.(version|embed_tokens\.weight|embed_positions\.weight|layernorm_embedding\.(weight|bias)"
    r"|layer_norm\.(weight|bias)|layers\.\d+\.((self_attn|encoder_attn)\.(q|k|v|out)_proj|fc1|fc2"
    r"|(self_attn|encoder_attn|final)_layer_norm)\.(weight|bias))|decoder\.output_projection\.weight"
)
"""What a Transformer consists of; weights by other names are extras that an engine would drop in silence."""


class Exportable(NamedTuple):
    """A model to export."""

    original: Mapping[str, Any]
    """The checkpoint as it was given: what the export is checked against."""
    stock: dict[str, Any]
    """The same function as a checkpoint of stock fairseq, its options under `args`."""
    options: Namespace
    """The stock model's and its task's options, every one with a value."""
    source: Dictionary
    target: Dictionary
    files: dict[str, Path]
    """What belongs beside the model: name there -> where it lies now."""
    text: Text | None

    @property
    def languages(self) -> tuple[str, str]:
        return self.options.source_lang, self.options.target_lang


def stock(state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint as one of stock fairseq: an Admin model folded, a stock one with its options under `args`.

    Raises:
        AdminError: it is neither, or it cannot be folded.
    """
    model = state["model"]
    arch = stored_options.stored(state).model.get("_name")
    if ARCH_MODEL_NAME_REGISTRY.get(arch) == "transformer_admin":
        return fold.fold(state)
    if ARCH_MODEL_NAME_REGISTRY.get(arch) != "transformer":
        raise AdminError(
            f"the checkpoint's architecture is {arch}; transformer_admin or fairseq's transformer was expected. "
            "Nothing else can be exported."
        )
    layers = {
        stack: len({key.split(".")[2] for key in model if key.startswith(f"{stack}.layers.")})
        for stack in ("encoder", "decoder")
    }
    return {
        "args": stored_options.stock(state, layers),
        "model": {key: tensor for key, tensor in model.items() if not STRAY.search(key)},
    }


def prepare(state: Mapping[str, Any], path: Path, data: Path | None) -> Exportable:
    """Everything an export needs, or the reason why there can be none.

    Args:
        state: a checkpoint, as `checkpoint.read` gives it.
        path: where it lies.
        data: where dictionaries, codes and text.json lie, itself or its folder `bin`; None: beside the checkpoint.

    Raises:
        AdminError: the model is of another kind, or its dictionaries are missing or another model's.
    """
    plain = stock(state)
    options = Namespace(**plain["args"])
    options.task = "translation"  # whatever task taught the model, it translates from one dictionary to the other
    for option, what in UNKNOWN_TO_BOTH.items():
        if getattr(options, option, None):
            raise AdminError(f"{path} was trained with --{option.replace('_', '-')}: {what} cannot be exported.")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if getattr(options, name) != options.decoder_embed_dim:
            raise AdminError(
                f"{path} was trained with --{name.replace('_', '-')} {getattr(options, name)} and --decoder-embed-dim "
                f"{options.decoder_embed_dim}: a projection between them cannot be exported."
            )
    for key in plain["model"]:
        if not KNOWN_WEIGHTS.fullmatch(key):
            raise AdminError(
                f"{path} holds {key}, which is no part of a plain Transformer, and no other engine computes more than "
                "that. It cannot be exported."
            )
    assets = Assets(path, data)
    options.source_lang, options.target_lang = languages = assets.languages(options.source_lang, options.target_lang)
    plain["args"] = stored_options.attributes(vars(options))
    names = [f"dict.{language}.txt" for language in languages]
    source, target = (
        assets.dictionary(language, vocabulary(plain["model"], stack))
        for language, stack in zip(languages, ("encoder", "decoder"))
    )
    files = {name: found for name in (*names, CODES, FILE) if (found := assets.find(name))}
    return Exportable(state, plain, options, source, target, files, assets.text())


def batches(model: Exportable) -> list[Batch]:
    """What an export is checked on: random sentences, and the first of a validation set beside the dictionaries."""
    folder = model.files[f"dict.{model.languages[1]}.txt"].parent
    found = random_batches(model.original)
    if any(folder.glob(f"valid.{'-'.join(model.languages)}.*.idx")):
        found += real_batches(model.original, folder)
    return found


def sentences(tokens: torch.Tensor) -> list[torch.Tensor]:
    """The rows without padding and, where a sentence ends, its end. Shape (B, T) to B shapes (T,)."""
    return [row[row.ne(PAD) & row.ne(EOS)] for row in tokens]
