"""A recipe: its YAML file, with fairseq's options by command; the user's values; and the names of its folders.

A run's folder is named by its scheme, what the user changed, and its seed. What does not change the result in kind
(NEUTRAL) is in no name, so a run goes on with another number of GPUs or another batch.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel

from fairseq_admin.method.schemes import SCHEMES
from recipes import options as opts
from recipes.machines import PRECISIONS, visible_gpus
from recipes.options import Options
from recipes.processes import Needs
from recipes.settings import Settings, described, validated

HERE = Path(__file__).parent
COMMANDS = ("prepare", "preprocess", "train", "average", "generate")
NEUTRAL = {
    "prepare": {"--table", "--sums", "--expect", "--too-long"},
    "preprocess": {"--workers"},
    "train": {
        *("--max-tokens", "--update-freq", "--max-tokens-valid", "--num-workers", "--log-interval", "--log-format"),
        *("--ddp-backend", "--empty-cache-freq", "--data-buffer-size", "--no-progress-bar", "--cpu", "--wandb-project"),
    },
    "average": set[str](),
    "generate": {"--max-tokens", "--batch-size", "--num-workers", "--cpu"},
}
"""Options that do not change the result of a command in kind."""
EVERY = {"--save-interval-updates", "--validate-interval-updates"}
LENGTH = {
    *("--max-update", "--max-epoch", *EVERY, "--keep-interval-updates", "--keep-last-epochs"),
    *("--keep-best-checkpoints", "--stop-time-hours"),
}
"""Options of fairseq-train that decide how long a run is trained and which checkpoints stay, but no update."""
BY_UPDATES = {"--max-update", "--save-interval", "--validate-interval", "--validate-interval-updates"}
"""Options of a recipe by updates that a training by epochs must not have."""
OURS = {"--save-dir", "--tensorboard-logdir", "--source-lang", "--target-lang", "--destdir", "--path", "--gen-subset"}
"""Options that a recipe sets itself."""
PRECISION = {word for words in PRECISIONS.values() for word in opts.parse(words)}


class Raw(BaseModel, extra="forbid"):
    """A raw text in both languages, and where it comes from."""

    members: list[str]
    archive: str | None = None
    """None: the files are in the folder DATA"""
    kind: Literal["plain", "tags", "segments"] = "plain"
    straight_apostrophe: bool = False
    tokenise: list[str] = []
    """options of its tokenising step"""


class Split(BaseModel, extra="forbid"):
    """The training, validation or test set: the texts that make it, and which of their pairs it keeps."""

    texts: list[str]
    keep: Literal["rest", "nth"] | None = None


class Part(BaseModel, extra="forbid"):
    """Options by command, as a person types them, and what goes with them. A preset or a size adds to the recipe's."""

    prepare: list[str] = []
    preprocess: list[str] = []
    train: list[str] = []
    average: list[str] = []
    generate: list[str] = []
    gpus: int | None = None
    """GPUs of the paper; with 1, a run has one GPU unless GPUS= says otherwise"""
    paper: dict[str, dict[str, str]] = {}
    """the paper's numbers by scheme, by source"""


class File(Part):
    """The content of a recipe's YAML."""

    kind: Literal["translation", "language-model"]
    folder: str = ""
    """the folder of its texts and runs below RUNS; by default the file's name"""
    pair: str = ""
    """source and target language; empty: the user's PAIR"""
    pairs: list[str] = []
    """the pairs that the user may choose from; the first is the default"""
    needs: Needs = Needs()
    """what its jobs need on a cluster"""
    threads: int | None = None
    """threads of a process on a CPU"""
    compounds: bool = False
    """report BLEU of split compounds, too"""
    presets: dict[str, Part] = {"": Part()}
    sizes: dict[str, Part] = {"": Part()}
    texts: dict[str, Raw] = {}
    splits: dict[str, Split] = {}

    def preset(self, name: str) -> str:
        """The preset that the user names, or the default: the first, or `cpu` where there is no GPU for the first.

        Raises:
            ValueError: there is no such preset.
        """
        name = name or ("cpu" if "cpu" in self.presets and not visible_gpus() else next(iter(self.presets)))
        if name not in self.presets:
            raise ValueError(f"PRESET={name} is unknown; expected {' or '.join(filter(None, self.presets)) or 'none'}.")
        return name

    def options(self, command: str, size: str, preset: str) -> Options:
        parts = (self, self.sizes[size], self.presets[preset])
        return opts.merge(*(opts.parse(getattr(part, command)) for part in parts))


@functools.cache
def files() -> dict[str, tuple[str, File, str]]:
    """By target: the name of its YAML file, the file, and the size that the target names."""
    targets: dict[str, tuple[str, File, str]] = {}
    for path in sorted(HERE.glob("*.yaml")):
        try:
            file = validated(File, yaml.safe_load(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
        targets |= {f"{path.stem}-{size}".removesuffix("-"): (path.stem, file, size) for size in file.sizes}
    return targets


@dataclass(frozen=True)
class Recipe:
    target: str
    """its name for `make`"""
    file: File
    settings: Settings
    recipe_options: dict[str, Options]
    """the recipe's options by command, before the user changed any"""
    options: dict[str, Options]
    """with the user's"""
    user: dict[str, Options]
    """the user's alone"""
    values: dict[str, str] = field(default_factory=dict)
    """the user's settings"""
    folder: Path | None = None
    """for a run of a grid: its folder, next to which its text is"""
    size: str = ""
    """the size that the target names, as 18l in wmt14-ende-18l"""

    @property
    def preset(self) -> str:
        return self.file.preset(self.settings.PRESET)

    @property
    def pair(self) -> str:
        return self.file.pair or self.settings.PAIR or next(iter(self.file.pairs), "")

    @property
    def base(self) -> Path:
        """The folder of the recipe's texts, and of its runs of all sizes."""
        if self.folder:
            return self.folder.parent
        data = Path(os.path.abspath(self.settings.DATA or ".")).name
        name = (self.file.folder or files()[self.target][0]).format(pair=self.pair, data=data)
        return Path(self.settings.RUNS, name)

    @property
    def archives(self) -> Path:
        """The folder of the archives: the user's, or the one to download them to."""
        return Path(self.settings.DATA or Path(self.settings.RUNS, "archives"))

    @property
    def method(self) -> str:
        return self.options["train"]["--admin-scheme"]

    @property
    def rule(self) -> str:
        """The rule that sets omega; empty for a scheme without omega."""
        return self.options["train"].get("--admin-init", "reference") if SCHEMES[self.method].omega else ""

    @property
    def seed(self) -> str:
        return self.options["train"]["--seed"]

    @property
    def by_epochs(self) -> bool:
        return "--max-epoch" in self.options["train"]

    @property
    def length(self) -> int:
        """Number of updates or epochs."""
        return int(self.options["train"]["--max-epoch" if self.by_epochs else "--max-update"])

    def changes(self, command: str) -> Options:
        """The user's options that change the result of a command."""
        return opts.without(opts.changes(self.recipe_options[command], self.options[command]), NEUTRAL[command])

    @property
    def change(self) -> str:
        """What the user changed, but for the scheme, the rule, the preset and the seed: a part of the run's name."""
        trained = self.changes("train")
        stacks = [f"--{stack}-layers" for stack in ("encoder", "decoder")]
        depths = dict.fromkeys(self.options["train"][name] for name in stacks if name in self.options["train"])
        layers = f"{'-'.join(depths)}l" if trained.keys() & {*stacks} else ""
        precision = self.settings.PRECISION if trained.keys() & PRECISION else ""
        length = LENGTH if self.by_epochs else LENGTH - EVERY  # the interval decides what is averaged
        hidden = {*stacks, *length, "--admin-scheme", "--admin-init", "--seed", *(PRECISION if precision else ())}
        changes = (self.changes("prepare"), self.changes("preprocess"), opts.without(trained, hidden))
        changed = map(opts.part_of_name, changes)
        tokens = f"tokens{self.tokens}" if self.tokens != self._tokens_of(self.recipe_options["train"]) else ""
        return "-".join(filter(None, [layers, precision, *changed, tokens]))

    def _tokens_of(self, options: Options) -> int:
        return int(options["--max-tokens"]) * int(options.get("--update-freq", 1)) * self.gpus

    @property
    def gpus(self) -> int:
        """GPUs of the paper."""
        return self.file.sizes[self.size].gpus or self.file.gpus or 1 if "--cpu" not in self.options["train"] else 1

    @property
    def tokens(self) -> int:
        """Tokens of an update: on any machines the recipe's, unless the user gives --update-freq."""
        given = "--update-freq" in self.user["train"]
        return self._tokens_of(self.options["train"] if given else self.recipe_options["train"])

    @property
    def run(self) -> Path:
        if self.folder:
            return self.folder
        rule = self.rule if "--admin-init" in self.changes("train") else ""
        preset = self.preset if self.preset != next(iter(self.file.presets)) else ""
        return self.base / self.size / "-".join(filter(None, [self.method, rule, preset, self.change, f"s{self.seed}"]))

    @property
    def at(self) -> Path:
        """The folder of the training's end, by its length."""
        return self.run / f"at-{self.length}{'-epochs' if self.by_epochs else ''}"

    @property
    def model(self) -> Path:
        """The folder of the average and the model: that of the training's end, unless the user's average is another."""
        average = opts.part_of_name(self.changes("average"))
        return self.at.with_name(f"{self.at.name}-{average}") if average else self.at

    @property
    def result(self) -> Path:
        """The folder of translations and scores."""
        search = opts.part_of_name(self.changes("generate"))
        return self.model.with_name(f"{self.model.name}-{search}") if search else self.model

    @property
    def difference(self) -> str:
        """All that the user changed, but for scheme, rule, preset and seed: the column `options` of results.csv."""
        changed = opts.changes(self.recipe_options["train"], self.options["train"])
        length = f"at-{self.length}" if changed.keys() & {"--max-update", "--max-epoch"} else ""
        folder = self.result.name.removeprefix(f"at-{self.length}").removeprefix("-epochs").strip("-")
        return "-".join(filter(None, [self.change, length, folder]))

    @property
    def command(self) -> str:
        """The command for make that made the run, without METHOD and SEED. With other values it makes a comparable run.

        Threads and GPUs are left out, since they may differ from shell to shell.
        """
        left_out = {"METHOD", "SEED", "GPUS", "NODES", "MASTER"}
        words = sorted(f"{name}={value}" for name, value in self.values.items() if name not in left_out)
        return shlex.join(["make", self.target, *words]).replace("$", "$$")


def user_options(settings: Settings, file: File) -> dict[str, Options]:
    """The user's options by command. The settings that stand for options of fairseq-train come first.

    Raises:
        ValueError: an option is one that the recipe sets itself, or is not an option.
    """
    stacks = ("encoder", "decoder") if file.kind == "translation" else ("decoder",)
    depths = settings.LAYERS.split("-") if settings.LAYERS else []
    named = {f"--{stack}-layers": depth for stack, depth in zip(stacks, depths * 2 if len(depths) == 1 else depths)}
    shorthand = {
        "--admin-scheme": settings.METHOD, "--admin-init": settings.INIT, "--seed": settings.SEED,
        "--max-update": settings.UPDATES,
    }  # fmt: skip
    named |= {name: str(value) for name, value in shorthand.items() if value not in (None, "")}
    user = {}
    for command in COMMANDS:
        variable = "ARGS" if command == "train" else f"{command.upper()}_ARGS"
        try:
            user[command] = opts.parse(getattr(settings, variable, ""))
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from None
        if ours := OURS & user[command].keys():
            raise ValueError(f"{variable}: the recipe sets {min(ours)} itself. Leave it out.")
    return user | {"train": named | with_precision(settings.PRECISION) | user["train"]}


def with_precision(name: str) -> Options:
    """The options that set a precision in place of another; none without a name."""
    return dict.fromkeys(PRECISION, opts.TAKEN_AWAY) | opts.parse(PRECISIONS[name]) if name else {}


def fit(options: dict[str, Options], recipe: dict[str, Options], user: dict[str, Options]) -> None:
    """Fit the interval of checkpoints, and how many are kept and averaged, to the length of the training.

    What the user does not give follows, in the recipe's own options, too, so it is no change of the user's.

    Raises:
        ValueError: what the user gives does not go together.
    """
    train, by_epochs = options["train"], "--max-epoch" in options["train"]
    length = number(train, "--max-epoch" if by_epochs else "--max-update")
    every, last = 1 if by_epochs else number(train, min(EVERY)), number(options["average"], "--last")
    fixed = by_epochs or min(EVERY) in user["train"]
    if "--last" not in user["average"]:
        last = min(last, length // every if fixed else length)
    if not fixed and last <= length and (length % every or length // every < last):
        every = next(size for size in range(min(every, length // last), 0, -1) if length % size == 0)
    if last < 1 or length % every or length // every < last:
        raise ValueError(
            f"{length} {'epochs' if by_epochs else 'updates'}, with a checkpoint every {every}: expected a multiple, "
            f"and at least the {last} checkpoints that AVERAGE_ARGS='--last {last}' averages. Change one of them."
        )
    fitted = (
        {"--keep-last-epochs": last} if by_epochs else dict.fromkeys(EVERY, every) | {"--keep-interval-updates": last}
    )
    follows = {name: str(value) for name, value in fitted.items() if name not in user["train"]}
    for one in (options, recipe):
        one["train"] |= follows
        one["average"] |= {} if "--last" in user["average"] else {"--last": str(last)}


def number(options: Options, name: str) -> int:
    """An option that is a whole number above 0.

    Raises:
        ValueError: it is another value.
    """
    if (value := options.get(name, "")).isdecimal() and int(value):
        return int(value)
    raise ValueError(f"{name} {value}: expected a whole number above 0.")


def read(target: str, values: dict[str, str], folder: Path | None = None) -> Recipe:
    """The recipe of a target, with the user's values.

    Args:
        folder: for a run of a grid, its folder.

    Raises:
        ValueError: a setting or an option is unknown or invalid.
    """
    _, file, size = files()[target]
    settings = validated(Settings, values)
    preset = file.preset(settings.PRESET)
    if settings.PAIR and (file.pair or file.pairs and settings.PAIR not in file.pairs):
        raise ValueError(f"PAIR={settings.PAIR} is not of {target}; expected {file.pair or ', '.join(file.pairs)}.")
    sources = any(text.archive is None for text in file.texts.values())
    for name, needed in {"PAIR": not (file.pair or file.pairs) and file.kind == "translation", "DATA": sources}.items():
        if needed and not getattr(settings, name):
            raise ValueError(f"{name}= is missing; expected {Settings.model_fields[name].description}.")
    if settings.DATA and not file.texts:
        raise ValueError(f"DATA={settings.DATA} is not a setting of {target}, whose text is not read from files.")
    user = user_options(settings, file)
    own = {command: file.options(command, size, preset) for command in COMMANDS}
    options = {command: opts.merge(own[command], user[command]) for command in COMMANDS}
    if "--max-epoch" in options["train"] and settings.UPDATES:
        raise ValueError(f"UPDATES={settings.UPDATES}: {target} trains by epochs; give ARGS='--max-epoch ...'.")
    if "--max-epoch" in user["train"].keys() - own["train"].keys():
        for one in (own, options):  # no end of an epoch may be left out
            one["train"] = opts.without(one["train"], BY_UPDATES)
    train = options["train"]
    if (method := train.get("--admin-scheme", "")) not in SCHEMES:
        raise ValueError(f"--admin-scheme {method} is unknown; expected one of {', '.join(SCHEMES)}.")
    if not SCHEMES[method].omega:
        train.pop("--admin-init", None)
    for one in (own, options) if "--cpu" in train else ():
        one["train"] = opts.without(one["train"], PRECISION)
    if {"--encoder-embed-dim", "--encoder-attention-heads"} <= train.keys():
        width, heads = number(train, "--encoder-embed-dim"), number(train, "--encoder-attention-heads")
        if width % heads:
            raise ValueError(f"--encoder-embed-dim {width} is not a multiple of --encoder-attention-heads {heads}.")
    fit(options, own, user)
    return Recipe(target, file, settings, own, options, user, values, folder, size)


def help_lines(target: str, values: dict[str, str]) -> Iterator[str]:
    """A recipe's settings, what people change first, and its options by command."""
    _, file, size = files()[target]
    preset = file.preset(values.get("PRESET", ""))
    yield f"make {target} {f'PRESET={chr(124).join(file.presets)} ' * (len(file.presets) > 1)}NAME=VALUE ..."
    yield ""
    hidden = {"PAIR"} if file.pair or file.kind != "translation" else set()
    hidden |= set() if file.texts else {"DATA"}
    order = ("METHOD", "SEED", "LAYERS", "UPDATES", "ARGS", "PREPARE_ARGS", "AVERAGE_ARGS", "GENERATE_ARGS")
    names = [name for name in dict.fromkeys([*order, *Settings.model_fields]) if name not in hidden]
    yield from described(Settings, names, values)
    for command in COMMANDS:
        yield f"\n{command}: {shlex.join(opts.words(file.options(command, size, preset)))}"
