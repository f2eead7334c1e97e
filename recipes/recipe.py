"""Recipes and grids of runs: their YAML files, the user's settings with errors and help, and their folders."""

from __future__ import annotations

import argparse
import difflib
import functools
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from recipes.machines import visible_gpus
from recipes.processes import Needs
from recipes.settings import KINDS, Machine, Settings, Training

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=BaseModel)
HERE = Path(__file__).parent
MAKEFILE_VARIABLES = {"PYTHON", "VENV", "TORCH", "PYTEST", "TARGET", "RECIPE"}
"""Variables that the Makefile itself reads. They are not settings."""


class Raw(BaseModel, extra="forbid", frozen=True):
    """A raw text in both languages, and where it comes from."""

    members: list[str]
    archive: str | None = None
    """None: the files are in the folder DATA"""
    kind: Literal["plain", "tags", "segments"] = "plain"
    straight_apostrophe: bool = False
    tokenise: list[str] = []
    """options of its tokenising step"""


class Split(BaseModel, extra="forbid", frozen=True):
    """The training, validation or test set: the texts that make it, and which of their pairs it keeps."""

    texts: list[str]
    keep: Literal["rest", "nth"] | None = None


class File(BaseModel, extra="forbid", frozen=True):
    """The content of a recipe's YAML."""

    kind: str
    folder: str = ""
    needs: Needs = Needs()
    """what its jobs need on a cluster"""
    raw: str = ""
    """folder of the raw text below RUNS; by default in the text's folder"""
    fixed: dict[str, Any] = {}
    """settings that the user cannot change"""
    unused: list[str] = []
    """settings of its kind that have no effect on this recipe, so the user cannot give them"""
    settings: dict[str, Any] = {}
    presets: dict[str, dict[str, Any]]
    axes: dict[str, str] = {}
    """a grid's axes, in the order in which they name a run, the seed last, each with the setting of its values"""
    named: dict[str, str] = {}
    """settings that change the name of a grid's folder, each with the part that it adds"""
    options: dict[str, Any] = {}
    """options of fairseq-train; a grid has several groups, and {NAME} stands for the value of a setting"""
    sizes: dict[str, dict[str, Any]] = {}
    texts: dict[str, Raw] = {}
    splits: dict[str, Split] = {}

    @property
    def model(self) -> type[Settings]:
        return KINDS[self.kind]

    @property
    def is_grid(self) -> bool:
        return not issubclass(self.model, Training)

    @property
    def names(self) -> list[str]:
        """The settings that a user may give."""
        return [name for name in self.model.model_fields if name not in {*self.fixed, *self.unused}]

    @property
    def aliases(self) -> dict[str, str]:
        """Names of settings by their aliases."""
        fields = ((name, self.model.model_fields[name].alias) for name in self.names)
        return {alias: name for name, alias in fields if alias}

    @property
    def preset(self) -> str:
        """The default preset: `gpu` or `cpu` by this machine if a recipe has both, otherwise the first."""
        if {"cpu", "gpu"} <= self.presets.keys() and not self.is_grid:
            return "gpu" if visible_gpus() else "cpu"
        return next(iter(self.presets))

    def values(self, size: str, preset: str) -> dict[str, Any]:
        """The settings as they are before the user changes any.

        Raises:
            ValueError: there is no such preset.
        """
        if preset not in self.presets:
            raise ValueError(f"PRESET={preset} is unknown; expected {' or '.join(self.presets)}.")
        return {**self.settings, **self.fixed, **self.sizes.get(size, {}), **self.presets[preset], "PRESET": preset}


@dataclass(frozen=True)
class Recipe:
    target: str
    """its name for `make`"""
    file: File
    settings: Any
    size: str = ""
    """the size that the target names, as 18l in wmt14-ende-18l"""
    user_values: dict[str, str] = field(default_factory=dict)
    grid: Path | None = None
    """for a run of a grid: the grid's folder, which has the text and all runs"""
    point: str = ""
    """for a run of a grid: the run's name"""

    @property
    def values(self) -> dict[str, str]:
        """The user's values, and the preset if there are several: its default may be another one on another machine."""
        preset = {"PRESET": self.settings.PRESET} if len(self.file.presets) > 1 else {}
        return {**preset, **self.user_values}

    @property
    def words(self) -> list[str]:
        """The values, as words of a command line."""
        return [f"{name}={value}" for name, value in self.values.items()]

    @property
    def name(self) -> str:
        """The folder of all runs of this recipe, below RUNS."""
        return self.file.folder.format(**dict(self.settings))

    @property
    def row(self) -> str:
        """The recipe's name in results.csv."""
        return self.target if self.size else self.name

    @property
    def base(self) -> Path:
        return self.grid or Path(self.settings.RUNS, self.name)

    @property
    def text(self) -> Path:
        """The folder of the text.

        A text made before version 0.2.0 has no keys. It stays where it is, and the new text has the folder `text`.
        """
        old = self.base / "data"
        return self.base / "text" if (old / "settings.json").exists() and not (old / ".keys").exists() else old

    @property
    def raw(self) -> Path:
        return Path(self.settings.RUNS, self.file.raw) if self.file.raw else self.text / "raw"

    @property
    def run(self) -> Path:
        if self.grid:
            return self.grid / self.point
        s = self.settings
        method = s.METHOD if s.rule in ("", "reference") else f"{s.METHOD}-{s.rule}"
        return self.base / self.size / f"{method}-{s.PRESET}-s{s.SEED}"

    @property
    def archives(self) -> Path:
        """The folder of the archives: the user's, or the one to download them to."""
        return Path(dict(self.settings).get("DATA") or Path(self.settings.RUNS, "archives"))

    @property
    def command(self) -> str:
        """The command for make that made the run, without METHOD and SEED. With other values it makes a comparable run.

        The settings of threads and GPUs are left out, since they may differ from shell to shell.
        """
        left_out = {"METHOD", "SEED", "NODE_RANK", "WATCH", *Machine.model_fields} - {"RUNS"}
        left_out |= {"MASTER"} if self.settings.WHERE == "slurm" else set()
        words = sorted(f"{name}={value}" for name, value in self.values.items() if name not in left_out)
        return shlex.join(["make", self.target, *words]).replace("$", "$$")


@functools.cache
def files() -> dict[str, tuple[File, str]]:
    """Each target's YAML file, and the size that the target names."""
    targets: dict[str, tuple[File, str]] = {}
    for path in sorted(HERE.glob("*.yaml")):
        file = File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        targets |= {f"{path.stem}-{size}": (file, size) for size in file.sizes} or {path.stem: (file, "")}
    return targets


def collect(
    target: str, words: list[str], names: list[str], options: Sequence[str] = (), aliases: dict[str, str] | None = None
) -> dict[str, str]:
    """The user's values for the settings of a target, from the command line and the environment.

    make puts the values of its command line into the environment, and their names into MAKEFLAGS.

    Args:
        words: NAME=VALUE.
        names: the settings of the target.
        options: options of fairseq-train. If an option, here or in TRAIN_ARGS, is the alias of a setting, its value is
            the setting's; all others are TRAIN_ARGS.
        aliases: names of settings by their aliases.

    Raises:
        ValueError: a word is not NAME=VALUE, or `options` does not begin with an option.
    """
    aliases = aliases or {}
    if wrong := next((word for word in words if not re.match(r"[A-Z]\w*=", word)), None):
        raise ValueError(f"{wrong}: expected NAME=VALUE, a setting of {target}. See make help TARGET={target}.")
    if options and not options[0].startswith("--"):
        raise ValueError(f"{options[0]} after --: expected an option of fairseq-train, as in -- --dropout 0.2.")
    _, _, after = os.environ.get("MAKEFLAGS", "").partition("-- ")
    on_line = {word.partition("=")[0] for word in re.split(r"(?<!\\)\s+", after) if "=" in word} - MAKEFILE_VARIABLES
    values = {name: os.environ[name] for name in [*names, *on_line] if name in os.environ}
    from_words = dict(word.split("=", 1) for word in words)
    quiet = on_line | from_words.keys() | Machine.model_fields.keys() - {"RUNS"}
    if inherited := [f"{name}={value}" for name, value in values.items() if name not in quiet]:
        log.info("From the environment: %s.", " ".join(inherited))
    parser = argparse.ArgumentParser("--", argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    for alias in aliases:
        if alias.startswith("--"):
            parser.add_argument(alias, dest=alias)
    values |= from_words
    aliased, others = parser.parse_known_args([*shlex.split(values.pop("TRAIN_ARGS", "")), *options])
    values |= {alias: value for alias, value in vars(aliased).items() if value is not None}
    if others:
        values["TRAIN_ARGS"] = shlex.join(others)
    return {aliases.get(name, name): value for name, value in values.items()}


def read(target: str, user_values: dict[str, str]) -> Recipe:
    """The recipe of a target, with the user's values.

    Raises:
        ValueError: a setting is unknown or invalid.
    """
    file, size = files()[target]
    if unknown := next((name for name in user_values if name not in file.names), None):
        near = difflib.get_close_matches(unknown, file.names, 1)
        like = f" {near[0]} is one." if near else ""
        raise ValueError(
            f"{unknown}={user_values[unknown]} is not a setting of {target}.{like} See make help TARGET={target}."
        )
    preset = user_values.get("PRESET") or file.preset
    values = file.values(size, preset) | user_values
    if values.get("EPOCHS") and "UPDATES" in user_values:
        raise ValueError(
            f"UPDATES={user_values['UPDATES']} is given, and EPOCHS={values['EPOCHS']} says how long it trains; give "
            "another EPOCHS=, or EPOCHS= empty."
        )
    return Recipe(target, file, validated(file.model, values), size, user_values)


def help_lines(target: str, user_values: dict[str, str]) -> list[str]:
    """A recipe's presets, and the settings that have an effect, with the user's values."""
    file, size = files()[target]
    values = file.values(size, user_values.get("PRESET") or file.preset) | user_values
    hidden = {name for name, value in values.items() if isinstance(value, dict)}
    hidden |= {"UPDATES"} if values.get("EPOCHS") else set()
    hidden |= {"UPDATE_FREQ"} if values.get("TOKENS") else {"DEVICE_TOKENS", "BY_MEMORY", "MEMORY"}
    lines = [f"make {target} PRESET={'|'.join(file.presets)}", ""]
    return [*lines, *described(file.model, [name for name in file.names if name not in hidden], values)]


# -- errors and help ------------------------------------------------------------------------------------------------


def validated(model: type[Model], values: dict[str, Any]) -> Model:
    """The model of these values.

    Raises:
        ValueError: a value is invalid, or some values contradict each other; the message has one line.
    """
    try:
        return model(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        message = fault["msg"].removeprefix("Value error, ")
        if not fault["loc"]:
            raise ValueError(message) from None
        name = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            raise ValueError(f"{name} is unknown; expected one of {', '.join(model.model_fields)}.") from None
        meaning = " ".join((model.model_fields[name].description or "").split())
        if fault["type"] == "missing":
            raise ValueError(f"{name}= is missing; expected {meaning}.") from None
        expected = f"expected {message}" if fault["type"] == "value_error" else message[0].lower() + message[1:]
        value = values.get(name, fault["input"])
        raise ValueError(f"{name}={value} is invalid: {expected}{f' ({meaning})' if meaning else ''}.") from None


def described(model: type[BaseModel], names: Iterable[str], values: dict[str, Any]) -> Iterator[str]:
    """A line for each of the named fields: name, value (or else the default), meaning, choices."""
    schemas = model.model_json_schema(by_alias=False)["properties"]
    for name in names:
        schema = schemas[name]
        value = values.get(name, schema.get("default"))
        shown = "" if value in (None, "", [], {}) else f"={' '.join(map(str, value)) if type(value) is list else value}"
        choices = " ".join(schema.get("enum") or schema.get("items", {}).get("enum") or ()).strip()
        meaning = filter(None, [" ".join(schema.get("description", "").split()), choices])
        yield f"{name}{shown}: {'; one of: '.join(meaning)}"
