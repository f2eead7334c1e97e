"""Close a job: draw the loss and ω, and say what came out, where it is and what to run next.

    python -m recipes.steps.summary runs/demo/admin-cpu-s1 --command "make demo" --raw data/raw/test --pair de-en

writes RUN/loss.png, RUN/omega.png (for a model with ω), RUN/summary.txt and, for the report, RUN/run.json. Runs of the
other methods with the same preset and seed are drawn and set next to it once they have a score.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from tabulate import tabulate

from recipes.steps import about
from recipes.steps.common import read_lines, replacing, run, write_lines
from recipes.steps.logs import Log, read_log
from recipes.steps.plugin import SCHEMES
from recipes.steps.results import KEY, read_score

if TYPE_CHECKING:
    from fairseq_admin.report import tables
else:
    from recipes.plugin.report import tables

BASELINES = ("admin", "post-ln", "pre-ln")
MEASURES = {"score": "sacreBLEU", "perplexity": "perplexity"}
"""What a score.json may hold as the result, and what to call it."""


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    score: dict[str, str]
    log: Log


def finished_runs(folder: Path) -> list[Run]:
    """The scored runs that differ from this one in method only, in the order of the table of schemes."""
    own = read_score(folder / "score.json")
    found = {}
    for path in folder.parent.glob("*/score.json"):
        score = read_score(path)
        if all(score[name] == own[name] for name in KEY if name != "method"):
            found[score["method"]] = (path.parent, score)
    return [
        Run(scheme.title, *found[method], read_log(found[method][0] / "train.log"))
        for method, scheme in SCHEMES.items()
        if method in found
    ]


def measured(run: Run) -> tuple[str, str]:
    """What a run is judged by, and how it did."""
    return next((label, run.score[key]) for key, label in MEASURES.items() if key in run.score)


def draw_loss(runs: list[Run], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for method in runs:
        (line,) = axes.plot(*zip(*method.log.train.items()), alpha=0.5, linewidth=1)
        label = f"{method.name}: {' '.join(measured(method))}"
        axes.plot(*zip(*method.log.valid.items()), "o-", markersize=3, color=line.get_color(), label=label)
    axes.set(xlabel="updates", ylabel="bits per token (thin: train, dots: valid)", ylim=(0, None))
    axes.legend()
    save(figure, path)


def draw_omega(stacks: dict[str, list[dict]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for stack in [name for name in ("encoder", "decoder") if name in stacks]:
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
    """The rows under the first, their columns aligned, the first to the left and the others to the right."""
    sides = ("left", *("right",) * (len(rows[0]) - 1))
    return tabulate(rows, "firstrow", tablefmt="plain", colalign=sides, disable_numparse=True).splitlines()


def scores(runs: list[Run]) -> list[str]:
    rows = tables.results(runs)
    signatures = sorted({f"signature: {run.score['signature']}" for run in runs})
    return [*table([["", *(run.name for run in runs)], *([row.title, *row.cells] for row in rows)]), *signatures]


def losses(runs: list[Run]) -> list[str]:
    rows = [["bits per token, valid", *(run.name for run in runs)]]
    return table([*rows, *([row.title, *(cell or "-" for cell in row.cells)] for row in tables.losses(runs))])


def samples(runs: list[Run], raw: str, pair: str) -> list[str]:
    """Sentences from all over the test set: source, each run's translation, reference."""
    source, target = pair.split("-")
    sources, references = read_lines(f"{raw}.{source}"), read_lines(f"{raw}.{target}")
    translations = {run.name: read_lines(run.folder / "translations.txt") for run in runs}
    text = []
    for number in about.numbers(len(references)):
        lines = {source: sources[number]} | {name: lines[number] for name, lines in translations.items()}
        lines["reference"] = references[number]
        text += [f"{name:>10}  {line}" for name, line in lines.items()] + [""]
    return text


def files(run: Path) -> list[str]:
    """What is in a run's folder, and what it is."""
    named = {
        "loss": "loss.png",
        "omega by sub-layer": "omega.png",
        "translations": "translations.txt",
        "model": "model" if (run / "model").exists() else "model.pt",
        "averaged, unfolded": "average.pt",
        "checkpoints": "checkpoints",
        "log": "train.log",
        "this text": "summary.txt",
    }
    there = {what: run / name for what, name in named.items() if (run / name).exists() or name == "summary.txt"}
    return [f"  {what:18}  {path}{'/' if path.is_dir() else ''}" for what, path in there.items()]


def next_commands(args: argparse.Namespace, runs: list[Run]) -> list[str]:
    missing = [method for method in BASELINES if method not in [run.score["method"] for run in runs]]
    following = [f"{args.command} METHOD={method}" for method in missing] or [f"{args.command} SEED=2"]
    if args.raw:
        example = read_lines(f"{args.raw}.{args.pair.partition('-')[0]}")[0]
        program = os.path.relpath(Path(sys.executable).with_name("fairseq-admin"))
        following.append(f"echo {shlex.quote(example)} | {program} translate {args.run}/model/model.pt")
    return [f"  {command}" for command in following]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--command", required=True, help="the command that ran the job, to say what to run next")
    parser.add_argument("--raw", help="of a translation: prefix of the raw test set, of RAW.de and RAW.en")
    parser.add_argument("--pair", help="of a translation: source and target, as in de-en")
    args = parser.parse_args()

    about.write(args.run, args.command, args.raw, args.pair)
    runs = finished_runs(args.run)
    draw_loss(runs, args.run / "loss.png")
    if (args.run / "omega.json").exists():
        draw_omega(json.loads((args.run / "omega.json").read_text(encoding="utf-8")), args.run / "omega.png")
    text = [
        f"{args.run}: {args.pair}" if args.pair else str(args.run),
        "",
        *scores(runs),
        "",
        *losses(runs),
        "",
        *(samples(runs, args.raw, args.pair) if args.raw else []),
        "Where everything is:",
        *files(args.run),
        "",
        "What to run next:",
        *next_commands(args, runs),
    ]
    write_lines(args.run / "summary.txt", text)


if __name__ == "__main__":
    run(main)
