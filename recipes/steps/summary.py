"""Close a job: draw the loss and ω, and say what came out, where it lies and what to run next.

    python -m recipes.steps.summary runs/demo/admin-cpu-s1 --raw runs/demo/data/raw/test --pair de-en --command ...

writes RUN/loss.png, RUN/omega.png (for a model with ω) and RUN/summary.txt. Runs of the other methods with the same
preset and seed are drawn and set beside it once they have a score.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from recipes.steps.common import read_lines, replacing, run, write_lines
from recipes.steps.logs import Log, read_log

BASELINES = ("admin", "post-ln", "pre-ln")
NAMES = {
    **dict(zip(BASELINES, ("Admin", "Post-LN", "Pre-LN"))),
    "post-ln-pre-ln": "Post-Pre-LN",
    "deepnorm": "DeepNorm",
    "rezero": "ReZero",
    "rezero-post-ln": "ReZero-Post-LN",
    "t-fixup": "T-Fixup",
    "fixup": "Fixup",
    "b2t": "B2T",
    "looklinear": "LookLinear",
    "ds-init": "DS-Init",
}
SAMPLES = 5
ROWS = 8


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    score: dict[str, str]
    log: Log


def finished_runs(folder: Path) -> list[Run]:
    """The scored runs that differ from this one in method only, in the order of NAMES."""
    method = max((name for name in NAMES if folder.name.startswith(f"{name}-")), key=len)
    runs = []
    for other in NAMES:
        path = folder.with_name(folder.name.replace(method, other, 1))
        if (path / "score.json").exists():
            score = json.loads((path / "score.json").read_text(encoding="utf-8"))
            runs.append(Run(NAMES[other], path, score, read_log(path / "train.log")))
    return runs


def draw_loss(runs: list[Run], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for method in runs:
        (line,) = axes.plot(*zip(*method.log.train.items()), alpha=0.5, linewidth=1)
        label = f"{method.name}: {method.score['score']} BLEU"
        axes.plot(*zip(*method.log.valid.items()), "o-", markersize=3, color=line.get_color(), label=label)
    axes.set(xlabel="updates", ylabel="bits a token (thin: train, dots: valid)", ylim=(0, None))
    axes.legend()
    save(figure, path)


def draw_omega(stacks: dict[str, list[dict]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for stack in ("encoder", "decoder"):
        numbers = range(1, len(stacks[stack]) + 1)
        low, mean, high = ([sublayer[name] for sublayer in stacks[stack]] for name in ("min", "mean", "max"))
        axes.fill_between(numbers, low, high, alpha=0.25)
        axes.plot(numbers, mean, label=stack)
    axes.set(xlabel="sub-layer", ylabel="ω: mean and range over channels", ylim=(0, None))
    axes.legend()
    save(figure, path)


def save(figure, path: Path) -> None:
    figure.tight_layout()
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=150)
    pyplot.close(figure)


def table(rows: list[list[str]]) -> list[str]:
    """The rows with their columns aligned, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


def scores(runs: list[Run]) -> list[str]:
    rows = [["", *(run.name for run in runs)]]
    for label, key in (("sacreBLEU", "score"), ("parameters", "params"), ("updates", "updates"), ("hours", "hours")):
        rows.append([label, *(str(run.score[key]) for run in runs)])
    return [*table(rows), *sorted({f"signature: {run.score['signature']}" for run in runs})]


def losses(runs: list[Run]) -> list[str]:
    """Validation losses, at up to ROWS updates that some run was validated at."""
    updates = sorted(set().union(*(run.log.valid for run in runs)))
    step = -(-len(updates) // ROWS)
    rows = [["bits a token, valid", *(run.name for run in runs)]]
    for update in updates[::-step][::-1]:
        cells = (run.log.valid.get(update) for run in runs)
        rows.append([f"update {update}", *("-" if bits is None else f"{bits:.3f}" for bits in cells)])
    return table(rows)


def samples(runs: list[Run], raw: str, pair: str) -> list[str]:
    """Sentences from all over the test set: source, each run's translation, reference."""
    source, target = pair.split("-")
    sources, references = read_lines(f"{raw}.{source}"), read_lines(f"{raw}.{target}")
    translations = {run.name: read_lines(run.folder / "translations.txt") for run in runs}
    text = []
    for sample in range(SAMPLES):
        number = sample * len(references) // SAMPLES
        lines = {source: sources[number]} | {name: lines[number] for name, lines in translations.items()}
        lines["reference"] = references[number]
        text += [f"{name:>10}  {line}" for name, line in lines.items()] + [""]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--raw", required=True, help="prefix of the raw test set: RAW.de, RAW.en")
    parser.add_argument("--pair", required=True, help="source and target, as in de-en")
    parser.add_argument("--command", required=True, help="the command that ran the job, to say what to run next")
    args = parser.parse_args()

    runs = finished_runs(args.run)
    draw_loss(runs, args.run / "loss.png")
    files = {"loss": "loss.png"}
    if (args.run / "omega.json").exists():
        draw_omega(json.loads((args.run / "omega.json").read_text(encoding="utf-8")), args.run / "omega.png")
        files["omega by sub-layer"] = "omega.png"
    files |= {
        "translations": "translations.txt",
        "model": "model/",
        "averaged, unfolded": "average.pt",
        "checkpoints": "checkpoints/",
        "log": "train.log",
        "this text": "summary.txt",
    }
    missing = [method for method in BASELINES if NAMES[method] not in [run.name for run in runs]]
    following = [f"{args.command} METHOD={method}" for method in missing] or [f"{args.command} SEED=2"]
    example = read_lines(f"{args.raw}.{args.pair.partition('-')[0]}")[0]
    program = os.path.relpath(Path(sys.executable).with_name("fairseq-admin"))
    following.append(f"echo {shlex.quote(example)} | {program} translate {args.run}/model/model.pt")
    text = [
        f"{args.run}: {args.pair}",
        "",
        *scores(runs),
        "",
        *losses(runs),
        "",
        *samples(runs, args.raw, args.pair),
        "Where everything lies:",
        *(f"  {what:18}  {args.run / name}" for what, name in files.items()),
        "",
        "What to run next:",
        *(f"  {command}" for command in following),
    ]
    write_lines(args.run / "summary.txt", text)


if __name__ == "__main__":
    run(main)
