"""The settings of a recipe: what is not an option of a command, in capitals, and what was a setting before.

A user's NAME=VALUE, from the command line or the environment, is checked here. All else is an option of a command.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from fairseq_admin.method.schemes import MODEL_SCHEMES, RULES, is_number

log = logging.getLogger(__name__)
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
MAKEFILE_VARIABLES = {"PYTHON", "VENV", "TORCH", "PYTEST", "TARGET", "RECIPE", "SIZES"}
"""Variables that the Makefile itself reads. They are not settings."""
ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES")
"""Variables of the processes, which a command line may set, too."""
OLD_NAMES = Path(__file__).with_name("old_names.tsv")


def old_names() -> dict[str, str]:
    """How to write now what was a setting up to version 0.3.0, by its name; {0} stands for its value."""
    rows = (line.split("\t") for line in OLD_NAMES.read_text(encoding="utf-8").splitlines() if line[0] != "#")
    return {name: advice for name, advice in rows}


def _folder(path: str) -> str:
    if path.startswith("-") or not path or set(path) & set(":,\n"):
        raise ValueError("a path without a colon or a comma, where fairseq divides paths, that does not begin with -")
    return path


def _there(path: str) -> str:
    if not Path(path).is_dir():
        raise ValueError("a folder that is there; no folder has that name. Check the path")
    return path


def _rule(text: str) -> str:
    if text in RULES or is_number(text):
        return text
    raise ValueError(f"one of {', '.join(RULES)}, or a number above 0")


Maybe = Annotated[T | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty text means None."""
Folder = Annotated[str, AfterValidator(_folder)]
Data = Annotated[Folder, AfterValidator(_there)]
Scheme: TypeAlias = Literal[MODEL_SCHEMES]  # type: ignore[valid-type]
Rule = Annotated[str, AfterValidator(_rule)]
Depth = r"^[1-9][0-9]*(-[1-9][0-9]*)?$"


class Common(BaseModel):
    """Settings of every recipe and grid."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    UPDATES: Maybe[PositiveInt] = None
    """length of a run: --max-update"""
    ARGS: str = ""
    """options of fairseq-train, in place of the recipe's; --dropout= takes one away"""
    PREPARE_ARGS: str = ""
    """options of the text, below: --merges 8000 --tokeniser normalise escape"""
    GENERATE_ARGS: str = ""
    """options of fairseq-generate"""
    PRESET: str = ""
    """sizes for a CPU or for GPUs, or a tiny model to try the recipe"""
    DATA: Maybe[Data] = None
    """folder with your text, or with the archives or their contents, instead of a download"""
    RUNS: Folder = "runs"
    """folder in which everything is written"""
    PRECISION: Literal["", "fp16", "me-fp16", "amp", "bf16", "fp32"] = ""
    """me-fp16 is memory-efficient; V100s have no bf16"""
    WHERE: Folder = "here"
    """slurm: jobs of a cluster, by slurm.yaml; FILE.yaml: by that file"""

    @property
    def on_cluster(self) -> bool:
        return self.WHERE != "here"


class Settings(Common):
    """Settings of a recipe that trains one model."""

    METHOD: Literal[("", *MODEL_SCHEMES)] = ""  # type: ignore[valid-type]
    """scheme of the residual branches: --admin-scheme"""
    INIT: Maybe[Rule] = None
    """rule by which Admin sets omega: --admin-init"""
    LAYERS: Maybe[Annotated[str, BeforeValidator(str)]] = None
    """layers of each stack; 60-12 are 60 of the encoder and 12 of the decoder"""
    SEED: Maybe[NonNegativeInt] = None
    """seed of the weights, the batches and dropout: --seed"""
    PREPROCESS_ARGS: str = ""
    """options of fairseq-preprocess"""
    AVERAGE_ARGS: str = ""
    """options of fairseq-admin average: --last 5"""
    PAIR: Maybe[Annotated[str, AfterValidator(lambda pair: _pair(pair))]] = None
    """source and target language, as in de-en"""
    GPUS: Maybe[PositiveInt] = None
    """GPUs of a machine; by default all that are visible, or one on a cluster"""
    NODES: str = "1"
    """number of machines; without Slurm 0/2 on the first of two, 1/2 on the second, both with MASTER"""
    MASTER: str = ""
    """HOST:PORT of the first machine; Slurm's jobs set it"""

    @property
    def nodes(self) -> int:
        return int(self.NODES.rpartition("/")[2])

    @property
    def node(self) -> int:
        """The number of this machine, from 0."""
        given, slash, _ = self.NODES.partition("/")
        return int(given) if slash else int(os.environ.get("SLURM_NODEID", 0)) if self.nodes > 1 else 0

    @model_validator(mode="after")
    def _goes_together(self) -> Settings:
        if self.LAYERS and not re.match(Depth, self.LAYERS):
            raise ValueError(f"LAYERS={self.LAYERS} is invalid: expected a number, or two as in 60-12.")
        if not re.fullmatch(r"(\d+/)?[1-9]\d*", self.NODES) or self.node >= self.nodes:
            raise ValueError(
                f"NODES={self.NODES} is invalid: expected a number, or as 1/2 on the second of two machines."
            )
        host, _, port = self.MASTER.rpartition(":")
        if self.nodes > 1 and not self.on_cluster and not (host and port.isdecimal()):
            raise ValueError(
                f"NODES={self.NODES} needs MASTER=HOST:PORT, where the first node is reached; found "
                f"MASTER={self.MASTER}."
            )
        return self


def _pair(pair: str) -> str:
    source, _, target = pair.partition("-")
    if not re.fullmatch(r"\w+-\w+", pair):
        raise ValueError("two codes, as in de-en")
    if source == target:
        raise ValueError(
            "two codes, since each names the file of a side. Call one otherwise, as in en-en_simple: the tokeniser "
            "treats a code it does not know as English"
        )
    return pair


def collect(target: str, words: list[str], known: Collection[str], after: Sequence[str] = ()) -> dict[str, str]:
    """The user's values for the settings of a target, from the command line and the environment.

    make puts the values of its command line into the environment, and their names into MAKEFLAGS.

    Args:
        words: NAME=VALUE.
        known: the settings of the target.
        after: options of fairseq-train; they join ARGS.

    Raises:
        ValueError: a word is not NAME=VALUE, or is no setting of the target; or `after` does not begin with an option.
    """
    if wrong := next((word for word in words if not re.match(r"[A-Z]\w*=", word)), None):
        raise ValueError(f"{wrong}: expected NAME=VALUE, a setting of {target}. See make help TARGET={target}.")
    if after and not after[0].startswith("--"):
        raise ValueError(f"{after[0]} after --: expected an option of fairseq-train, as in -- --dropout 0.2.")
    _, _, on_make = os.environ.get("MAKEFLAGS", "").partition("-- ")
    on_line = {word.partition("=")[0] for word in re.split(r"(?<!\\)\s+", on_make) if "=" in word} - MAKEFILE_VARIABLES
    values = {name: os.environ[name] for name in [*known, *on_line] if name in os.environ}
    given = dict(word.split("=", 1) for word in words)
    if inherited := [f"{name}={value}" for name, value in values.items() if name not in {*on_line, *given}]:
        log.info("From the environment: %s.", " ".join(inherited))
    values |= given
    if after:
        values["ARGS"] = f"{values.get('ARGS', '')} {shlex.join(after)}".strip()
    os.environ.update({name: values.pop(name) for name in ENVIRONMENT if name in values})
    for name, value in values.items():
        if name not in known:
            raise ValueError(unknown(target, name, value, known))
    return values


def unknown(target: str, name: str, value: str, known: Collection[str]) -> str:
    """The message about a setting that the target does not have."""
    if advice := old_names().get(name):
        return f"{name}={value} is now written {advice.format(value)}."
    near = difflib.get_close_matches(name, known, 1)
    like = f" {near[0]} is one." if near else ""
    return f"{name}={value} is not a setting of {target}.{like} See make help TARGET={target}."


def exported(threads: int | None) -> dict[str, str]:
    """The environment variables of a recipe's processes, where the user's environment has none.

    A waiting thread spins for a moment, as long as most waits last, and then sleeps. Threads that only spin are many
    times slower on a busy machine; threads that only sleep are slower on an idle one. Memory in pages of 2 MB makes a
    small model's update faster on a CPU, and a large model's no slower. Warnings of fairseq and its libraries about one
    another are hidden, since the user cannot fix them.
    """
    variables = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONWARNINGS": "ignore"}
    variables |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    variables |= {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    variables |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {name: value for name, value in variables.items() if name not in os.environ}


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
        expected = f"expected {message}" if fault["type"] == "value_error" else message[0].lower() + message[1:]
        value = values.get(name, fault["input"])
        raise ValueError(f"{name}={value} is invalid: {expected}{f' ({meaning})' if meaning else ''}.") from None


def described(model: type[BaseModel], names: Collection[str], values: dict[str, Any]) -> Iterator[str]:
    """A line for each of the named fields: name, value (or else the default), meaning, choices."""
    schemas = model.model_json_schema()["properties"]
    for name in names:
        schema = schemas[name]
        value = values.get(name, schema.get("default"))
        shown = "" if value in (None, "", [], {}) else f"={' '.join(map(str, value)) if type(value) is list else value}"
        choices = " ".join(schema.get("enum") or schema.get("items", {}).get("enum") or ()).strip()
        meaning = filter(None, [" ".join(schema.get("description", "").split()), choices])
        yield f"{name}{shown}: {'; one of: '.join(meaning)}"
