"""What can be exported: a stock Transformer and the files of its text, whatever fairseq trained it as.

T units of a sentence   V vocabulary
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary
from torch import Tensor

from .. import fingerprint
from ..checkpoints.building import check
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.equivalence import EOS, PAD, Batch, random_batches, real_batches
from ..checkpoints.fold import fold
from ..checkpoints.stock import attributes, stock_options
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import CODES
from ..text.tokens import FILE, Text

PLAIN = re.compile(
    r"(encoder|decoder)\.(version|embed_tokens\.weight|embed_positions\.weight|layernorm_embedding\.(weight|bias)"
    r"|layer_norm\.(weight|bias)|layers\.\d+\.((self_attn|encoder_attn)\.(q|k|v|out)_proj|fc1|fc2"
    r"|(self_attn|encoder_attn|final)_layer_norm)\.(weight|bias))|decoder\.output_projection\.weight"
)
"""What a Transformer consists of; weights by other names are extras, which no engine computes."""

BOUND = 1e-4
"""Largest difference of a log-probability, float32: an 18L-18L model's was 1.4e-5, by the order of sums."""


class Exportable(NamedTuple):
    """A model to export."""

    original: Checkpoint
    """As it was given: what the export is checked against."""
    stock: Checkpoint
    """The same function as stock fairseq's, its options under `args`."""
    options: Namespace
    """The stock model's and its task's options, every one with a value."""
    source: Dictionary
    target: Dictionary
    files: dict[str, Path]
    """What belongs next to the model: name there -> where it is now."""
    text: Text | None
    fingerprints: dict[str, str]
    """Of what its text was made with, as fingerprint.py names them."""

    @property
    def languages(self) -> tuple[str, str]:
        return self.options.source_lang, self.options.target_lang


def stock(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint as one of stock fairseq: an Admin model folded, a stock one with its options under `args`.

    Raises:
        AdminError: it is neither, or damaged, or it cannot be folded.
    """
    if checkpoint.kind == "transformer_admin":
        return fold(checkpoint)
    if checkpoint.kind != "transformer":
        raise AdminError(
            f"{checkpoint.name}: its architecture is {checkpoint.options.model.get('_name')}; transformer_admin or "
            "fairseq's transformer was expected. Nothing else can be exported."
        )
    check(checkpoint)
    return Checkpoint({"args": stock_options(checkpoint), "model": dict(checkpoint.weights)})


def prepare(checkpoint: Checkpoint, assets: Assets) -> Exportable:
    """Everything an export needs, or the reason why there can be none.

    Args:
        checkpoint: one read from a file.
        assets: with its dictionaries, and codes and text.json if they are there.

    Raises:
        AdminError: the model is of another kind or damaged, or its dictionaries are missing or another model's.
    """
    plain = stock(checkpoint)
    for key in plain.weights:
        if not PLAIN.fullmatch(key):
            raise AdminError(
                f"{checkpoint.name} holds {key}, which is not part of a plain Transformer, and no other engine "
                "computes more than that. It cannot be exported."
            )
    options = Namespace(**plain.state["args"])
    options.task = "translation"  # whatever task taught the model, it translates from one dictionary to the other
    assets.expected = checkpoint.text
    options.source_lang, options.target_lang = languages = assets.languages(
        *(getattr(options, name, None) for name in ("source_lang", "target_lang"))
    )
    plain.state["args"] = attributes(vars(options))
    source, target = (
        assets.dictionary(language, plain.vocabulary[stack], stack)
        for language, stack in zip(languages, ("encoder", "decoder"))
    )
    names = [*(f"dict.{language}.txt" for language in languages), CODES, FILE]
    files = {name: path for name in names if (path := assets.find(name))}
    dictionaries = {"encoder": fingerprint.of_dictionary(source), "decoder": fingerprint.of_dictionary(target)}
    fingerprints = {**checkpoint.text, **dictionaries, **assets.fingerprints()}
    return Exportable(checkpoint, plain, options, source, target, files, assets.text(), fingerprints)


def batches(model: Exportable) -> list[Batch]:
    """What an export is checked on: random sentences, and the first of a validation set next to the dictionaries."""
    folder = model.files[f"dict.{model.languages[1]}.txt"].parent
    batches = random_batches(model.original)
    if any(folder.glob(f"valid.{'-'.join(model.languages)}.*.idx")):
        batches += real_batches(model.stock, folder)  # whose task is translation
    return batches


def sentences(tokens: Tensor) -> list[Tensor]:
    """The rows without padding and, where a sentence ends, its end. Shape (B, T) to B shapes (T,)."""
    return [row[row.ne(PAD) & row.ne(EOS)] for row in tokens]


def refuse_unlike(difference: float, bound: float, compared: str) -> None:
    """Refuse an export whose log-probabilities differ from the model's by more than a bound.

    Args:
        difference: by how much.
        compared: how many of them were compared, in words.

    Raises:
        AdminError: by more, or it is not a number.
    """
    if not difference <= bound:
        raise AdminError(
            f"exported, the log-probabilities of {compared} differ by up to {difference:.2g}, more than {bound:g}: the "
            "engine does not compute what this model does. Nothing was written. Allow it with --tolerance, or "
            "translate with fairseq."
        )
