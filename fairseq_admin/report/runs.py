"""A run's folder, a recipe's or fairseq-train's --save-dir, as a report shows it.

Parts that are not there stay empty; `Run.lacking` says of each, in one line, how to make it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import logs
from ..analysis import curves
from ..checkpoints import averaging
from ..checkpoints.checkpoint import OURS, STACKS, Checkpoint
from ..checkpoints.fold import FOLDABLE
from ..errors import AdminError, line
from ..method import state_dict
from ..method.omega import omega_summary
from ..method.schemes import EVERY, SCHEMES
from . import samples
from .options import options_of

CURVES, OMEGA, SCORES, SAMPLES, FOLD = "curves", "omega", "scores", "samples", "fold"
DEPENDENCY, CHANGE = "dependency", "output-change"
"""The parts of a report that a run may lack."""

FILES = (
    *("*.log", "*log.txt", "*.pt", "checkpoints/*.pt", "score.json", "run.json", "settings.json"),
    *("generate*.txt", "fold.txt", "analysis/*.json"),
)
"""Every file of a run's folder that a report may read, as patterns."""


@dataclass(eq=False)
class Run:
    """What is known of a run."""

    folder: Path
    name: str
    """What the report calls it, unlike any other run's."""
    log: logs.Log | None = None
    checkpoint: Path | None = None
    scheme: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    options: dict[str, str] = field(default_factory=dict)
    """What it was trained with: fairseq's options that matter, and a recipe's settings of the text."""
    omega: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By stack, of every sub-layer {layer, kind, min, mean, max, profiled}: ω, and its mean before training."""
    version: str = ""
    """The version of fairseq_admin that profiled it."""
    score: dict[str, Any] = field(default_factory=dict)
    """A recipe's score.json."""
    about: dict[str, Any] = field(default_factory=dict)
    """A recipe's run.json: {command, versions, paper, samples}."""
    samples: list[samples.Sample] = field(default_factory=list)
    unfolded: str = ""
    """Why `fairseq-admin fold` does not take its checkpoint, if so."""
    fold: str = ""
    """What `fairseq-admin fold` said of its check."""
    analyses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What `fairseq-admin analyze` wrote, by what it is of."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Of every part that is not there, how to make it."""


def files(folders: list[Path]) -> list[Path]:
    """Every file that may be read of the runs in these folders."""
    return [path for folder in folders for pattern in FILES for path in folder.glob(pattern)]


def read_all(folders: list[Path]) -> list[Run]:
    """The runs in these folders.

    Raises:
        AdminError: one is not a run's folder, comes twice, or holds what cannot be read.
    """
    return [read(folder, name) for folder, name in zip(folders, curves.names(folders))]


def read(folder: Path, name: str) -> Run:
    """One run.

    Raises:
        AdminError: it is not a folder, has neither log nor checkpoint, or holds what cannot be read.
    """
    run = Run(folder, name, curves.read_log(folder))
    run.checkpoint = _newest(folder)
    if run.checkpoint:
        _read_checkpoint(run, Checkpoint.read(run.checkpoint))
    if run.log:
        run.updates = max(run.updates, run.log.updates)
    if run.checkpoint is None and run.log is None:
        raise AdminError(
            f"{folder} has neither a checkpoint (.pt) nor a log of fairseq-train (train.log); a run's folder was "
            "expected: a recipe's, or fairseq-train's --save-dir."
        )
    run.score = _flat(_json(folder / "score.json", params=int, tokens=int), folder / "score.json")
    run.about = _json(folder / "run.json", versions=dict, paper=dict, samples=list)
    _flat(run.about.get("paper") or {}, folder / "run.json")
    settings = _json(folder / "settings.json")
    run.options |= {key: str(value) for key, value in settings.items() if key[:2] != "--" and isinstance(value, str)}
    run.samples = samples.read(folder, run.about.get("samples", []))
    fold = folder / "fold.txt"
    run.fold = fold.read_text(encoding="utf-8", errors="replace").strip() if fold.exists() else ""
    for path in sorted((folder / "analysis").glob("*.json")):
        found = _json(path)
        run.analyses.setdefault(str(found.get("what")), []).append(found)
    _say_what_is_lacking(run)
    return run


def _newest(folder: Path) -> Path | None:
    """The checkpoint to read ω and options from: a recipe's average, or the last one."""
    for place in (folder, folder / "checkpoints"):
        for name in ("average.pt", "checkpoint_last.pt"):
            if (place / name).exists():
                return place / name
    try:
        return averaging.choose([folder], 1)[0]
    except AdminError:
        best = folder / "checkpoint_best.pt"
        return best if best.exists() else None


def _read_checkpoint(run: Run, checkpoint: Checkpoint) -> None:
    scheme = checkpoint.scheme_name
    run.scheme = SCHEMES[scheme].title if scheme in SCHEMES else scheme
    run.layers = {stack: layers for stack, layers in checkpoint.layers.items() if layers}
    run.updates = checkpoint.updates
    if checkpoint.more:
        new = EVERY.get(checkpoint.more["scheme"])
        run.scheme += f", new layers {new.title if new else checkpoint.more['scheme']}"
        run.layers = {side: state_dict.layers(checkpoint.weights, side) for side in ("encoder", "more")}
    if checkpoint.kind in STACKS and checkpoint.kind not in OURS:
        run.unfolded = "a model of fairseq's own, which needs no folding."
    elif checkpoint.kind not in FOLDABLE or scheme not in SCHEMES or not checkpoint.scheme.folds:
        run.unfolded = f"{run.scheme} cannot be folded."
    run.options = options_of(checkpoint)
    run.version = str((checkpoint.record or {}).get("version", ""))
    weights = {key: it for key, it in checkpoint.weights.items() if not key.endswith(state_dict.OMEGA_DELTA)}
    profiled = state_dict.omegas(weights)
    for stack, sublayers in checkpoint.omegas.items():
        run.omega[stack] = [
            {"layer": int(key.split(".")[1]) + 1, "kind": key.split(".")[2]}
            | {**omega_summary(omega), "profiled": omega_summary(profiled[stack][key])["mean"]}
            for key, omega in sublayers.items()
        ]


def _json(path: Path, **kinds: type) -> dict[str, Any]:
    """The object in a file; empty if there is no such file.

    Args:
        kinds: of what it may hold, by name.

    Raises:
        AdminError: it holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = line(error)
        raise AdminError(f"{path}: cannot be read ({said}); expected JSON. Make it again, or move it away.") from None
    if not isinstance(found, dict):
        raise AdminError(f"{path}: found a {type(found).__name__}, expected a JSON object. Make it again.")
    for name, kind in kinds.items():
        value = found.get(name) or kind()
        if not isinstance(value, kind):
            raise AdminError(
                f"{path}: found a {type(value).__name__} as {name!r}, expected a {kind.__name__}. Make it again."
            )
    return found


def _flat(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """A file's object, which a table shows an entry a cell.

    Raises:
        AdminError: it has objects or lists in it.
    """
    for name, value in found.items():
        if isinstance(value, (dict, list)):
            raise AdminError(
                f"{path}: found a {type(value).__name__} as {name!r}, expected a text or a number. Make it again."
            )
    return found


def _say_what_is_lacking(run: Run) -> None:
    folder, checkpoint = run.folder, run.checkpoint or "CHECKPOINT"
    if run.log is None:
        run.lacking[CURVES] = curves.no_log(folder)
    if run.checkpoint is None:
        run.lacking[OMEGA] = f"{folder} has no checkpoint; expected average.pt or checkpoint_last.pt."
    elif not run.omega:
        run.lacking[OMEGA] = f"{run.scheme} has no ω."
    for part in (DEPENDENCY, CHANGE):
        if part not in run.analyses:
            analyze = f"fairseq-admin analyze {part} {checkpoint} --data DATA -o {folder}/analysis/{part}"
            run.lacking[part] = f"Not measured: mkdir -p {folder}/analysis; {analyze}"
    if not run.score:
        run.lacking[SCORES] = f"{folder} has no score.json, which a recipe writes."
    if not run.samples:
        run.lacking[SAMPLES] = f"No translations: fairseq-generate … | tee {folder}/generate.txt"
    if not run.fold:
        run.lacking[FOLD] = (
            run.unfolded
            or f"Not checked: fairseq-admin fold {checkpoint} -o model.pt --data DATA | tee {folder}/fold.txt"
        )


def best(curve: dict[int, float]) -> tuple[int, float] | None:
    """The update at which a curve is lowest, and its value there; None without a finite one."""
    finite = [(bits, updates) for updates, bits in curve.items() if re.fullmatch(r"-?\d.*", str(bits))]
    return (min(finite)[1], min(finite)[0]) if finite else None
