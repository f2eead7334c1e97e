"""`make gpu-trial`: everything that only a GPU can show, step by step, into one report.

    python -m recipes.gpu_trial.run runs/gpu-trial --device cuda --data TEXT --pair de-en --minutes 60

A step takes eight minutes at most and leaves OUT/steps/NAME.json; killed anywhere and started again, the trial does
those that have none, that failed, or that go on from a step done since. OUT/report.md, for people, and report.json are
written again after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

from recipes.gpu_trial.comparison import corpus_steps
from recipes.gpu_trial.steps import ON_CPU, ON_GPU, Step, all_steps
from recipes.steps import batch, gpus
from recipes.steps.common import run, write_lines
from recipes.steps.results import commit, hardware

log = logging.getLogger(__name__)


def machine() -> dict[str, str]:
    """What a report is of."""
    import torch

    there = gpus.visible()
    return {
        "hardware": hardware(),
        "driver": there[0].driver if there else "none",
        "memory GB": ", ".join(f"{gpu.memory / 1e9:.1f}" for gpu in there if gpu.memory) or "none",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "fairseq": version("fairseq-fixed"),
        "Python": platform.python_version(),
        "commit": commit(),
    }


def markdown(title: str, rows: list[dict]) -> list[str]:
    """A table of the columns that any row has."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    body = [[str(row.get(name, "")).replace("|", "/").replace("\n", " ") for name in heads] for row in rows]
    lines = [heads, ["---"] * len(heads), *body]
    return ["", f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines)]


def written(folder: Path, steps: list[Step]) -> dict[str, dict]:
    """What is written down of the steps, by name; not of one that goes on from a step done again since."""
    found: dict[str, dict] = {}
    for step in steps:
        path = folder / "steps" / f"{step.name}.json"
        if path.exists():
            said = json.loads(path.read_text(encoding="utf-8"))
            if not step.before or (step.before in found and found[step.before]["ended"] <= said["ended"]):
                found[step.name] = said
    return found


def report(folder: Path, steps: list[Step], about: dict[str, str]) -> None:
    """Write the report of the steps that are done."""
    done = written(folder, steps)
    failed = [{"step": name, "what was said": found["failed"]} for name, found in done.items() if found["failed"]]
    titles = list(dict.fromkeys(step.title for step in steps))
    lines = ["# GPU trial", "", *(f"- {name}: {value}" for name, value in about.items())]
    lines += [f"- steps: {len(done) - len(failed)} of {len(steps)} finished, {len(failed)} failed"]
    for title in titles:
        rows = [row for step in steps if step.title == title and step.name in done for row in done[step.name]["rows"]]
        if rows:
            lines += markdown(title, rows)
    if failed:
        lines += markdown("Steps that failed", failed)
    write_lines(folder / "report.md", lines)
    write_lines(folder / "report.json", [json.dumps({"machine": about, "steps": done}, indent=1)])


def perform(step: Step, folder: Path, earlier: dict[str, dict]) -> None:
    """Do a step and write down how it went. That it failed is written, too, and the trial goes on behind it.

    One that goes on from a failed step has failed.
    """
    began = time.monotonic()
    rows, failed = [], ""
    try:
        if earlier.get(step.before, {}).get("failed"):
            raise ValueError(f"it goes on from {step.before}, which failed")
        rows = step.do(folder)
    except ValueError as error:
        failed = str(error)
    except subprocess.TimeoutExpired as error:
        failed = f"took more than {error.timeout:.0f} s"
    took = round(time.monotonic() - began, 1)
    found = {"rows": rows, "failed": failed, "ended": time.time(), "seconds": took, "commit": commit()}
    write_lines(folder / "steps" / f"{step.name}.json", [json.dumps(found, indent=1)])
    log.info("%s: %s, %.0f s", step.name, failed or "done", took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, to try the trial")
    parser.add_argument("--data", type=Path, help="a folder with train, valid and test in both languages")
    parser.add_argument("--pair", default="de-en")
    parser.add_argument("--minutes", type=float, default=30, help="of training for each of the three methods")
    args = parser.parse_args()
    scale = ON_CPU
    if args.device == "cuda":
        there = gpus.visible()
        batch.check(1, "fp32", there)
        scale = dataclasses.replace(ON_GPU, memory=there[0].memory)
    steps = all_steps(scale)
    if args.data:
        steps += corpus_steps(scale, args.data.resolve(), args.pair, args.minutes)
    else:
        log.info(
            "no DATA= (a folder with train.de, train.en, valid and test alike): nothing is trained on a real corpus"
        )
    (args.folder / "steps").mkdir(parents=True, exist_ok=True)
    about = machine()
    for number, step in enumerate(steps, 1):
        earlier = written(args.folder, steps)
        if step.name in earlier and not earlier[step.name]["failed"]:
            continue
        log.info("%d of %d: %s", number, len(steps), step.name)
        perform(step, args.folder, earlier)
        report(args.folder, steps, about)
    report(args.folder, steps, about)
    log.info("%s", args.folder / "report.md")


if __name__ == "__main__":
    run(main)
