"""Read the folder of a run for a report: a recipe's folder, or the --save-dir of fairseq-train.

Missing parts stay empty; `Run.missing` says for each, in one line, how to make it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..analysis import omega
from ..architectures.config import plain_options
from ..checkpoints import averaging
from ..checkpoints.checkpoint import OURS, STACKS, Checkpoint
from ..checkpoints.fold import FOLDABLE
from ..errors import AdminError, line
from ..method import state_dict
from ..method.schemes import SCHEMES
from . import curves
from .run import Run, Sample

SECTIONS = {
    "model": (
        *("_name", "admin_scheme", "admin_init", "encoder_layers", "decoder_layers"),
        *("more_layers", "more_scheme", "more_dropout", "pretrained_lr_factor", "profile_sentences"),
        *("encoder_embed_dim", "decoder_embed_dim", "encoder_ffn_embed_dim", "decoder_ffn_embed_dim"),
        *("encoder_attention_heads", "decoder_attention_heads", "dropout", "attention_dropout", "activation_dropout"),
        *("share_all_embeddings", "share_decoder_input_output_embed", "layernorm_embedding"),
    ),
    "task": ("_name", "source_lang", "target_lang", "data"),
    "criterion": ("_name", "label_smoothing"),
    "optimizer": ("_name", "adam_betas", "weight_decay"),
    "lr_scheduler": ("_name", "warmup_updates"),
    "optimization": ("lr", "clip_norm", "update_freq", "max_update", "max_epoch"),
    "dataset": ("max_tokens", "batch_size"),
    "distributed_training": ("distributed_world_size",),
    "common": ("seed", "fp16", "memory_efficient_fp16", "bf16", "amp", "cpu", "user_dir"),
}
"""The options shown, by section of fairseq's configuration."""


def read_runs(folders: list[Path]) -> list[Run]:
    """Read runs.

    Args:
        folders: the folders of the runs.

    Returns:
        The runs, in the same order.

    Raises:
        AdminError: a folder is not that of a run, is given twice, or has a file that cannot be read.
    """
    return [read_run(folder, name) for folder, name in zip(folders, curves.names(folders))]


def read_run(folder: Path, name: str) -> Run:
    """Read one run.

    Args:
        folder: the folder of the run.
        name: the run's name in the report.

    Returns:
        The run.

    Raises:
        AdminError: it is not a folder, has neither log nor checkpoint, or has a file that cannot be read.
    """
    log, checkpoint = curves.log_of(folder), _newest(folder)
    if log is None and checkpoint is None:
        raise AdminError(
            f"{folder} has neither a checkpoint (.pt) nor a log of fairseq-train (train.log); a run's folder was "
            "expected: a recipe's, or fairseq-train's --save-dir."
        )
    about, fold = _json(folder / "run.json"), folder / "fold.txt"
    analyses: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "analysis").glob("*.json")):
        result = _json(path)
        analyses.setdefault(str(result.get("what")), []).append(result)
    run = Run(
        folder=folder,
        name=name,
        log=log,
        checkpoint=checkpoint,
        score=_json(folder / "score.json"),
        about=about,
        samples=[Sample(**sample) for sample in about.get("samples") or []],
        fold=fold.read_text(encoding="utf-8", errors="replace").strip() if fold.exists() else "",
        analyses=analyses,
    )
    if checkpoint:
        _describe(run, Checkpoint.read(checkpoint))
    settings = _json(folder / "settings.json") | _json(folder / "recipe.json")  # up to 0.3.0, and today
    run.options |= {key: value for key, value in settings.items() if key[:2] != "--" and isinstance(value, str)}
    return run


def _newest(folder: Path) -> Path | None:
    """The checkpoint for ω and options: a recipe's average, or the last one."""
    for name in ("average.pt", "checkpoint_last.pt", "checkpoints/checkpoint_last.pt"):
        if (folder / name).exists():
            return folder / name
    try:
        return averaging.choose([folder], 1)[0]
    except AdminError:
        best = folder / "checkpoint_best.pt"
        return best if best.exists() else None


def _describe(run: Run, checkpoint: Checkpoint) -> None:
    """Fill in the description of the model from a checkpoint."""
    scheme, title = checkpoint.trained_as
    layers, record = checkpoint.layers, checkpoint.record or {}
    if checkpoint.new_layers:
        new = checkpoint.new_layers["scheme"]
        title += f", new layers {SCHEMES[new].title if new in SCHEMES else new}"
        layers = {side: state_dict.layers(checkpoint.weights, side) for side in ("encoder", "more")}
    run.options = _options(checkpoint)
    run.model = {
        "scheme": scheme,
        "title": title,
        "rule": record.get("rule", ""),
        **{f"{side}_layers": layers.get(side, 0) for side in ("encoder", "decoder")},
        "width": next((len(bias) for key, bias in checkpoint.weights.items() if key.endswith("fc2.bias")), "?"),
        "updates": checkpoint.updates,
    }
    run.layers = "-".join(str(count) for count in layers.values() if count)
    run.omega = omega.by_stack(checkpoint.weights)
    run.version = str(record.get("version", ""))
    if checkpoint.kind in STACKS and checkpoint.kind not in OURS:
        run.unfoldable = "a model of fairseq's own, which needs no folding."
    elif checkpoint.kind not in FOLDABLE or scheme not in SCHEMES or not checkpoint.scheme.folds:
        run.unfoldable = f"{title} cannot be folded."


def _options(checkpoint: Checkpoint) -> dict[str, str]:
    """The options that are on, by name, as on fairseq's command line."""
    args, cfg = checkpoint.state.get("args"), checkpoint.state.get("cfg") or {}
    options = {}
    for section, names in SECTIONS.items():
        config = vars(args) if args is not None else plain_options(cfg.get(section))
        for name in names:
            option = {"model": "arch"}.get(section, section) if name == "_name" else name
            value = config.get(option if args is not None and name == "_name" else name)
            if isinstance(value, (list, tuple)):
                value = ",".join(map(str, value))
            if value not in (None, False, "", 0, "0"):
                options[f"--{option.replace('_', '-')}"] = "on" if value is True else str(value)
    return options


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file is missing.

    Raises:
        AdminError: the file is not JSON.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        message = line(error)
        raise AdminError(
            f"{path}: cannot be read ({message}); expected JSON. Make it again, or move it away."
        ) from None
    if not isinstance(content, dict):
        raise AdminError(f"{path}: found a {type(content).__name__}, expected a JSON object. Make it again.")
    return content
