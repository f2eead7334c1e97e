"""The steps from fairseq's binary data to a summary: training, average, model, the report. A run never starts again."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_admin.method.schemes import SCHEMES
from recipes import machines
from recipes.chain import Chain, Step
from recipes.processes import Failed, plugin, stream
from recipes.recipe import Recipe
from recipes.steps import checkpoints, results, settings, summary
from recipes.steps.common import replacing, write_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """What a kind of recipe trains: fairseq's options for it, and the files it reads and makes."""

    binary: Path
    binarised: Path
    task: list[str]
    arch: str
    options: list[str]
    batch: list[str]
    validated: list[str]
    final: Path
    assets: tuple[Path, ...] = ()
    """what it takes to use the model, besides it"""


class Run:
    """The training of a recipe's model, and what is made of it."""

    def __init__(self, recipe: Recipe, model: Model, machine: machines.Machines) -> None:
        self.recipe, self.model, self.machine = recipe, model, machine
        self.settings, self.folder = recipe.settings, recipe.run
        self.folded = SCHEMES[self.settings.METHOD].folds
        self.unit = "epochs" if self.settings.EPOCHS else "updates"
        self.length = self.settings.EPOCHS or self.settings.UPDATES
        marker = f"trained-{self.length}-epochs" if self.settings.EPOCHS else f"trained-{self.length}"
        self.trained = self.folder / marker
        self.average = self.folder / "average.pt"

    @property
    def user_dir(self) -> list[str]:
        """What the model needs of the plugin. A folded one needs none."""
        return [] if self.folded else ["--user-dir", "fairseq_admin"]

    def optimisation(self) -> list[str]:
        """Every epoch has batches of its own: fairseq would keep those of the epoch that a process began with, so a run
        that was resumed would see others than one that was not."""
        s = self.settings
        options = {
            "--optimizer": "radam", "--adam-betas": "(0.9, 0.98)", "--weight-decay": s.WEIGHT_DECAY,
            "--clip-norm": s.CLIP_NORM, "--lr": s.LR, "--lr-scheduler": "inverse_sqrt", "--warmup-updates": s.WARMUP,
            "--warmup-init-lr": "1e-7", "--criterion": "label_smoothed_cross_entropy_fast",
            "--label-smoothing": s.LABEL_SMOOTHING, "--seed": s.SEED, "--update-epoch-batch-itr": "True",
            "--admin-ffn-init": s.FFN_INIT,
        }  # fmt: skip
        return [str(word) for item in options.items() for word in item]

    def held(self) -> dict[str, Any]:
        """What a run's checkpoints depend on. More updates continue it; with the tokens of an update held, a run may go
        on with other batches, on other machines."""
        batches = self._batches()
        if self.settings.TOKENS is not None:
            batches = ["--tokens-per-update", str(self.settings.TOKENS)]
        words = [*self.model.options, *self.optimisation(), *batches, *machines.device(self.settings)]
        held = settings.options([*words, *self.settings.TRAIN_ARGS])
        return {"save_every": str(self.settings.SAVE_EVERY), **held}

    def hold(self, chain: Chain, text: settings.Settings) -> None:
        """Refuse what would not go on with the folder's training as it was begun: other settings, another text, fewer
        updates.

        Args:
            text: what it was made from.

        Raises:
            ValueError: it would not.
        """
        # A text with published checksums is known by them.
        files = {} if hasattr(self.settings, "SUMS") else chain.files()
        settings.hold(self.folder / "settings.json", {**self.held(), **text, **files})
        reached, unit = checkpoints.furthest(self.folder, self.unit), self.unit.upper()
        if reached > self.length:
            raise ValueError(
                f"{unit}={self.length} is less than {self.folder} was trained for, {reached}. Give {unit}={reached} or "
                "more, remove that folder to begin again, or write elsewhere with RUNS=."
            )

    def _batches(self) -> list[str]:
        return [*self.model.batch, "--update-freq", str(self.machine.update_freq)]

    def command_options(self) -> list[str]:
        """fairseq-train's, but for the data and how long it trains."""
        return [
            *("--user-dir", "fairseq_admin", *self.model.task, "--arch", self.model.arch),
            *("--admin-scheme", self.settings.METHOD, *self.model.options, *self.optimisation()),
            *(*self._batches(), *machines.device(self.settings), *self.machine.meeting()),
        ]

    def command(self) -> list[str]:
        """The validation that comes with a checkpoint every so many updates is the only one, hence the endless
        intervals in epochs."""
        s, every = self.settings, str(self.settings.SAVE_EVERY)
        if s.EPOCHS:
            length = ["--max-epoch", str(s.EPOCHS), "--save-interval-updates", every, "--keep-interval-updates", "1"]
            length += ["--keep-last-epochs", str(s.AVERAGE)]
        else:
            length = ["--max-update", str(s.UPDATES), "--save-interval-updates", every, "--keep-interval-updates"]
            length += [str(s.AVERAGE), "--validate-interval-updates", every]
            length += ["--save-interval", "1000000", "--validate-interval", "1000000"]
        return [
            *(sys.executable, "-m", "recipes.steps.train", str(self.model.binary), *self.command_options(), *length),
            *(*self.model.validated, "--save-dir", str(self.folder / "checkpoints"), "--no-last-checkpoints"),
            *("--tensorboard-logdir", str(self.folder / "tensorboard")),
            *(["--wandb-project", s.WANDB] if s.WANDB else []),
            *("--log-format", "json", "--log-interval", str(s.LOG_EVERY), *s.TRAIN_ARGS),
        ]

    def train(self) -> None:
        """Go on from the newest checkpoint. Other settings than those of the folder are refused before."""
        if fault := machines.faults(self.machine, self.settings.PRECISION):
            raise ValueError(fault)
        (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        node = f"-node{self.machine.node}" if self.machine.node else ""
        shown = {self.unit: self.length, "less": self.machine.less or 0}
        stream(self.command(), self.folder / f"train{node}.log", **shown)
        self.trained.touch()

    def steps(self) -> Iterator[Step]:
        """Training, average and model."""
        s, m = self.settings, self.machine
        where = f"{m.nodes} x {m.gpus} x {m.update_freq} batches of up to {m.max_tokens} tokens"
        yield Step(
            "train", self.folder, (self.trained,), self.train, (self.model.binarised,),
            {"length": {self.unit: self.length}, "held": self.held()}, trains=True,
            title=f"train: {self.length} {self.unit}, each of {where}",
        )  # fmt: skip
        words = [str(self.folder / "checkpoints"), "--by", self.unit, "--last", str(s.AVERAGE)]
        words += ["-o", str(self.average), "--data", str(self.model.binary)]
        yield Step(
            "average", self.folder, (self.average,), partial(plugin, "average", *words), (self.trained,),
            {"average": str(s.AVERAGE), "of": self.unit}, title=f"average the last {s.AVERAGE} checkpoints",
        )  # fmt: skip
        yield Step(
            "model", self.folder, (self.model.final,), self._finish, (self.average,),
            title="the model, and what it takes to use it",
        )  # fmt: skip

    def _finish(self) -> None:
        """Folding compares the two models on the validation set."""
        final = self.model.final
        final.parent.mkdir(parents=True, exist_ok=True)
        for path in self.model.assets:
            shutil.copy(path, final.parent)
        if self.folded:
            said = plugin("fold", self.average, "-o", final, "--data", self.model.binary)
            write_lines(self.folder / "fold.txt", said.splitlines())
        else:
            with replacing(final) as part:
                shutil.copy(self.average, part)

    def record(self, scores: dict[str, str], **made: object) -> None:
        """Keep the run's row of results.csv.

        Args:
            made: what it was made with, besides the average.
        """
        s = self.settings
        key = {"recipe": self.recipe.row, "method": s.METHOD, "preset": s.PRESET, "seed": str(s.SEED)}
        words = {name: str(value) for name, value in {"average": s.AVERAGE, **made}.items()}
        measured = {"tokens": s.TOKENS or self.machine.tokens, **scores, **words}
        results.record(self.folder, Path(s.RUNS, "results.csv"), key, measured)

    def report_steps(self, scored: Path, *test: Any) -> Iterator[Step]:
        """The other methods' results, once they are there, are part of the summary and of the report.

        Args:
            test: of a translation: prefix of the raw test set, and its languages.
        """
        others = sorted(self.folder.parent.glob(f"*-{self.settings.PRESET}-s{self.settings.SEED}/score.json"))
        others = [path for path in others if path != scored]
        text, page = self.folder / "summary.txt", self.folder / "report.html"
        yield Step(
            "summary", self.folder, (text,), partial(summary.write, self.folder, self.recipe.command, *test),
            (scored, *others),
            {"command": self.recipe.command},
        )  # fmt: skip
        analysed = []
        for name in self.settings.ANALYSES:
            analysed.append(self.folder / "analysis" / f"{name}.json")
            yield Step(
                f"analyse {name}", self.folder, (analysed[-1],), partial(self._analyse, name), (self.average,),
                optional=True,
            )  # fmt: skip
        program = partial(plugin, "report", self.folder, *(path.parent for path in others), "-o", page)
        yield Step("report", self.folder, (page,), program, (text, *analysed))

    def _analyse(self, name: str) -> None:
        """On a few tokens. A scheme or a text that it cannot be made of says so in a line, here and in the report."""
        out = self.folder / "analysis" / name
        out.parent.mkdir(exist_ok=True)
        try:
            plugin("analyze", name, self.average, "--data", self.model.binary, "--tokens", 256, "--json", "-o", out)
        except Failed:
            log.info("analyse %s: left out of the report", name)
