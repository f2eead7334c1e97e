"""Keep the perplexity that fairseq-eval-lm found, and set the methods' side by side.

    python -m recipes.lm.perplexity score runs/lm-demo/admin-cpu-s1 --results runs/results.csv ...
    python -m recipes.lm.perplexity summary runs/lm-demo/admin-cpu-s1 --command "make lm-demo"

The first reads RUN/eval.txt and RUN/train.log and writes RUN/score.json and a row of results.csv, the second writes
RUN/summary.txt.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from recipes.steps.common import read_lines, run, write_lines
from recipes.steps.logs import read_log
from recipes.steps.results import KEY, keep
from recipes.steps.score import commit, hardware
from recipes.steps.summary import BASELINES, NAMES, finished_runs, losses, table

RESULT = re.compile(r"(?:^|[:| ])Loss \(base 2\): ([0-9.]+), Perplexity: ([0-9.]+|inf)$")
SIGNATURE = "perplexity a word, test set, as fairseq-eval-lm counts words with BPE joined"


def perplexity(lines: list[str]) -> str:
    """What fairseq-eval-lm printed.

    Raises:
        ValueError: it printed none, or more than one.
    """
    found = [match[2] for line in lines if (match := RESULT.search(line))]
    if len(found) != 1:
        raise ValueError(
            f"found {len(found)} perplexities in fairseq-eval-lm's output; expected one. Remove it and evaluate again."
        )
    return found[0]


def score(args: argparse.Namespace) -> None:
    log = read_log(args.run / "train.log")
    row = {name: getattr(args, name) for name in KEY} | {
        "params": log.params,
        "epochs": f"{log.epochs:.2f}",
        "updates": log.updates,
        "tokens": args.tokens,
        "perplexity": perplexity(read_lines(args.run / "eval.txt")),
        "hours": f"{log.hours:.2f}",
        "hardware": hardware(),
        "commit": commit(),
    }
    keep(args.results, row)
    write_lines(args.run / "score.json", [json.dumps(row, indent=2)])


def summary(args: argparse.Namespace) -> None:
    runs = finished_runs(args.run)
    rows = [["", *(run.name for run in runs)]]
    for label, key in (
        ("perplexity", "perplexity"),
        ("parameters", "params"),
        ("updates", "updates"),
        ("hours", "hours"),
    ):
        rows.append([label, *(str(run.score[key]) for run in runs)])
    missing = [method for method in BASELINES if NAMES[method] not in [run.name for run in runs]]
    following = [f"{args.command} METHOD={method}" for method in missing] or [f"{args.command} SEED=2"]
    text = [
        f"{args.run}: {SIGNATURE}",
        "",
        *table(rows),
        "",
        *losses(runs),
        "",
        f"Model: {args.run}/model.pt; log: {args.run}/train.log",
        "What to run next:",
        *(f"  {command}" for command in following),
    ]
    write_lines(args.run / "summary.txt", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command_name", required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("--results", type=Path, required=True, help="the table of results to update")
    scoring.add_argument("--tokens", required=True, help="tokens an update, for the table")
    for name in KEY:
        scoring.add_argument(f"--{name}", required=True, help="for the table")
    scoring.set_defaults(go=score)
    summing = commands.add_parser("summary")
    summing.add_argument("--command", required=True, help="the command that ran the job, to say what to run next")
    summing.set_defaults(go=summary)
    for command in (scoring, summing):
        command.add_argument("run", type=Path, help="the run's folder")
    args = parser.parse_args()
    args.go(args)


if __name__ == "__main__":
    run(main)
