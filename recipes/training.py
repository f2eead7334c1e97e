"""The steps of a recipe that trains one model: text (which runs share), training, average, model, score and report.

translation.py and language_model.py add the model's options and its score. A finished training is never repeated.
"""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from recipes import machines
from recipes.chain import Chain, Step
from recipes.processes import Failed, Job, in_cluster_job, plugin, stream
from recipes.recipe import Recipe
from recipes.settings import Multi30k
from recipes.steps import checkpoints, records, results, summary
from recipes.steps.common import replacing, write_lines
from recipes.steps.guard import await_files, exclusive_folder, holder
from recipes.steps.table import digest

log = logging.getLogger(__name__)


class Pipeline:
    """A recipe's steps. Subclasses set the attributes from `arch` to `test`."""

    arch: str
    text_type: Callable[[Recipe], Any]
    """makes the text of a recipe: a `text.Text`, or an object with the same attributes"""
    task: list[str]
    batch: list[str]
    """fairseq's options for batches"""
    validated: list[str] = []
    """fairseq's options for batches of validation"""
    final: Path
    """the model"""
    generated: Path
    """the output to score"""
    test: tuple[Any, ...] = ()
    """for a translation: prefix of the raw test set, its pair of languages, and the rules of its tokens"""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.settings, self.folder = recipe, recipe.settings, recipe.run
        self.text = self.text_type(recipe)
        self.machine = machines.plan(recipe.settings)
        self.on_cpu, self.folded = self.machine.cpu, SCHEMES[self.settings.METHOD].folds
        self.unit = "epochs" if self.settings.EPOCHS else "updates"
        self.length = self.settings.EPOCHS or self.settings.UPDATES
        self.average, self.score = self.folder / "average.pt", self.folder / "score.json"

    def model_options(self) -> list[str]:
        """fairseq's options for the sizes of the model."""
        return []

    def score_steps(self) -> Iterable[Step]:
        return ()

    @property
    def trained(self) -> Path:
        """The mark of the training's end."""
        return self.folder / f"trained-{self.length}{'-epochs' if self.settings.EPOCHS else ''}"

    # -- the whole recipe --------------------------------------------------------------------------------------------

    @property
    def goals(self) -> dict[str, tuple[Path, ...]]:
        last = self.folder / "report.html"
        return {
            "prepare": self.text.goals, "train": (self.trained,), "average": (self.final,),
            "generate": (self.generated,), "score": (self.score,), "all": (last,),
        }  # fmt: skip

    def is_done(self, goal: str) -> bool:
        return not self.chain().plan(self.goals[goal])

    def plan(self, goal: str) -> list[str]:
        """A line for each step that says whether it would run."""
        return self.chain().table(self.goals[goal])

    def jobs(self, goal: str) -> list[Job]:
        """The cluster jobs that make a goal, in order: text, training, the rest. Each runs a target of the recipe.

        Complete parts have no job. Only the text has workers.
        """
        recipe, machine = self.recipe, self.machine
        gpus, needed_by = 0 if machine.cpu else machine.gpus, {"prepare": recipe.file.needs}
        needs = replace(recipe.file.needs, cpus=self.settings.OMP_NUM_THREADS or 1)
        if goal != "prepare":
            needed_by["train"] = replace(needs, nodes=machine.nodes, gpus=gpus)
        if goal not in needed_by:
            needed_by[goal] = replace(needs, gpus=min(1, gpus))
        chain, jobs = self.chain(), []
        for part in (part for part in needed_by if chain.plan(self.goals[part])):
            target = recipe.target if part == "all" else f"{recipe.target}-{part}"
            folder = recipe.text if part == "prepare" else recipe.run  # runs with the same text share its job
            jobs.append(Job(target, [sys.executable, "-m", "recipes", target, *recipe.words], folder, needed_by[part]))
        return jobs

    def make(self, goal: str) -> None:
        """Make the files of a goal. Refuse to change the text once a model was trained on it.

        Raises:
            ValueError: this machine cannot train the model, or settings of existing files differ.
        """
        chain, recipe = self.chain(), self.recipe
        if goal != "prepare" and chain.plan([self.trained]):
            if self.settings.TOKENS:
                print(f"An update of {self.machine.tokens} tokens: {self.machine} (nodes x devices x batches).")
            if fault := machines.faults(self.machine, self.settings.PRECISION, recipe.file.presets):
                raise ValueError(fault)  # now, not after hours of work on the text
        warnings.simplefilter("ignore")  # fairseq and its libraries warn about each other; users cannot fix that
        if self.machine.node and in_cluster_job():
            await_files(self.goals["prepare"])  # an earlier job made the text
        else:
            if recipe.text.name != "data" and not recipe.text.exists():
                log.info("%s/data is of a version before 0.2.0. It stays; the text is made again in %s.", recipe.base,
                         recipe.text)  # fmt: skip
            with exclusive_folder(recipe.text, wait=True):
                chain.make(self.goals["prepare"], recipe.base)
        if goal != "prepare":
            with exclusive_folder(self.folder, self.machine.node):
                self.check_resume(self.text_settings())
                chain.make(self.goals[goal])

    def chain(self) -> Chain:
        """The steps. If a model was trained on the text, the text is kept even if the programs that made it changed."""
        chain = Chain(self.steps())
        run = records.trained_run(self.recipe.base)
        if run and (earlier := chain.keep_versions()):
            log.info(
                "%s: kept as an earlier version made it (%s), since %s was trained on it. Give RUNS= for a new text.",
                self.recipe.text, ", ".join(earlier), run,
            )  # fmt: skip
        return chain

    def text_settings(self) -> records.Settings:
        """The settings and source files of the text. Multi30k's published checksums stand for its files."""
        files = {} if isinstance(self.settings, Multi30k) else Chain(self.text.steps()).files()
        return {**self.text.record(), **files}

    def check_resume(self, text: records.Settings) -> None:
        """Refuse to continue the folder's training with other settings, another text or a shorter length."""
        records.check_unchanged(self.folder / "settings.json", {**self.resume_settings(), **text})
        reached, unit = checkpoints.furthest(self.folder, self.unit), self.unit.upper()
        if reached > self.length:
            raise ValueError(
                f"{unit}={self.length} is less than {self.folder} was trained for, {reached}. Give {unit}={reached} or "
                "more, remove that folder to begin again, or write elsewhere with RUNS=."
            )

    def steps(self) -> Iterator[Step]:
        """Summary and report compare the run with existing results of other methods."""
        s, folder = self.settings, self.folder
        yield from self.text.steps()
        yield Step(
            "train", folder, (self.trained,), self.train, (self.text.binarised,),
            {"length": {self.unit: self.length}, "held": self.resume_settings()}, trains=True,
            title=f"train: {self.length} {self.unit}, each of {self.machine}",
        )  # fmt: skip
        words = (folder / "checkpoints", "--by", self.unit, "--last", s.AVERAGE, "-o", self.average)
        average = partial(self._average, *words, "--data", self.text.binary)
        averaging = {"average": str(s.AVERAGE), "of": self.unit}
        yield Step("average", folder, (self.average,), average, (self.trained,), averaging)
        yield Step("model", folder, (self.final,), self._finish, (self.average,))
        yield from self.score_steps()
        others = sorted({path.parent for path in folder.parent.glob(f"*-{s.PRESET}-s{s.SEED}/score.json")} - {folder})
        text, page, command = folder / "summary.txt", folder / "report.html", self.recipe.command
        write = partial(summary.write, folder, others, command, *self.test)
        scores = {other.name: digest(other / "score.json", "sha256")[:12] for other in others}
        yield Step("summary", folder, (text,), write, (self.score,), {"command": command, **scores})
        analysed = [folder / "analysis" / f"{name}.json" for name in s.ANALYSES]
        for path in analysed:
            analyse = partial(self._analyse, path)
            yield Step(f"analyse {path.stem}", folder, (path,), analyse, (self.average,), optional=True)
        report = partial(plugin, "report", folder, *others, "-o", page)
        yield Step("report", folder, (page,), report, (text, *analysed))

    # -- training ----------------------------------------------------------------------------------------------------

    @property
    def user_dir(self) -> list[str]:
        """fairseq's option that loads the plugin. A folded model needs no plugin."""
        return [] if self.folded else ["--user-dir", "fairseq_admin"]

    def optimisation(self) -> list[str]:
        """fairseq's options for the optimizer, the schedule and the loss.

        Every epoch draws new batches (--update-epoch-batch-itr). By default, fairseq repeats the batches of the epoch
        in which the process began, so a resumed run would see other batches than an uninterrupted run.
        """
        s = self.settings
        options: dict[str, Any] = {
            "--optimizer": "radam", "--adam-betas": "(0.9, 0.98)", "--weight-decay": 0.0, "--clip-norm": 1.0,
            "--lr": s.LR, "--lr-scheduler": "inverse_sqrt", "--warmup-updates": s.WARMUP, "--warmup-init-lr": "1e-7",
            "--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": 0.1, "--seed": s.SEED,
            "--update-epoch-batch-itr": "True", "--admin-ffn-init": s.FFN_INIT,
            **self.recipe.file.options,
        }  # fmt: skip
        options |= {"--admin-init": s.rule} if s.rule not in ("", "reference") else {}
        return [str(word) for item in options.items() if item[1] is not None for word in item]

    def _batches(self) -> list[str]:
        return [*self.batch, "--update-freq", str(self.machine.update_freq)]

    def resume_settings(self) -> dict[str, Any]:
        """The settings that a run's checkpoints depend on. The length of the training is not one of them.

        Batches and machines are not among them either if TOKENS fixes the tokens of an update.
        """
        s = self.settings
        batches = self._batches() if s.TOKENS is None else ["--tokens-per-update", str(s.TOKENS)]
        words = [*self.model_options(), *self.optimisation(), *batches, *machines.device(s), *s.TRAIN_ARGS]
        return {"save_every": str(s.SAVE_EVERY), **records.options(words)}

    def command_options(self) -> list[str]:
        """The options of fairseq-train, without the data and the length of the training."""
        s = self.settings
        return [
            *("--user-dir", "fairseq_admin", *self.task, "--arch", self.arch),
            *("--admin-scheme", s.METHOD, *self.model_options(), *self.optimisation()),
            *(*self._batches(), *machines.device(s), *self.machine.rendezvous_options(s.MASTER)),
        ]

    def command(self) -> list[str]:
        """The whole command.

        Without EPOCHS, only checkpoints of updates are validated: huge intervals switch off the ends of epochs.
        """
        s, every = self.settings, str(self.settings.SAVE_EVERY)
        if s.EPOCHS:
            length = f"--max-epoch {self.length} --save-interval-updates {every} --keep-interval-updates 1"
            length += f" --keep-last-epochs {s.AVERAGE}"
        else:
            length = f"--max-update {self.length} --save-interval-updates {every} --keep-interval-updates {s.AVERAGE}"
            length += f" --validate-interval-updates {every} --save-interval 1000000 --validate-interval 1000000"
        command = [sys.executable, "-m", "recipes.steps.train", str(self.text.binary), *self.command_options()]
        command += [*length.split(), *self.validated, "--save-dir", str(self.folder / "checkpoints")]
        command += ["--no-last-checkpoints", "--tensorboard-logdir", str(self.folder / "tensorboard")]
        return [*command, "--log-format", "json", "--log-interval", str(s.LOG_EVERY), *s.TRAIN_ARGS]

    def train(self) -> None:
        """Train, from the newest checkpoint if there is one. `check_resume` has compared the settings before."""
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        node = f"-node{self.machine.node}" if self.machine.node else ""
        shown = {self.unit: self.length, "smaller_batch": self.machine.smaller_batch, "every": self.settings.LOG_EVERY}
        missing = self.missing if self.machine.nodes > 1 else None
        stream(self.command(), self.folder / f"train{node}.log", missing=missing, **shown)
        if not self.machine.node:
            self.trained.touch()

    def missing(self) -> str:
        """A line for a machine that waits for the others: those that have not begun."""
        guards = {node: self.folder / f".guard{node or ''}" for node in range(self.machine.nodes)}
        nodes = [str(node) for node, guard in guards.items() if node != self.machine.node and not holder(guard)]
        whom = f"NODE_RANK={' '.join(nodes)}, which has not begun" if nodes else "the others, which have begun"
        return f"Waiting for {whom}. Every machine runs this command, and must reach {self.settings.MASTER}."

    # -- average, model, scores ----------------------------------------------------------------------------------------

    def _average(self, *words: object) -> None:
        """Average the last checkpoints. If one is damaged, the next start trains it again."""
        try:
            plugin("average", *words)
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
            output = plugin("fold", self.average, "-o", self.final, "--data", self.text.binary)
            write_lines(self.folder / "fold.txt", [output.rstrip("\n")])
        else:
            with replacing(self.final) as part:
                shutil.copy(self.average, part)

    def keep_scores(self, scores: dict[str, str], **settings: object) -> None:
        """Write the run's row of results.csv, with the settings of averaging and translating."""
        s = self.settings
        key = {"recipe": self.recipe.row, "method": s.METHOD, "preset": s.PRESET, "seed": str(s.SEED), "rule": s.rule}
        words = {name: str(value) for name, value in {"average": s.AVERAGE, **settings}.items()}
        measured = {"tokens": s.TOKENS or self.machine.tokens, **scores, **words}
        results.record(self.folder, Path(s.RUNS, "results.csv"), key, measured)

    def _analyse(self, path: Path) -> None:
        """Analyse the model on a few tokens. If the analysis fails, a line says so, here and in the report."""
        path.parent.mkdir(exist_ok=True)
        out, sizes = path.with_suffix(""), ("--tokens", 256, "--json")
        try:
            plugin("analyze", path.stem, self.average, "--data", self.text.binary, *sizes, "-o", out)
        except Failed:
            log.info("analyse %s: left out of the report", path.stem)
