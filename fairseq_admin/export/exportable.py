"""Prepare an export: a stock Transformer and the files of its text, from any checkpoint that can become one.

T units of a sentence   V vocabulary
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from fairseq.data import Dictionary
from torch import Tensor

from .. import fingerprint
from ..checkpoints.building import check_weights
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.equivalence import EOS, PAD, Batch, random_batches, real_batches
from ..checkpoints.fold import fold_checkpoint
from ..checkpoints.stock import attributes, stock_options
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import CODES
from ..text.tokens import FILE, Text

BOUND = 1e-4
"""Largest difference of a log-probability in float32. An 18L-18L model had 1.4e-5, from the order of sums."""


class Exportable(NamedTuple):
    """A model to export."""

    original: Checkpoint
    """The checkpoint before any fold; the export is checked against it."""
    stock: Checkpoint
    """A stock checkpoint of the same function, its options under `args`."""
    options: Namespace
    """All options of the stock model and its task, each with a value."""
    source: Dictionary
    target: Dictionary
    files: dict[str, Path]
    """Files for the exported folder: name there -> path now."""
    text: Text | None
    fingerprints: dict[str, str]
    """Fingerprints of its dictionaries, merges and text settings (fingerprint.py)."""

    @property
    def languages(self) -> tuple[str, str]:
        return self.options.source_lang, self.options.target_lang


def stock(checkpoint: Checkpoint) -> Checkpoint:
    """Turn a checkpoint into a stock one: fold an Admin model, or put a stock model's options under `args`.

    Args:
        checkpoint: the checkpoint of an Admin model or of a stock model.

    Returns:
        The stock checkpoint.

    Raises:
        AdminError: the model is of neither kind, is damaged, or cannot be folded.
    """
    if checkpoint.kind == "transformer_admin":
        return fold_checkpoint(checkpoint)
    if checkpoint.kind != "transformer":
        raise AdminError(
            f"{checkpoint.name}: its architecture is {checkpoint.options.model.get('_name')}; transformer_admin or "
            "fairseq's transformer was expected. Nothing else can be exported."
        )
    check_weights(checkpoint)
    return Checkpoint({"args": stock_options(checkpoint), "model": dict(checkpoint.weights)})


def prepare(checkpoint: Checkpoint, assets: Assets) -> Exportable:
    """Collect everything that an export needs.

    Args:
        checkpoint: one that was read from a file.
        assets: its dictionaries, and codes and text.json if they are there.

    Returns:
        The model to export.

    Raises:
        AdminError: the model is of another kind or damaged, or its dictionaries are missing or belong to another model.
    """
    plain = stock(checkpoint)
    options = Namespace(**plain.state["args"])
    options.task = "translation"  # set even if the model was trained with another task
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
    """Make the batches of the check: random sentences, and the first sentences of a validation set.

    The validation set is used if it is in the folder of the dictionaries.

    Args:
        model: the model to export.

    Returns:
        The batches.
    """
    folder = model.files[f"dict.{model.languages[1]}.txt"].parent
    batches = random_batches(model.original)
    if any(folder.glob(f"valid.{'-'.join(model.languages)}.*.idx")):
        batches += real_batches(model.stock, folder)  # whose task is translation
    return batches


def sentences(tokens: Tensor) -> list[Tensor]:
    """Cut each row to the units of its sentence, without padding and without the end-of-sentence symbol.

    Args:
        tokens: shape (B, T).

    Returns:
        B tensors. Shapes (T,).
    """
    return [row[row.ne(PAD) & row.ne(EOS)] for row in tokens]


def refuse_unlike(difference: float, bound: float, compared: str) -> None:
    """Refuse an export whose log-probabilities differ from the model's by more than a bound.

    Args:
        difference: the largest difference.
        bound: the largest allowed difference.
        compared: how many log-probabilities were compared, as text for the message ("512 units").

    Raises:
        AdminError: the difference is larger, or not a number.
    """
    if not difference <= bound:
        raise AdminError(
            f"exported, the log-probabilities of {compared} differ by up to {difference:.2g}, more than {bound:g}: the "
            "engine does not compute this model. Nothing was written. Allow it with --tolerance, or translate with "
            "fairseq."
        )
