"""A checkpoint as a folder of another engine's, checked before it is there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import fingerprint, outputs
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..text.assets import Assets
from ..text.bpe import CODES, in_pieces
from ..text.tokens import FILE
from . import ctranslate2, huggingface, tokenizer
from .exportable import Exportable, prepare

ENGINES = ("ctranslate2", "huggingface")


class Exported(NamedTuple):
    """What was checked, in words, and what else the user should know."""

    summary: str
    notes: list[str]


def export(
    checkpoint: Checkpoint,
    engine: str,
    output: Path,
    assets: Assets | None = None,
    quantization: str | None = None,
    tolerance: float | None = None,
) -> Exported:
    """Write a folder that an engine reads, with the dictionaries and whatever else the text needs.

    Args:
        checkpoint: of an Admin model, folded or not, or of a stock Transformer; one read from a file.
        engine: one of ENGINES.
        output: the folder to write; it may exist, empty.
        assets: its dictionaries, and codes and text.json if they are there; None: what is next to the checkpoint.
        quantization: CTranslate2's name of a type to store the weights in; None: float32.
        tolerance: the largest difference of log-probabilities in float32; None: the engine's own bound.

    Raises:
        AdminError: the model or the folder cannot be exported, or what was exported is not the same function.
    """
    if engine == "huggingface" and quantization:
        raise AdminError("--quantization is for --to ctranslate2; transformers quantise while they load a model.")
    if engine == "huggingface":
        huggingface.installed()
    else:
        ctranslate2.refuse_unknown(quantization)
    with _new(output) as (work, folder):
        assert checkpoint.path is not None
        model = prepare(checkpoint, assets or Assets(checkpoint.path))
        write = _ctranslate2 if engine == "ctranslate2" else _huggingface
        exported = write(model, output, work, folder, quantization, tolerance)
        for name, found in model.files.items():
            content = found.read_bytes()
            with outputs.writing(output):
                (folder / name).write_bytes(content)
        with outputs.writing(output):
            fingerprint.write(folder, model.fingerprints)
    needed = [*([CODES] if in_pieces(model.source.symbols) else []), FILE]
    missing = [name for name in needed if name not in model.files]
    if missing:
        exported.notes.append(
            f"found no {' and no '.join(missing)}, which `fairseq-admin translate {output}` needs for raw text."
        )
    return exported


def _ctranslate2(
    model: Exportable, output: Path, work: Path, folder: Path, quantization: str | None, tolerance: float | None
) -> Exported:
    exact = folder if quantization in (None, "float32") else work / "exact"
    with outputs.writing(output):  # the dictionaries that it reads, `prepare` could read
        ctranslate2.convert(model, work, exact, None)
    found = ctranslate2.check(model, exact, ctranslate2.BOUND if tolerance is None else tolerance)
    summary = f"CTranslate2, float32; log-probabilities of {found.units} units differ by up to {found.largest:.2g}"
    if exact != folder:
        with outputs.writing(output):
            shutil.rmtree(exact)
            ctranslate2.convert(model, work, folder, quantization)
        found = ctranslate2.check(model, folder, None)
        summary += (
            f"; as {quantization}, here computed in {found.compute_type}, by up to {found.largest:.2g}, "
            f"{found.mean:.2g} on average"
        )
    return Exported(summary, [])


def _huggingface(
    model: Exportable, output: Path, work: Path, folder: Path, quantization: str | None, tolerance: float | None
) -> Exported:
    with outputs.writing(output):
        folder.mkdir()
        huggingface.convert(model, folder)
    found = huggingface.check(model, folder, tolerance)
    reason = tokenizer.unlike(model)
    if reason is None:
        with outputs.writing(output):
            written = tokenizer.write(model, folder)
        reason = tokenizer.difference(model, folder)
        if reason:
            for file in written:
                file.unlink()
    return Exported(
        f"FSMT{'' if reason else ' with its tokenizer'}; log-probabilities of {found.positions} positions differ by up "
        f"to {found.largest:.2g}, {found.equal} of {found.translations} greedy translations are equal",
        [f"no tokenizer was written: {reason}."] if reason else [],
    )


@contextlib.contextmanager
def _new(output: Path) -> Iterator[tuple[Path, Path]]:
    """A folder to work in and the name of one to make there, which becomes `output` if all goes well.

    Nothing is left of them if not.

    Raises:
        AdminError: `output` holds something, or nothing can be written there.
    """
    if os.path.lexists(output) and not (output.is_dir() and not output.is_symlink() and not any(output.iterdir())):
        raise AdminError(f"{output} exists; a new or empty folder was expected. Remove it, or give another --output.")
    with outputs.replacing(output) as folder:
        work = folder.with_name(f"{folder.name}.work")
        with outputs.writing(output):
            work.mkdir()
        yield work, folder
        mask = os.umask(0)
        os.umask(mask)
        with outputs.writing(output):
            for file in folder.iterdir():  # safetensors writes for the owner alone
                file.chmod(0o666 & ~mask)
