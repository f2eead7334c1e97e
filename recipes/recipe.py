"""A recipe, or a grid of runs: its YAML, the user's settings, and its folders."""

from __future__ import annotations

import argparse
import difflib
import functools
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from recipes.jobs import Needs
from recipes.kinds import KINDS
from recipes.settings import Machine, Settings, Training
from recipes.steps import gpus
from recipes.validation import described, validated

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
MAKES = {"PYTHON", "VENV", "TORCH", "PYTEST", "TARGET", "RECIPE"}
"""Variables of the Makefile's own."""


class Raw(BaseModel, extra="forbid", frozen=True):
    """A raw text of both languages, and its source."""

    members: list[str]
    archive: str | None = None
    """without one, the files are in the folder DATA"""
    kind: Literal["plain", "tags", "segments"] = "plain"
    straight_apostrophe: bool = False
    tokenise: list[str] = []
    """options of the step that tokenises it"""


class Split(BaseModel, extra="forbid", frozen=True):
    """Train, valid or test: texts in their order, and which of their pairs."""

    texts: list[str]
    keep: Literal["rest", "nth"] | None = None


class File(BaseModel, extra="forbid", frozen=True):
    """The content of a recipe's YAML."""

    kind: str
    folder: str = ""
    needs: Needs = Needs()
    """of a cluster"""
    raw: str = ""
    fixed: dict[str, Any] = {}
    """settings that the user cannot change"""
    unused: list[str] = []
    """settings of its kind that have no effect on it, which the user cannot give either"""
    settings: dict[str, Any] = {}
    presets: dict[str, dict[str, Any]]
    axes: dict[str, str] = {}
    """of a grid: by name the settings of their places, in the order of a folder's name; the seed is the last"""
    named: dict[str, str] = {}
    """of a grid: the parts of its folder's name, by the settings that a user changes"""
    options: dict[str, Any] = {}
    """fairseq-train's; of a grid those for `all` runs, and for some; a setting's name in braces is its value"""
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
        """Those settings by their other names."""
        fields = ((name, self.model.model_fields[name].alias) for name in self.names)
        return {alias: name for name, alias in fields if alias}

    @property
    def preset(self) -> str:
        """The one for this machine, where there is one for GPUs and one without; or the first."""
        if {"cpu", "gpu"} <= self.presets.keys() and not self.is_grid:
            return "gpu" if gpus.visible() else "cpu"
        return next(iter(self.presets))

    def values(self, size: str, preset: str) -> dict[str, Any]:
        """The settings before the user gives any."""
        return {**self.settings, **self.fixed, **self.sizes.get(size, {}), **self.presets[preset], "PRESET": preset}


@dataclass(frozen=True)
class Recipe:
    target: str
    """its name for `make`"""
    file: File
    settings: Any
    size: str = ""
    """the part of the target that names one"""
    given: dict[str, str] = field(default_factory=dict)
    """the user's values"""

    @property
    def name(self) -> str:
        """The folder that all its runs share, under RUNS."""
        return self.file.folder.format(**dict(self.settings))

    @property
    def row(self) -> str:
        """Its name in results.csv."""
        return self.target if self.size else self.name

    @property
    def base(self) -> Path:
        return Path(self.settings.RUNS, self.name)

    @property
    def text(self) -> Path:
        """The folder of the text. Those of before 0.2.0 have no keys: they stay, and the text is made again beside."""
        old = self.base / "data"
        return self.base / "text" if (old / "settings.json").exists() and not (old / ".keys").exists() else old

    @property
    def raw(self) -> Path:
        return Path(self.settings.RUNS, self.file.raw) if self.file.raw else self.text / "raw"

    @property
    def run(self) -> Path:
        s = self.settings
        method = s.METHOD if s.rule in ("", "reference") else f"{s.METHOD}-{s.rule}"
        return self.base / self.size / f"{method}-{s.PRESET}-s{s.SEED}"

    @property
    def archives(self) -> Path:
        return Path(self.settings.RUNS, "archives")

    @property
    def command(self) -> str:
        """The command that made it, without the run's METHOD and SEED: with others it makes a run to set next to it.

        Settings of threads and GPUs are left out: they may be others in each shell.
        """
        left_out = {"METHOD", "SEED", "NODE_RANK", "WATCH", *Machine.model_fields} - {"RUNS"}
        left_out |= {"MASTER"} if self.settings.WHERE == "slurm" else set()
        preset = {"PRESET": self.settings.PRESET} if len(self.file.presets) > 1 else {}
        named = sorted({**preset, **self.given}.items())
        return shlex.join(["make", self.target, *(f"{name}={value}" for name, value in named if name not in left_out)])


@functools.cache
def files() -> dict[str, tuple[File, str]]:
    """The YAML of every target, and the size that the target names."""
    targets: dict[str, tuple[File, str]] = {}
    for path in sorted(HERE.glob("*.yaml")):
        file = File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        targets |= {f"{path.stem}-{size}": (file, size) for size in file.sizes} or {path.stem: (file, "")}
    return targets


def collect(
    target: str, words: list[str], known: list[str], options: Sequence[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:  # fmt: skip
    """The user's values for the settings of a target: words NAME=VALUE, or the environment; and fairseq's options.

    make puts the values of its command line into the environment, and the names into MAKEFLAGS.

    Args:
        options: of fairseq-train. One that is a setting's alias is that setting; the others join TRAIN_ARGS.
        aliases: the settings by their other names.

    Raises:
        ValueError: a word is not a setting, or the first of `options` is not an option.
    """
    if wrong := next((word for word in words if not re.match(r"[A-Z]\w*=", word)), None):
        raise ValueError(f"{wrong}: expected NAME=VALUE, a setting of {target}. See make help TARGET={target}.")
    if options and not options[0].startswith("--"):
        raise ValueError(f"{options[0]} after --: expected an option of fairseq-train, as in -- --dropout 0.2.")
    _, _, after = os.environ.get("MAKEFLAGS", "").partition("-- ")
    on_line = {word.partition("=")[0] for word in re.split(r"(?<!\\)\s+", after) if "=" in word} - MAKES
    values = {name: os.environ[name] for name in [*known, *on_line] if name in os.environ}
    given = dict(word.split("=", 1) for word in words)
    quiet = on_line | given.keys() | Machine.model_fields.keys() - {"RUNS"}
    if inherited := [f"{name}={value}" for name, value in values.items() if name not in quiet]:
        log.info("From the environment: %s.", " ".join(inherited))
    parser = argparse.ArgumentParser("--", argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    for option in filter(lambda alias: alias.startswith("--"), aliases):
        parser.add_argument(option, dest=option)
    named, others = parser.parse_known_args(options)
    values |= given | {option: value for option, value in vars(named).items() if value is not None}
    if others:
        values["TRAIN_ARGS"] = f"{values.get('TRAIN_ARGS', '')} {shlex.join(others)}".strip()
    return {aliases.get(name, name): value for name, value in values.items()}


def read(target: str, given: dict[str, str]) -> Recipe:
    """The recipe of a target, with the user's values.

    Raises:
        ValueError: a setting is unknown or wrong.
    """
    file, size = files()[target]
    if unknown := next((name for name in given if name not in file.names), None):
        near = difflib.get_close_matches(unknown, file.names, 1)
        like = f" {near[0]} is one." if near else ""
        raise ValueError(
            f"{unknown}={given[unknown]} is not a setting of {target}.{like} See make help TARGET={target}."
        )
    preset = given.get("PRESET") or file.preset
    if preset not in file.presets:
        raise ValueError(f"PRESET={preset} is unknown; expected {' or '.join(file.presets)}.")
    values = file.values(size, preset) | given
    if values.get("EPOCHS") and "UPDATES" in given:
        raise ValueError(
            f"UPDATES={given['UPDATES']} is given, and EPOCHS={values['EPOCHS']} says how long it trains; give another "
            "EPOCHS=, or EPOCHS= empty."
        )
    return Recipe(target, file, validated(file.model, values), size, given)


def help_lines(target: str, given: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """A recipe's presets and the settings that have an effect, with the user's values."""
    file, size = files()[target]
    values = {**file.values(size, given.get("PRESET") or file.preset), **given}
    without = {name for name, value in values.items() if isinstance(value, dict)}
    without |= {"UPDATES"} if values.get("EPOCHS") else set()
    lines = [f"make {target} PRESET={'|'.join(file.presets)}", ""]
    return [*lines, *described(file.model, [name for name in file.names if name not in without], values)]
