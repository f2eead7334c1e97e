"""The steps of a recipe that trains one model, as the commands that -n prints: text, training, average, model, score.

A step is done if its output is there. Outputs appear whole, by rename. A folder stores the options that made it
(recipe.json); if the recipe itself has changed under it, the difference is said and nothing is done.

    RUNS/iwslt14/text-1a2b3c4d/     the text, by its sources and options
    RUNS/iwslt14/admin-s1/          the training: checkpoints, train.log
    RUNS/iwslt14/admin-s1/at-90-epochs/   the average, the model, translations, scores and report at that length
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from fairseq_admin.outputs import replacing, sync
from recipes import machines
from recipes import options as opts
from recipes import text as texts
from recipes.options import Options
from recipes.processes import Failed, Job, in_cluster_job, plugin, produce, stream
from recipes.recipe import EVERY, LENGTH, NEUTRAL, OURS, Recipe
from recipes.settings import ENVIRONMENT
from recipes.steps import checkpoints, results, summary
from recipes.steps.common import read_lines, write_lines
from recipes.steps.guard import await_files, exclusive_folder, holder
from recipes.steps.streaming import cores
from recipes.text import Step

log = logging.getLogger(__name__)
RECORD = "recipe.json"
MADE = re.compile(r"\.pt$|/generate\.txt$|/result\.csv$")
"""Names of files that only a training, a search or a grid's run leaves."""
WIDTH = 100
"""Columns after which a printed command is broken."""
ANALYSES = ("dependency", "output-change")
"""Parts of the papers' analysis in the report."""


def python() -> str:
    """This Python, as it is called from here."""
    inside = os.path.relpath(sys.executable)
    return sys.executable if inside.startswith("..") else inside


def shell(module: str, *words: object) -> str:
    """A command as lines of a shell, each of them broken before an option."""
    lines = [shlex.join([python(), "-m", module])]
    for word in map(shlex.quote, map(str, words)):
        if word.startswith("--") and len(lines[-1]) > WIDTH:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def as_words(values: dict[str, str]) -> list[str]:
    """Settings as words of a command line."""
    return [f"{name}={value}" for name, value in values.items()]


def check_unchanged(folder: Path, options: Options) -> None:
    """Store the options that make a folder. If a model was made there, they must be the stored ones.

    Raises:
        ValueError: they differ; or the folder is of version 0.3.0 or earlier.
    """
    path, made = folder / RECORD, any(map(MADE.search, map(str, folder.rglob("*"))))
    try:
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else options
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}). Remove it if nothing has changed since.") from None
    changed = opts.differences(before, options)
    if (folder / "settings.json").exists():
        changed.append("made by version 0.3.0 or earlier")
    if made and changed:
        raise ValueError(
            f"{folder} was made by another recipe ({'; '.join(changed)}). Go on with the recipe that made it, remove "
            "the folder to begin again, or write elsewhere with RUNS=."
        )
    if changed or not path.exists():
        write_lines(path, [json.dumps(options, indent=1)])


def binarise(folder: Path, *words: object) -> None:
    """Write a folder of fairseq's binary data, completely or not at all.

    Raises:
        Failed: fairseq-preprocess failed. Its output is in preprocess.log next to the folder.
    """
    part = folder.with_name(f"{folder.name}.part")
    for old in (folder, part):
        shutil.rmtree(old, ignore_errors=True)
    command = [sys.executable, "-m", "fairseq_cli.preprocess", *map(str, words), "--destdir", str(part)]
    stream(command, folder.with_name("preprocess.log"), "wb")
    sync(part)
    part.rename(folder)


class Run:
    """A recipe's run, and its text."""

    def __init__(self, recipe: Recipe, text: Any = None) -> None:
        self.recipe, self.settings, self.folder = recipe, recipe.settings, recipe.run
        self.translates = recipe.file.kind == "translation"
        self.text: Any = text or (texts.Translation if self.translates else texts.Documentation)(recipe)
        self.machine = machines.plan(recipe.options["train"], recipe.tokens, recipe.gpus, recipe.settings)
        self.on_cpu, self.folded = self.machine.cpu, SCHEMES[recipe.method].folds
        self.length, self.unit = recipe.length, "epochs" if recipe.by_epochs else "updates"
        self.trained = recipe.at / "train.log"
        """The log up to the end of the training, which marks the end."""
        self.average, self.final = recipe.model / "average.pt", recipe.model / "model/model.pt"
        self.generated = recipe.result / ("generate.txt" if self.translates else "eval.txt")
        self.score = recipe.result / "score.json"

    # -- commands ----------------------------------------------------------------------------------------------------

    @property
    def languages(self) -> list[str]:
        return ["--source-lang", self.text.source, "--target-lang", self.text.target] if self.translates else []

    def preprocess_words(self) -> list[str]:
        options = opts.merge({"--workers": str(cores())}, self.recipe.options["preprocess"])
        prefixes = [
            word for split in texts.SPLITS for word in (f"--{split}pref", str(self.text.folder / "bpe" / split))
        ]
        return [*self.languages, *opts.words(options), *prefixes]

    def train_words(self) -> list[str]:
        batch = {"--max-tokens": str(self.machine.max_tokens), "--update-freq": str(self.machine.update_freq)}
        options = opts.words(opts.merge(self.recipe.options["train"], batch))
        folders = ["--save-dir", self.folder / "checkpoints", "--tensorboard-logdir", self.folder / "tensorboard"]
        meeting = self.machine.rendezvous_options(self.settings.MASTER)
        return [str(self.text.binary), *self.languages, *options, *meeting, *map(str, folders)]

    def average_words(self) -> list[object]:
        files = ["-o", self.average, "--data", self.text.binary]
        return [self.folder / "checkpoints", "--by", self.unit, *opts.words(self.recipe.options["average"]), *files]

    def fold_words(self) -> list[object]:
        return [self.average, "-o", self.final, "--data", self.text.binary]

    def generate_words(self) -> list[str]:
        plugin = [] if self.folded else ["--user-dir", "fairseq_admin"]  # a folded model needs no plugin
        options = [*opts.words(self.recipe.options["generate"]), "--gen-subset", "test"]
        return [str(self.text.binary), *self.languages, *plugin, "--path", str(self.final), *options]

    @property
    def generator(self) -> str:
        return "fairseq_cli.generate" if self.translates else "fairseq_cli.eval_lm"

    def again(self, goal: str = "") -> str:
        """The command of this recipe for a goal."""
        return shell("recipes", f"{self.recipe.target}{goal and f'-{goal}'}", *as_words(self.recipe.values))

    def text_command(self) -> str:
        """The command of the text, with all its options."""
        values = {name: value for name, value in self.recipe.values.items() if name in ("DATA", "PAIR", "RUNS")}
        values["PREPARE_ARGS"] = " ".join(opts.words(self.recipe.options["prepare"]))
        return shell("recipes", f"{self.recipe.target}-text", *as_words(values))

    # -- steps -------------------------------------------------------------------------------------------------------

    def text_steps(self) -> list[Step]:
        binary, words = self.text.binary, self.preprocess_words()
        preprocess = shell("fairseq_cli.preprocess", *words, "--destdir", f"{binary}.part")
        rename = shlex.join(["mv", f"{binary}.part", str(binary)])
        return [
            Step("text", self.text.files("bpe", "test"), self.text.make, [self.text_command()]),
            Step("preprocess", [self.text.binarised], self._preprocess, [f"{preprocess} && {rename}"]),
        ]

    def run_steps(self) -> list[Step]:
        """The steps after the text. Summary and report compare the run with other methods, whose scores they read."""
        recipe, result, model = self.recipe, self.recipe.result, self.recipe.model
        others = self.other_methods()
        scores = (self.score, *(other / "score.json" for other in others))
        train_log = self.folder / "train.log"
        train = f"{shell('recipes.steps.train', *self.train_words())} >> {shlex.quote(str(train_log))} 2>&1"
        folders = shlex.join(["mkdir", "-p", str(self.final.parent), str(self.trained.parent)])
        mark = f"{folders} && {shlex.join(['cp', str(train_log), str(self.trained)])}"
        fold = f"{shell('fairseq_admin.cli', 'fold', *self.fold_words())} | tee {shlex.quote(str(model / 'fold.txt'))}"
        copy = shlex.join(["cp", str(self.average), str(self.final)])
        assets = [shlex.join(["cp", *map(str, self.text.assets), str(self.final.parent)])] if self.text.assets else []
        average = shell("fairseq_admin.cli", "average", *self.average_words())
        generate = f"{shell(self.generator, *self.generate_words())} > {shlex.quote(str(self.generated))}"
        write = partial(summary.write, result, others, recipe.command, *self.test)
        return [
            Step("train", [self.trained], self.train, [shlex.join(["mkdir", "-p", str(self.folder)]), train, mark]),
            Step("average", [self.average], self._average, [average]),
            Step("model", [self.final], self._finish, [*assets, fold if self.folded else copy]),
            Step("generate", [self.generated], self._generate, [shlex.join(["mkdir", "-p", str(result)]), generate]),
            Step("score", [self.score], self._score, [self.again("score")]),
            Step("summary", [result / "summary.txt"], write, [self.again()], scores),
            Step("report", [result / "report.html"], partial(self._report, others), [], scores),
        ]

    @property
    def test(self) -> tuple[Any, ...]:
        """For a translation: prefix of the raw test set, its pair of languages, text.json, and the model."""
        test = self.text.folder / "raw/test"
        return (test, self.recipe.pair, self.text.json, self.final) if self.translates else ()

    def other_methods(self) -> list[Path]:
        """Folders of the scored runs that differ from this one only in method or rule."""
        names = ("preset", "options", "seed")
        ours = self.key()
        scores = [path for path in self.folder.parent.glob("*/*/score.json") if path != self.score]
        rows = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in sorted(scores)}
        return [path for path, row in rows.items() if all(row.get(name) == ours[name] for name in names)]

    GOALS = {"text": "text", "prepare": "preprocess", "average": "model", "generate": "generate", "score": "score"}
    """The last step of a goal that is not named like it; that of `all` is the report."""

    def plan(self, goal: str) -> list[Step]:
        """The steps that would run to reach a goal: the last ones that are not done. What they need is made first."""
        steps = [*self.text_steps(), *self.run_steps()]
        last = {**self.GOALS, "train": "train", "all": "report"}[goal]
        names = [step.name for step in steps]
        planned: list[Step] = []
        for step in reversed(steps[: names.index(last) + 1]):
            if step.is_done:
                break
            planned.insert(0, step)
        return planned

    def is_done(self, goal: str) -> bool:
        return not self.plan(goal)

    def lines(self, goal: str) -> list[str]:
        """The commands that are left to reach a goal, ready for a shell."""
        planned = {step.name for step in self.plan(goal)}
        shown = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        lines = [f"export {shlex.join(as_words(shown))}"]
        if self.text.folder.name == texts.UNKNOWN:
            lines.append("# The text has a name once its archive is here. Run the first command, then -n again.")
        for step in [*self.text_steps(), *self.run_steps()]:
            if step.name in planned and step.shell:
                lines += [f"# {step.name}", *step.shell]
            elif step.is_done:
                lines.append(f"# {step.name}: done, {step.outputs[-1]}")
        return lines

    def jobs(self, goal: str) -> list[Job]:
        """The cluster jobs that reach a goal, in order: text, training, the rest. Each runs a target of the recipe.

        Complete parts have no job. Only the text has workers.
        """
        recipe, machine = self.recipe, self.machine
        gpus, needed_by = 0 if machine.cpu else machine.gpus, {"prepare": recipe.file.needs}
        needs = replace(recipe.file.needs, cpus=recipe.file.threads or 1)
        if goal != "prepare":
            needed_by["train"] = replace(needs, nodes=machine.nodes, gpus=gpus)
        if goal not in needed_by:
            needed_by[goal] = replace(needs, gpus=min(1, gpus))
        preset = {"PRESET": recipe.preset} if len(recipe.file.presets) > 1 else {}  # that of the machine that submits
        jobs = []
        for part in (part for part in needed_by if self.plan(part)):
            target = recipe.target if part == "all" else f"{recipe.target}-{part}"
            folder = recipe.base if part == "prepare" else recipe.run  # runs with the same text share its job
            command = [sys.executable, "-m", "recipes", target, *as_words(preset | recipe.values)]
            jobs.append(Job(target, command, folder, needed_by[part]))
        return jobs

    def device_fault(self) -> str:
        """The reason why this machine cannot train the model; empty if it can."""
        file, precision = self.recipe.file, "bf16" if "--bf16" in self.recipe.options["train"] else ""
        presets = [name for name in file.presets if "--cpu" in file.options("train", self.recipe.size, name)]
        return machines.faults(self.machine, precision, presets)

    def make(self, goal: str) -> None:
        """Run the steps of a goal that are not done.

        Raises:
            ValueError: this machine cannot train the model, or the recipe of existing files was another one.
        """
        recipe, machine = self.recipe, self.machine
        prepares = goal in ("text", "prepare")
        if not prepares and not self.is_done("train"):
            print(f"An update of {recipe.tokens} tokens: {machine} (nodes x devices x batches).")
            if fault := self.device_fault():
                raise ValueError(fault)  # now, not after hours of work on the text
        warnings.simplefilter("ignore")  # fairseq and its libraries warn about each other; users cannot fix that
        if machine.node and in_cluster_job():
            await_files([self.text.binarised])  # an earlier job made the text
        elif not self.is_done("prepare"):
            self.text.fetch()
            with exclusive_folder(self.text.folder, wait=True):
                self._work(self.text_steps(), goal if prepares else "prepare")
        if not prepares:
            with exclusive_folder(self.folder, machine.node):
                self.check()
                self._work(self.run_steps(), goal)

    def _work(self, steps: list[Step], goal: str) -> None:
        """Run those of the steps that are planned for a goal."""
        planned = {step.name for step in self.plan(goal)}
        for step in steps:
            if step.name in planned:
                if step.name != "text":
                    title = f"train: {self.length} {self.unit}, each of {self.machine}"
                    print(f"# {title if step.name == 'train' else step.name}", flush=True)
                step.program()

    # -- what made a folder ------------------------------------------------------------------------------------------

    def records(self) -> dict[Path, Options]:
        """The options that decide the content of each of the run's folders."""
        recipe, text = self.recipe, {"text": self.text.folder.name}
        prepare, generate = (opts.without(recipe.options[name], NEUTRAL[name]) for name in ("prepare", "generate"))
        train = opts.without(recipe.options["train"], NEUTRAL["train"] | LENGTH | OURS)
        every = {} if recipe.by_epochs else {"--save-interval-updates": recipe.options["train"][min(EVERY)]}
        averaged = text | {"pair": recipe.pair} | {name[2:]: value for name, value in prepare.items()} | every
        merged: dict[Path, Options] = {self.folder: text | {"tokens of an update": str(recipe.tokens)} | train}
        for folder, options in ((recipe.model, averaged | recipe.options["average"]), (recipe.result, generate)):
            merged[folder] = merged.get(folder, {}) | options
        return merged

    def check(self) -> None:
        """Refuse to go on with another recipe, another text, or a length that was exceeded.

        Raises:
            ValueError: one of them.
        """
        for folder, options in self.records().items():
            check_unchanged(folder, options)
        reached = checkpoints.furthest(self.folder, self.unit)
        if reached > self.length and not self.average.exists():
            how = f"ARGS='--max-epoch {reached}'" if self.recipe.by_epochs else f"UPDATES={reached}"
            raise ValueError(
                f"{self.length} {self.unit} are less than {self.folder} was trained for, {reached}. Give {how} or "
                "more, remove that folder to begin again, or write elsewhere with RUNS=."
            )

    # -- programs ----------------------------------------------------------------------------------------------------

    def _preprocess(self) -> None:
        self.text.check()
        binarise(self.text.binary, *self.preprocess_words())

    def train(self) -> None:
        """Train, from the newest checkpoint if there is one."""
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        node = f"-node{self.machine.node}" if self.machine.node else ""
        every = int(self.recipe.options["train"].get("--log-interval", 100))
        shown: Any = {self.unit: self.length, "smaller_batch": self.machine.smaller_batch, "every": every}
        command = [sys.executable, "-m", "recipes.steps.train", *self.train_words()]
        missing = self.missing if self.machine.nodes > 1 else None
        stream(command, self.folder / f"train{node}.log", missing=missing, **shown)
        if not self.machine.node:
            self._copy(self.folder / "train.log", self.trained)

    def missing(self) -> str:
        """A line for a machine that waits for the others: those that have not begun."""
        count = self.machine.nodes
        guards = {node: self.folder / f".guard{node or ''}" for node in range(count)}
        nodes = [f"{node}/{count}" for node, guard in guards.items() if node != self.machine.node and not holder(guard)]
        whom = f"NODES={' '.join(nodes)}, which has not begun" if nodes else "the others, which have begun"
        return f"Waiting for {whom}. Every machine runs this command, and must reach {self.settings.MASTER}."

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as part:
            shutil.copy(source, part)

    def _average(self) -> None:
        """Average the last checkpoints. If one is damaged, the next start trains it again."""
        try:
            plugin("average", *self.average_words())
        except Failed as error:
            if any(map(checkpoints.damage, checkpoints.numbered(self.folder / "checkpoints"))):
                self.trained.unlink()
                raise Failed(f"{error} The same command trains the damaged checkpoint again.") from None
            raise

    def _finish(self) -> None:
        """Write the final model: folded, or a copy of the average. Folding compares both on the validation set."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for path in self.text.assets:
            shutil.copy(path, self.final.parent)
        if self.folded:
            output = plugin("fold", *self.fold_words())
            write_lines(self.recipe.model / "fold.txt", [output.rstrip("\n")])
        else:
            self._copy(self.average, self.final)

    def _generate(self) -> None:
        count = len(read_lines(self.text.files("raw", "test")[0])) if self.translates else 0
        produce([sys.executable, "-m", self.generator, *self.generate_words()], self.generated, sentences=count)

    def scores(self) -> dict[str, str]:
        """The columns of results.csv that come from the test set."""
        from recipes.steps import score  # imports sacreBLEU

        if not self.translates:
            return {"perplexity": score.perplexity(read_lines(self.generated)), "signature": score.PERPLEXITY}
        raw, words, units = (self.text.folder / f"{name}/test" for name in ("raw", self.text.words, "bpe"))
        rules = texts.Tokens.read(self.text.json)
        return score.translations(self.recipe.result, rules, raw, words, units, self.recipe.file.compounds)

    def key(self) -> dict[str, str]:
        """The columns that identify the run in results.csv."""
        recipe = self.recipe
        row = recipe.target if recipe.size else str(recipe.base.relative_to(self.settings.RUNS))
        rule = {"rule": recipe.rule, "preset": recipe.preset, "options": recipe.difference, "seed": recipe.seed}
        return {"recipe": row, "method": recipe.method, **rule}

    def _score(self) -> None:
        measured = {"tokens": self.recipe.tokens, **self.scores()}
        for command in ("average", "generate"):
            measured[command] = shlex.join(opts.words(self.recipe.options[command]))
        if self.recipe.result != self.recipe.at:
            self._copy(self.trained, self.recipe.result / "train.log")
        results.record(self.recipe.result, Path(self.settings.RUNS, "results.csv"), self.key(), measured)

    def _report(self, others: Iterable[Path]) -> None:
        """Write the report, with an analysis of the model on a few tokens. If that fails, a line says so."""
        for name in ANALYSES:
            out = self.recipe.model / "analysis" / name
            if not out.with_suffix(".json").exists():
                out.parent.mkdir(exist_ok=True)
                sizes = ("--tokens", 256, "--json")
                try:
                    plugin("analyze", name, self.average, "--data", self.text.binary, *sizes, "-o", out)
                except Failed:
                    log.info("analyse %s: left out of the report", name)
        plugin("report", self.recipe.result, *others, "-o", self.recipe.result / "report.html")
