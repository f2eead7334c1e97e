"""Export a folder that CTranslate2 reads."""

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
from .exportable import Exportable, batches, refuse_unlike, sentences


class Checked(NamedTuple):
    """Differences between the folder's log-probabilities and the checkpoint's, in nats."""

    largest: float
    mean: float
    units: int
    compute_type: str
    """The type that CTranslate2 computes in on this machine; it may be wider than the stored type."""


def write(
    model: Exportable, output: Path, folder: Path, quantization: str | None, tolerance: float
) -> tuple[str, list[str]]:
    """Write the folder and check it, always in float32 first.

    Args:
        model: the model to export.
        output: the folder's name in messages.
        folder: the folder to write, which does not exist yet. Temporary files are next to it.
        quantization: type of the stored weights. None: float32.
        tolerance: largest difference in float32. Other types are measured but not judged: their rounding would
            hide a small mistake.

    Returns:
        A summary of the check, and an empty list: this export has no notes for the user.

    Raises:
        AdminError: CTranslate2 cannot compute this model, or computes something else; or the disk is full.
    """
    with outputs.writing(output):
        convert(model, folder, None)
    exact = compare(model, folder)
    refuse_unlike(exact.largest, tolerance, f"{exact.units} units")
    summary = f"CTranslate2, float32; log-probabilities of {exact.units} units differ by up to {exact.largest:.2g}"
    if quantization in (None, "float32"):
        return summary, []
    with outputs.writing(output):
        shutil.rmtree(folder)
        convert(model, folder, quantization)
    quantised = compare(model, folder)
    return (
        f"{summary}; as {quantization}, here computed in {quantised.compute_type}, by up to {quantised.largest:.2g}, "
        f"{quantised.mean:.2g} on average"
    ), []


def convert(model: Exportable, folder: Path, quantization: str | None) -> None:
    """Write the folder, and next to it the files that the converter reads.

    Args:
        model, folder, quantization: see `write`.

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
    except Exception as error:  # an unknown option fails wherever the converter first needs it
        reasons = [reason[2:] for reason in str(error).splitlines() if reason.startswith("- ")]
        raise AdminError(f"CTranslate2 cannot take this model: {'; '.join(reasons) or line(error)}.") from None


def compare(model: Exportable, folder: Path) -> Checked:
    """Compare the folder's log-probabilities with the checkpoint's.

    Args:
        model: the exported model.
        folder: its folder.

    Returns:
        The differences.
    """
    ctranslate2 = need("ctranslate2")
    ctranslate2.set_log_level(logging.ERROR)  # the summary says if the processor computes in a wider type
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=torch.get_num_threads())
    tests, differences = batches(model), []
    for scores, batch in zip(log_probabilities(build(model.original), tests), tests):
        source, target = (
            [[words[unit] for unit in units.tolist()] for units in sentences(tokens)]
            for words, tokens in ((model.source, batch["src_tokens"]), (model.target, batch["prev_output_tokens"]))
        )
        results = translator.score_batch(source, target, max_input_length=0)
        computed = torch.tensor([score for result in results for score in result.log_probs])
        # CTranslate2 adds the end of each target itself.
        targets = [torch.cat([units, units.new_tensor([EOS])]) for units in sentences(batch["prev_output_tokens"])]
        expected = scores.gather(1, torch.cat(targets).unsqueeze(1)).squeeze(1)
        differences.append((computed - expected).abs())
    every = torch.cat(differences)
    return Checked(every.max().item(), every.mean().item(), len(every), translator.compute_type)
