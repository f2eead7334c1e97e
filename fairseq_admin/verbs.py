"""The verbs of fairseq-admin. Each takes the parsed command line and returns the text to print.

A verb does its imports when it is called: torch and fairseq take seconds, and not every verb needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fingerprint, outputs
from .errors import AdminError
from .text.assets import Assets

if TYPE_CHECKING:
    from .checkpoints.checkpoint import Checkpoint


def omega(args: argparse.Namespace) -> str:
    """Show ω of every sub-layer of a checkpoint, and the record of its origin.

    Args:
        args: the parsed command line.

    Returns:
        The table.

    Raises:
        AdminError: the checkpoint has no ω.
    """
    from .checkpoints.checkpoint import Checkpoint
    from .method.state_dict import omega_summary

    checkpoint = Checkpoint.read(args.checkpoint)
    stacks, record, new_layers = checkpoint.omegas, checkpoint.record, checkpoint.new_layers
    if not stacks and not new_layers:
        raise AdminError(f"{checkpoint.name} has no omega: it is not (or no longer) an Admin model.")
    lines = []
    if not new_layers or "encoder" in stacks:
        lines.append("omega: " + (_listed(record) if record else "not set yet"))
    if new_layers:
        lines.append(f"new layers: {_listed(new_layers)}")
    if stacks:
        lines.append(f"{'stack':8} {'sub-layer':>9} {'layer':>5}  {'kind':12} {'min':>9} {'mean':>9} {'max':>9}")
    for stack, sublayers in stacks.items():
        for number, (name, omega) in enumerate(sublayers.items(), 1):
            _, layer, kind = name.split(".")
            numbers = " ".join(f"{value:9.4f}" for value in omega_summary(omega).values())
            lines.append(f"{stack:8} {number:9d} {layer:>5}  {kind:12} {numbers}")
    return "".join(f"{line}\n" for line in lines)


def _listed(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items())


def average(args: argparse.Namespace) -> str:
    """Average checkpoints into one.

    Args:
        args: the parsed command line.

    Returns:
        The names of the averaged files.

    Raises:
        AdminError: see `averaging.choose` and `averaging.average`; or the file cannot be written.
    """
    from .checkpoints import averaging

    paths = averaging.choose(args.inputs, args.last, args.by)
    text = _text(paths[0], args.data)
    outputs.check_writable(args.output, [*paths, *(text.files() if text else [])])
    averaged = averaging.average(paths)
    _note(averaged, text)
    averaged.write(args.output)
    return f"{args.output}: average of {', '.join(path.name for path in paths)}\n"


def fold(args: argparse.Namespace) -> str:
    """Fold a checkpoint, and compare the written file with it.

    Args:
        args: the parsed command line.

    Returns:
        The file, its architecture, and the largest difference.

    Raises:
        AdminError: the checkpoint cannot be folded, differs by more than --tolerance, or cannot be written.
    """
    from .checkpoints import equivalence, files
    from .checkpoints import fold as folding
    from .checkpoints.checkpoint import Checkpoint

    text = _text(args.checkpoint, args.data)
    outputs.check_writable(args.output, [args.checkpoint, *(text.files() if text else [])])
    checkpoint = Checkpoint.read(args.checkpoint)
    folded = folding.fold_checkpoint(checkpoint, args.min_omega, _languages(checkpoint, text))
    _note(folded, text)
    with files.saved(folded.state, args.output) as path:
        largest, positions = equivalence.verify(checkpoint, Checkpoint.read(path), args.data)
        message = f"log-probabilities of {positions} positions differ by up to {largest:.2g}"
        if largest > args.tolerance:
            raise AdminError(
                f"{args.checkpoint} folded is not the same: {message}, more than {args.tolerance:g}. Nothing was "
                "written. Keep the model unfolded, with --user-dir, or allow --tolerance."
            )
    return f"{args.output}: {folded.state['args']['arch']}, fp32; {message} (bound {args.tolerance:g})\n"


def _text(model: Path, data: Path | None) -> Assets | None:
    """The files of the model's text in the folder `data`; None without a folder."""
    if data and not os.path.isdir(data):
        raise AdminError(f"--data {data}: no such folder; expected the folder of the model's training text.")
    return Assets(model, data) if data else None


def _languages(checkpoint: Checkpoint, text: Assets | None) -> tuple[str, str] | None:
    """Source and target language of a translation model whose checkpoint does not name them.

    None, with a note to the user, if no file names them either.
    """
    task = checkpoint.options.task
    names = task.get("source_lang"), task.get("target_lang")
    if all(names) or checkpoint.kind != "transformer_admin":
        return None
    trained_on = Path(str(task.get("data")).partition(os.pathsep)[0])
    assert checkpoint.path is not None
    try:
        return (text or Assets(checkpoint.path, trained_on if trained_on.is_dir() else None)).languages(*names)
    except AdminError as error:
        print(f"fairseq-admin: the folded file names no languages: {error}", file=sys.stderr)
        return None


def _note(checkpoint: Checkpoint, text: Assets | None) -> None:
    """Note the fingerprints of the merges and text settings in the folder of the text, which must be the model's."""
    if text:
        text.expected = checkpoint.text
        if checkpoint.options.task.get("_name") == "translation":  # other tasks add symbols to their dictionaries
            text.refuse_other_dictionaries()
        fingerprints = {**checkpoint.text, **text.fingerprints()}
        checkpoint.state["model"] = fingerprint.with_fingerprints(checkpoint.weights, fingerprints)


def translate(args: argparse.Namespace) -> str:
    """Translate a text, line by line.

    Args:
        args: the parsed command line.

    Returns:
        An empty string, because the translations are written already.

    Raises:
        AdminError: a file of the model is missing or damaged, or the text cannot be read.
    """
    from .translation import engines, pipeline, streams

    if args.nbest > args.beam:
        raise AdminError(f"--nbest {args.nbest} is more than --beam {args.beam} finds; raise --beam.")
    assets = _assets(args, args.model)
    if args.output:
        text = Path("/dev/stdin") if str(args.text or "-") == "-" else args.text
        outputs.check_writable(args.output, [*assets.files(), text])
    search = engines.Search(args.beam, args.lenpen, args.nbest)
    kind = "units" if args.units else "tokens" if args.tokenised else "raw"
    with streams.opened(args.text) as (source, name), streams.written(args.output) as write:
        with contextlib.redirect_stdout(sys.stderr):  # a library may print, and only translations belong on stdout
            model = pipeline.Pipeline.load(args.model, assets, kind, args.device)
            streams.flow(model, source, name, write, search, args.batch_tokens)
    return ""


def export(args: argparse.Namespace) -> str:
    """Export a checkpoint for another engine, and compare the folder with it.

    Args:
        args: the parsed command line.

    Returns:
        The summary of the comparison.

    Raises:
        AdminError: see `folder.export`.
    """
    from .checkpoints.checkpoint import Checkpoint
    from .export import folder

    checkpoint = Checkpoint.read(args.checkpoint)
    assets = _assets(args, args.checkpoint)
    summary, notes = folder.export(checkpoint, args.to, args.output, assets, args.quantization, args.tolerance)
    for note in notes:
        print(f"fairseq-admin: {note}", file=sys.stderr)
    return f"{args.output}: {summary}\n"


def path(args: argparse.Namespace) -> str:
    """Find the folder that --user-dir takes.

    Args:
        args: the parsed command line.

    Returns:
        Its path.
    """
    return f"{Path(__file__).parent}\n"


def report(args: argparse.Namespace) -> str:
    """Write a page on some runs.

    Args:
        args: the parsed command line.

    Returns:
        The page's path and size.

    Raises:
        AdminError: see `runs.read_runs` and `page.render`; or the file cannot be written.
    """
    from .report import page, runs

    inputs = [path for run in args.runs for path in run.rglob("*") if path.suffix != ".html"]
    outputs.check_writable(args.output, inputs)
    read = runs.read_runs(args.runs)
    for run in read:
        if run.log is None:
            print(f"fairseq-admin: {run.missing['curves']}", file=sys.stderr)
    html = page.render(read).encode(errors="backslashreplace")  # a folder's name may not be UTF-8
    outputs.write_bytes(html, args.output)
    return f"{args.output}: {len(read)} run{'' if len(read) == 1 else 's'}, {len(html) / 1e6:.1f} MB\n"


def _assets(args: argparse.Namespace, model: Path) -> Assets:
    return Assets(model, args.data, args.codes, (args.source_lang, args.target_lang))
