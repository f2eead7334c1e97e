"""Export a checkpoint as a folder for another engine, and check the folder before it appears under its name."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .. import outputs
from ..checkpoints.checkpoint import Checkpoint
from ..errors import AdminError
from ..packages import need
from ..text.assets import FINGERPRINTS, POSITIONS, Assets
from . import ctranslate2, huggingface
from .exportable import BOUND, prepare


def export(
    checkpoint: Checkpoint,
    engine: str,
    output: Path,
    assets: Assets | None = None,
    quantization: str | None = None,
    tolerance: float = BOUND,
) -> tuple[str, list[str]]:
    """Write a folder for an engine, with the dictionaries and other files that the text needs.

    Args:
        checkpoint: one that was read from a file, of an Admin model, folded or not, or of a stock Transformer.
        engine: "ctranslate2" or "huggingface".
        output: the folder to write, new or empty.
        assets: its dictionaries, and codes and text.json if they are there. None: the files next to the checkpoint.
        quantization: CTranslate2's name for the type of the stored weights. None: float32.
        tolerance: largest difference of log-probabilities in float32.

    Returns:
        A summary of the check, and notes for the user.

    Raises:
        AdminError: the model cannot be exported, or not exactly enough, or the folder cannot be written.
    """
    if engine == "ctranslate2":
        need("ctranslate2")
    else:
        need("transformers")
        if quantization:
            raise AdminError("--quantization is for --to ctranslate2; transformers quantise while they load a model.")
    if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        raise AdminError(f"{output} exists; a new or empty folder was expected. Remove it, or give another --output.")
    assert checkpoint.path is not None
    with outputs.replacing(output) as folder:
        model = prepare(checkpoint, assets or Assets(checkpoint.path))
        if engine == "ctranslate2":
            summary, notes = ctranslate2.write(model, output, folder, quantization, tolerance)
        else:
            summary, notes = huggingface.write(model, output, folder, tolerance)
        for name, path in model.files.items():
            content = path.read_bytes()
            with outputs.writing(output):
                (folder / name).write_bytes(content)
        positions = min(model.options.max_source_positions, model.options.max_target_positions)
        with outputs.writing(output):
            noted = {**model.fingerprints, POSITIONS: str(positions)}
            (folder / FINGERPRINTS).write_text(json.dumps(noted, indent=1) + "\n", encoding="utf-8")
    return summary, notes
