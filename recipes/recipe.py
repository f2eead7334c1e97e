"""A recipe: its YAML, what a user gives for its settings, and where its files are."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.settings import KINDS, Settings, Training
from recipes.steps import gpus

HERE = Path(__file__).parent


class Raw(BaseModel):
    """A raw text of both languages, and what it is extracted from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    members: list[str]
    archive: str | None = None
    """without one, the files are in the folder DATA"""
    kind: Literal["plain", "tags", "segments"] = "plain"
    straight_apostrophe: bool = False
    tokenise: list[str] = []
    """options of the step that tokenises it"""


class Split(BaseModel):
    """Train, valid or test: texts in their order, and which of their pairs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    texts: list[str]
    keep: Literal["rest", "nth"] | None = None


class File(BaseModel):
    """What a recipe's YAML holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    about: str
    folder: str
    raw: str = ""
    command: list[str] = []
    """settings that the command is named with"""
    fixed: dict[str, Any] = {}
    """settings that are not the user's"""
    settings: dict[str, Any] = {}
    presets: dict[str, dict[str, Any]]
    sizes: dict[str, dict[str, Any]] = {}
    texts: dict[str, Raw] = {}
    splits: dict[str, Split] = {}


@dataclass(frozen=True)
class Recipe:
    target: str
    """what `make` calls it by"""
    file: File
    settings: Any
    size: str = ""
    """the part of the target that names one, with its variant"""
    given: tuple[tuple[str, str], ...] = ()
    """what the user gave for its settings, in the order of their names"""

    @property
    def name(self) -> str:
        """The folder that all its runs share, under RUNS."""
        return self.file.folder.format(**dict(self.settings))

    @property
    def row(self) -> str:
        """What it is called in results.csv."""
        return self.name if not self.size else f"{self.target.rpartition('-')[0]}-{self.size}"

    @property
    def base(self) -> Path:
        return Path(self.settings.RUNS, self.name)

    @property
    def text(self) -> Path:
        return self.base / "data"

    @property
    def raw(self) -> Path:
        return Path(self.settings.RUNS, self.file.raw) if self.file.raw else self.text / "raw"

    @property
    def run(self) -> Path:
        return self.base / self.size / f"{self.settings.METHOD}-{self.settings.PRESET}-s{self.settings.SEED}"

    @property
    def archives(self) -> Path:
        return Path(self.settings.RUNS, "archives")

    @property
    def command(self) -> str:
        """What made it, but for the run's METHOD and SEED: with other ones it makes a run to set next to it.

        What only tells processes of threads and GPUs is left out: it may be another in each shell.
        """
        left_out = {"METHOD", "SEED", *Settings.model_fields} - {"RUNS"}
        named = {name: str(getattr(self.settings, name)) for name in self.file.command}
        named |= {name: value for name, value in self.given if name not in left_out}
        return shlex.join(["make", self.target, *(f"{name}={value}" for name, value in named.items())])


def files() -> dict[str, tuple[Path, str]]:
    """The YAML of every target that trains one model, and the size that the target names."""
    targets: dict[str, tuple[Path, str]] = {}
    for path in sorted(HERE.glob("*.yaml")):
        sizes = [name for name in _load(path).sizes if "-" not in name]
        targets |= {f"{path.stem}-{size}": (path, size) for size in sizes} or {path.stem: (path, "")}
    return targets


def _load(path: Path) -> File:
    return File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def names(target: str) -> list[str]:
    """The settings that a user may give for a target."""
    file = _load(files()[target][0])
    return [name for name in KINDS[file.kind].model_fields if name not in file.fixed]


def read(target: str, given: dict[str, str]) -> Recipe:
    """The recipe of a target, with what a user gives for its settings.

    Raises:
        ValueError: a setting is unknown or wrong.
    """
    path, size = files()[target]
    file = _load(path)
    model, known = KINDS[file.kind], names(target)
    if unknown := next((name for name in given if name not in known), None):
        near = difflib.get_close_matches(unknown, known, 1)
        like = f" {near[0]} is one." if near else ""
        raise ValueError(
            f"{unknown}={given[unknown]} is not a setting of {target}.{like} See make help TARGET={target}."
        )
    if given.get("VARIANT"):
        size = f"{size}-{given['VARIANT']}"
        if size not in file.sizes:
            variants = ", ".join(
                f"{name} of {path.stem}-{of}" for of, _, name in (s.partition("-") for s in file.sizes) if name
            )
            raise ValueError(f"VARIANT={given['VARIANT']} is not one of {target}; expected {variants or 'none'}.")
    preset = given.get("PRESET") or _default(file)
    if preset not in file.presets:
        raise ValueError(f"PRESET={preset} is unknown; expected {' or '.join(file.presets)}.")
    values = {**file.settings, **file.fixed, **file.sizes.get(size, {}), **file.presets[preset], **given}
    if values.get("EPOCHS") and "UPDATES" in given:
        raise ValueError(
            f"UPDATES={given['UPDATES']} is given, and EPOCHS={values['EPOCHS']} says how long it trains; give another "
            "EPOCHS=, or EPOCHS= empty."
        )
    settings = validated(model, {**values, "PRESET": preset})
    return Recipe(target, file, settings, size, tuple(sorted(given.items())))


def _default(file: File) -> str:
    """The preset for this machine, where there is one for GPUs and one without; or the first."""
    if {"cpu", "gpu"} <= file.presets.keys():
        return "gpu" if gpus.visible() else "cpu"
    return next(iter(file.presets))


def validated(model: type[Training], values: dict[str, Any]) -> Training:
    """The settings.

    Raises:
        ValueError: one cannot be, or some do not go together, in one line.
    """
    try:
        return model(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        if not fault["loc"]:
            raise ValueError(fault["msg"].removeprefix("Value error, ")) from None
        name = str(fault["loc"][0])
        schema = model.model_json_schema()["properties"][name]
        if fault["type"] == "missing":
            raise ValueError(f"{name}= is missing; expected {schema['description']}.") from None
        what = fault["msg"].removeprefix("Value error, ") if fault["type"] == "value_error" else expected(schema)
        raise ValueError(f"{name}={values[name]} cannot be; expected {what}.") from None


def expected(schema: dict[str, Any]) -> str:
    """What a field of a JSON schema may be, in words."""
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return f"one of {' '.join(map(str, filter(None, choices)))}"
    if "anyOf" in schema:
        return expected(next(one for one in schema["anyOf"] if one.get("type") != "null"))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        least = "above 0" if "exclusiveMinimum" in schema else "of 0 or more"
        below = f" and below {schema['exclusiveMaximum']}" if "exclusiveMaximum" in schema else ""
        return f"a {'whole ' if kind == 'integer' else ''}number {least}{below}"
    if kind == "array":
        return expected(schema["items"]).replace("one of", "some of")
    if "pattern" in schema:
        return "source and target language, as in de-en" if "-" in schema["pattern"] else "a name without / and :"
    return {"boolean": "yes or no", "object": "a table"}.get(str(kind), "text")


def help_lines(target: str) -> list[str]:
    """Every setting of a recipe: its name, its value here, what it may be, what it means."""
    path, size = files()[target]
    file = _load(path)
    model = KINDS[file.kind]
    values = {**file.settings, **file.sizes.get(size, {}), **file.presets[_default(file)]}
    lines = [f"make {target}: {file.about}", f"presets: {' '.join(file.presets)}", ""]
    return [*lines, *described(model, names(target), values)]


def described(model: type[BaseModel], known: list[str], values: dict[str, Any]) -> list[str]:
    """A line for each of some settings: its value, or its default; what it means; what it may be."""
    schemas = model.model_json_schema()["properties"]
    lines = []
    for name in known:
        schema = schemas[name]
        value = values.get(name, schema.get("default"))
        shown = "" if value in (None, "", [], {}) else f"={value if not isinstance(value, list) else ' '.join(value)}"
        meaning = " ".join(schema.get("description", "").split())
        kind = expected(schema)
        lines.append(
            f"{name}{shown}: " + "; ".join(filter(None, (meaning, "" if meaning and kind == "text" else kind)))
        )
    return lines
