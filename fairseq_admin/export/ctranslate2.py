"""A folder that CTranslate2 reads.

T units of a sentence
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoints.building import build
from ..checkpoints.equivalence import EOS, Batch, log_probabilities
from ..errors import AdminError, line
from .exportable import Exportable, batches, sentences

BOUND = 1e-4
"""Largest difference of a unit's log-probability, float32: an 18L-18L model's was 1.3e-5, by the order of sums."""

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


def installed() -> ModuleType:
    """The package.

    Raises:
        AdminError: it is not there.
    """
    try:
        import ctranslate2
        import ctranslate2.converters
        import ctranslate2.specs
    except ImportError:
        raise AdminError("ctranslate2 is not installed. Run pip install 'ctranslate2>=4.8.1'.") from None
    return ctranslate2


def refuse_unknown(quantization: str | None) -> None:
    """Refuse a type for the weights that CTranslate2 does not know.

    Raises:
        AdminError: it is one, or CTranslate2 is not installed.
    """
    kinds = installed().specs.model_spec.ACCEPTED_MODEL_TYPES
    if quantization not in (None, *kinds):
        raise AdminError(f"--quantization {quantization} is not one that this CTranslate2 knows: {', '.join(kinds)}.")


def convert(model: Exportable, work: Path, folder: Path, quantization: str | None) -> None:
    """Write the folder.

    Args:
        model: what to export.
        work: a folder for what is needed meanwhile.
        folder: to write; it does not exist yet.
        quantization: what to store the weights in; None: float32.

    Raises:
        AdminError: CTranslate2 cannot compute this model.
        OSError: the disk is full.
    """
    ctranslate2 = installed()
    file = work / "stock.pt"
    model.stock.write(file)
    for name in (f"dict.{language}.txt" for language in model.languages):
        (work / name).write_bytes(model.files[name].read_bytes())
    source, target = model.languages
    try:
        converter = ctranslate2.converters.FairseqConverter(str(file), str(work), source, target)
        converter.convert(str(folder), quantization=quantization)
    except OSError:
        raise
    except Exception as error:  # what it does not know fails wherever it is missed first
        reason = "; ".join([it[2:] for it in str(error).splitlines() if it.startswith("- ")]) or line(error)
        raise AdminError(f"CTranslate2 cannot take this model: {reason}.") from None


def check(model: Exportable, folder: Path, bound: float | None) -> Checked:
    """Compare the log-probabilities that the folder gives to sentences with the checkpoint's.

    Args:
        model: what was exported.
        folder: what `convert` wrote.
        bound: for the largest difference; None: none but NONSENSE, for the mean.

    Raises:
        AdminError: they differ by more.
    """
    ctranslate2 = installed()
    with _quiet(ctranslate2):
        translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=torch.get_num_threads())
    tests = batches(model)
    apart = []
    for scores, batch in zip(log_probabilities(build(model.original), tests), tests):
        expected, found = _expected(batch, scores), _found(translator, model, batch)
        apart += [(a - b).abs() for a, b in zip(expected, found)]
    every = torch.cat(apart)
    result = Checked(every.max().item(), every.mean().item(), len(every), translator.compute_type)
    if bound is not None and not result.largest <= bound:
        raise AdminError(
            f"exported, the log-probabilities of {result.units} units differ by up to {result.largest:.2g}, more than "
            f"{bound:g}. Nothing was written. Allow it with --tolerance, or translate with fairseq."
        )
    if not result.mean <= NONSENSE:
        raise AdminError(
            f"exported, the log-probabilities of {result.units} units differ by {result.mean:.2g} on average, more "
            f"than {NONSENSE:g}. Nothing was written. Give another --quantization."
        )
    return result


def _expected(batch: Batch, scores: Tensor) -> list[Tensor]:
    """Log-probabilities of each target's units and of its end, from those of all units. Shapes (T + 1,)."""
    targets = [torch.cat([units, units.new_tensor([EOS])]) for units in sentences(batch.prev_output_tokens)]
    picked = scores.gather(1, torch.cat(targets).unsqueeze(1)).squeeze(1)
    return list(picked.split([len(target) for target in targets]))


def _found(translator: Any, model: Exportable, batch: Batch) -> list[Tensor]:
    """The same from CTranslate2, which adds the end itself."""
    source = [[model.source[unit] for unit in units.tolist()] for units in sentences(batch.src_tokens)]
    target = [[model.target[unit] for unit in units.tolist()] for units in sentences(batch.prev_output_tokens)]
    return [torch.tensor(scored.log_probs) for scored in translator.score_batch(source, target, max_input_length=0)]


@contextlib.contextmanager
def _quiet(ctranslate2: ModuleType) -> Iterator[None]:
    """No warning that weights are widened where the processor does not compute in their type: `check` tells."""
    level = ctranslate2.get_log_level()
    ctranslate2.set_log_level(logging.ERROR)
    try:
        yield
    finally:
        ctranslate2.set_log_level(level)
