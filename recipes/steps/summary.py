"""The summary of a run: RUN/summary.txt has results, files and the commands to run next; the report reads RUN/run.json.

The summary compares the run with runs of other methods that have the same preset and seed and a score.json.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fairseq_admin.method.schemes import SCHEMES
from fairseq_admin.report import tables
from fairseq_admin.report.run import Run
from fairseq_admin.text.tokens import Text
from recipes.steps.common import read_lines, write_lines
from recipes.steps.results import checked_log, is_attempt, papers

BASELINES = ("admin", "post-ln", "pre-ln")
PACKAGES = ("fairseq-admin", "fairseq", "fairseq-fixed", "torch", "sacrebleu")
SAMPLES = 5


def read_score(folder: Path) -> dict[str, str]:
    return json.loads((folder / "score.json").read_text(encoding="utf-8"))


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs, in the order of the table of schemes."""
    scores = {folder: read_score(folder) for folder in sorted(folders)}
    return [
        Run(folder, rule_title(scheme.title, score["rule"]), checked_log(folder / "train.log"), score=score)
        for method, scheme in SCHEMES.items()
        for folder, score in scores.items()
        if score["method"] == method
    ]


def rule_title(title: str, rule: str) -> str:
    """A scheme's title, with the rule of omega unless that is the paper's rule."""
    return title if rule in ("", "reference") else f"{title}, {rule}"


def samples(raw: Path, pair: str, folders: list[Path]) -> list[list[str]]:
    """A few sentences from the whole test set: source, the translation of each run, reference."""
    source, target = (Path(f"{raw}.{language}") for language in pair.split("-"))
    texts = [read_lines(path) for path in (source, *(folder / "translations.txt" for folder in folders), target)]
    count = min(SAMPLES, len(texts[-1]))
    return [[text[place * len(texts[-1]) // count] for text in texts] for place in range(count)]


def about(run: Path, command: str, sentences: list[list[str]]) -> dict[str, Any]:
    """Facts about a run for the report that no other file of the run has."""
    score = read_score(run)
    packages = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    numbers = {(row["recipe"], row["method"]): row for row in papers() if is_attempt(score)}
    paper = numbers.get((score["recipe"], score["method"]))
    return {
        "command": f"{command} METHOD={score['method']} SEED={score['seed']}",
        "versions": {"Python": platform.python_version()} | {it: packages[it] for it in PACKAGES if it in packages},
        "paper": {name: paper[name] for name in ("bleu", "source")} if paper else None,
        "samples": [dict(zip(("source", "hypothesis", "reference"), lines)) for lines in sentences],
    }


def table(rows: list[list[str]]) -> list[str]:
    """The rows as aligned text, the first row as header; the first column is left-aligned, the others right-aligned."""
    sides = ("left", *("right",) * (len(rows[0]) - 1))
    return tabulate(rows, "firstrow", tablefmt="plain", colalign=sides, disable_numparse=True).splitlines()


def fitted(text: str, columns: int) -> str:
    """A summary for a terminal: lines of sentences are cut at its width; signatures, files and commands are not."""
    sentences, mark, rest = text.partition("\nIn ")
    lines = [
        line if len(line) <= columns or line.startswith("signature:") else f"{line[: columns - 3]}..."
        for line in sentences.splitlines()
    ]
    return "\n".join(lines) + mark + rest


def paired(runs: list[Run], reference: str, rules: Path) -> tuple[list[list[str]], str]:
    """Rows of the scores' 95 % intervals and of p against the first run, by sacreBLEU's paired bootstrap; and a note.

    Args:
        reference: the file of the reference, as it was published.
        rules: text.json, which has the target language.
    """
    from recipes.steps import score  # imports sacreBLEU

    systems = {it.name: read_lines(it.folder / "translations.txt") for it in runs}
    results, count = score.paired(Text.read(rules), systems, read_lines(reference))
    rows = []
    for name, cells in results.items():
        rows.append([f"{name}, 95 %", *(f"{cell.mean:.2f} ± {cell.ci:.2f}" for cell in cells)])
        rows.append([f"{name}, p", "-", *(f"{cell.p_value:.3f}" for cell in cells[1:])])
    return rows, f"p: paired bootstrap against {runs[0].name}, {count} resamples of the test set, one seed"


def write(
    run: Path, others: list[Path], command: str, raw: Path | None = None, pair: str = "", rules: Path | None = None,
    model: Path | None = None,
) -> None:  # fmt: skip
    """Write RUN/run.json and RUN/summary.txt.

    Args:
        others: folders of the scored runs that differ from this run only in method or rule.
        command: the command that made the run.
        raw: of a translation: prefix of the raw test set, RAW.de and RAW.en.
        pair: of a translation: source and target language, as in de-en.
        rules: of a translation: text.json. With it, the scores of several runs are compared.
        model: of a translation: the model.
    """
    sentences = samples(raw, pair, [run]) if raw else []
    write_lines(run / "run.json", [json.dumps(about(run, command, sentences), indent=2, ensure_ascii=False)])

    runs = read_runs([run, *others])
    names = [it.name for it in runs]
    missing = [method for method in BASELINES if method not in [it.score["method"] for it in runs]]
    seed = int(read_score(run)["seed"])
    following = [f"{command} METHOD={method} SEED={seed}" for method in missing] or [f"{command} SEED={seed + 1}"]
    text = [f"{run}: {pair}" if pair else str(run), ""]
    results, note = [[row.title, *row.cells] for row in tables.results(runs)], ""
    if rules and len(runs) > 1:
        rows, note = paired(runs, f"{raw}.{pair.partition('-')[2]}", rules)
        results += rows
    text += [*table([["", *names], *results]), *filter(None, [note])]
    keys = ("signature", "chrf_signature")
    text += [*sorted({f"signature: {it.score[key]}" for it in runs for key in keys if it.score.get(key)}), ""]
    losses = [[row.title, *(cell or "-" for cell in row.cells)] for row in tables.losses(runs)]
    text += [*table([["bits per token, valid", *names], *losses]), ""]
    if raw:
        source = pair.partition("-")[0]
        labels = [source, *names, "reference"]
        indent = max(map(len, labels))
        for lines in samples(raw, pair, [it.folder for it in runs]):
            text += [f"{name:>{indent}}  {line}" for name, line in zip(labels, lines)] + [""]
        example, program = read_lines(f"{raw}.{source}")[0], Path(sys.executable).with_name("fairseq-admin")
        translate = shlex.join([os.path.relpath(program), "translate", str(model)])
        following.append(f"echo {shlex.quote(example)} | {translate}")
    files = ("translations.txt", "model", "model.pt", "average.pt", "checkpoints", "train.log")
    text.append(f"In {run}: {' '.join(name for name in files if (run / name).exists())}")
    text += ["", "What to run next:", *(f"  {line}" for line in following)]
    write_lines(run / "summary.txt", text)
