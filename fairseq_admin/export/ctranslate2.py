"""A folder that CTranslate2 reads."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from .. import outputs
from ..checkpoints.building import build
from ..checkpoints.equivalence import EOS, log_probabilities
from ..errors import AdminError, line
from ..packages import need
from .exportable import BOUND, Exportable, batches, refuse_unlike, sentences

NONSENSE = 0.5
"""Largest mean difference, in nats a unit, of weights in another type than float32.

An 18L-18L model's was 0.02 with int8, one unit's 0.4; without its encoder, 0.7 on random words, 2 on real ones. No such
bound finds a small mistake, so the same conversion is checked in float32 first.
"""


class Checked(NamedTuple):
    """How the folder's log-probabilities differ from the checkpoint's."""

    largest: float
    mean: float
    units: int
    compute_type: str
    """What CTranslate2 computes with on this machine, which may be wider than what the weights are stored in."""


def refuse_unknown(quantization: str | None) -> None:
    """Refuse a type for the weights that CTranslate2 does not know.

    Raises:
        AdminError: it is one, or CTranslate2 is not installed.
    """
    need("ctranslate2")
    kinds = need("ctranslate2.specs").model_spec.ACCEPTED_MODEL_TYPES
    if quantization not in (None, *kinds):
        raise AdminError(f"--quantization {quantization} is not one that this CTranslate2 knows: {', '.join(kinds)}.")


def write(
    model: Exportable, output: Path, folder: Path, quantization: str | None, tolerance: float | None
) -> tuple[str, list[str]]:
    """Write the folder and check it; in float32 first, whatever its weights shall be.

    Args:
        model: what to export.
        output: what errors call the folder.
        folder: to write; it does not exist yet. Next to it is what is needed meanwhile.
        quantization: what to store the weights in; None: float32.
        tolerance: for the largest difference in float32; None: BOUND.

    Returns:
        What was checked, in words, and notes: none.

    Raises:
        AdminError: CTranslate2 cannot compute this model, or computes something else; or the disk is full.
    """
    with outputs.writing(output):
        convert(model, folder, None)
    exact = check(model, folder)
    refuse_unlike(exact.largest, BOUND if tolerance is None else tolerance, f"{exact.units} units")
    summary = f"CTranslate2, float32; log-probabilities of {exact.units} units differ by up to {exact.largest:.2g}"
    if quantization in (None, "float32"):
        return summary, []
    with outputs.writing(output):
        shutil.rmtree(folder)
        convert(model, folder, quantization)
    quantised = check(model, folder)
    if not quantised.mean <= NONSENSE:
        raise AdminError(
            f"exported, the log-probabilities of {quantised.units} units differ by {quantised.mean:.2g} on average, "
            f"more than {NONSENSE:g}. Nothing was written. Give another --quantization."
        )
    return (
        f"{summary}; as {quantization}, here computed in {quantised.compute_type}, by up to {quantised.largest:.2g}, "
        f"{quantised.mean:.2g} on average"
    ), []


def convert(model: Exportable, folder: Path, quantization: str | None) -> None:
    """Write the folder, with files that the converter reads next to it.

    Raises:
        AdminError: CTranslate2 cannot compute this model.
        OSError: the disk is full.
    """
    stock = folder.with_name("stock.pt")
    model.stock.write(stock)
    source, target = model.languages
    for name in (f"dict.{source}.txt", f"dict.{target}.txt"):
        folder.with_name(name).write_bytes(model.files[name].read_bytes())
    try:
        converter = need("ctranslate2.converters").FairseqConverter(str(stock), str(stock.parent), source, target)
        converter.convert(str(folder), quantization=quantization)
    except OSError:
        raise
    except Exception as error:  # what it does not know fails wherever it is missed first
        reasons = [reason[2:] for reason in str(error).splitlines() if reason.startswith("- ")]
        raise AdminError(f"CTranslate2 cannot take this model: {'; '.join(reasons) or line(error)}.") from None


def check(model: Exportable, folder: Path) -> Checked:
    """Compare the log-probabilities that the folder gives to sentences with the checkpoint's."""
    ctranslate2 = need("ctranslate2")
    ctranslate2.set_log_level(logging.ERROR)  # that a processor computes in a wider type, the summary says
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=torch.get_num_threads())
    tests, differences = batches(model), []
    for scores, batch in zip(log_probabilities(build(model.original), tests), tests):
        source, target = (
            [[words[unit] for unit in units.tolist()] for units in sentences(tokens)]
            for words, tokens in ((model.source, batch.src_tokens), (model.target, batch.prev_output_tokens))
        )
        results = translator.score_batch(source, target, max_input_length=0)
        computed = torch.tensor([score for result in results for score in result.log_probs])
        # Each target's units and its end, which CTranslate2 adds itself.
        targets = [torch.cat([units, units.new_tensor([EOS])]) for units in sentences(batch.prev_output_tokens)]
        expected = scores.gather(1, torch.cat(targets).unsqueeze(1)).squeeze(1)
        differences.append((computed - expected).abs())
    every = torch.cat(differences)
    return Checked(every.max().item(), every.mean().item(), len(every), translator.compute_type)
