"""The settings of the recipes: names, types, meanings, errors and help, and checks that their values fit together.

This module has the settings of every target, and of recipes that train one model; kinds.py adds those of each kind. A
recipe's YAML file has only the values that differ from the defaults. A user's NAME=VALUE overrides the preset's value,
which overrides the recipe's.

An alias is a second name of a setting: an option of fairseq-train, or the setting's name in earlier versions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from fairseq_admin.method.schemes import MODEL_SCHEMES, RULES, SCHEMES

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


def _folder(path: str) -> str:
    if path.startswith("-") or not path or set(path) & set(":,\n"):
        raise ValueError("a path without a colon or a comma, where fairseq divides paths, that does not begin with -")
    return path


def _there(path: str) -> str:
    if not Path(path).is_dir():
        raise ValueError("a folder that is there; no folder has that name. Check the path")
    return path


Maybe = Annotated[T | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty text means None."""
Options = Annotated[
    tuple[T, ...], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)
]
"""Several values, divided as a shell divides words."""
Share = Annotated[float, Field(ge=0, lt=1)]
Folder = Annotated[str, AfterValidator(_folder)]
Data = Annotated[Folder, AfterValidator(_there)]
Pair = Annotated[str, Field(pattern=r"^\w+-\w+$")]
Scheme: TypeAlias = Literal[MODEL_SCHEMES]  # type: ignore[valid-type]
Rule: TypeAlias = Literal[RULES]  # type: ignore[valid-type]
Tokenising = Literal["lowercase", "normalise", "aggressive_dashes", "escape", "perl"]


class Machine(BaseModel):
    """Settings of every target: the folder that it writes to, and the environment of its processes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True,
        populate_by_name=True, loc_by_alias=False,
    )  # fmt: skip

    RUNS: Folder = "runs"
    """folder in which everything is written"""
    OMP_NUM_THREADS: Maybe[PositiveInt] = None
    """threads of a process on a CPU"""
    OMP_WAIT_POLICY: str | None = None
    """how threads wait for one another: by default they spin for a moment, then sleep"""
    GOMP_SPINCOUNT: str | None = None
    """how long they spin"""
    GLIBC_TUNABLES: str = "glibc.malloc.hugetlb=1"
    """memory in pages of 2 MB, on Linux with glibc 2.35 or newer"""
    CUDA_VISIBLE_DEVICES: str | None = None
    """GPUs that may be used"""

    def exported(self) -> dict[str, str]:
        """The environment variables of a recipe's processes.

        A waiting thread spins for a moment, as long as most waits last, and then sleeps. Threads that only spin are
        many times slower on a busy machine; threads that only sleep are slower on an idle one. Memory in pages of 2 MB
        makes a small model's update faster on a CPU, and a large model's no slower. Warnings of fairseq and its
        libraries about one another are hidden, since the user cannot fix them.
        """
        spinning = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"} if self.OMP_WAIT_POLICY is None else {}
        always = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONWARNINGS": "ignore"}
        chosen = self.model_dump(include={*Machine.model_fields} - {"RUNS"}, exclude_none=True)
        return {**always, **spinning, **{name: str(value) for name, value in chosen.items()}}


class Settings(Machine):
    """Settings of every recipe and grid."""

    PRESET: str = ""
    """sizes for a CPU or for GPUs, or a text with sizes for it"""
    FFN_INIT: Literal["xavier", "stock"] = Field("xavier", alias="--admin-ffn-init")
    """feed-forward weights of every scheme: as in the fairseq of the papers, or as in today's"""
    WIDTH: PositiveInt = 64
    """width of the model"""
    HEADS: PositiveInt = 4
    """attention heads; WIDTH is a multiple of them"""
    UPDATES: PositiveInt = Field(1000, alias="--max-update")
    """length of a run in updates"""
    SAVE_EVERY: PositiveInt = Field(50, alias="--save-interval-updates")
    """updates from one checkpoint and validation to the next"""
    LOG_EVERY: PositiveInt = Field(10, alias="--log-interval")
    """updates from one line of progress to the next"""
    PRECISION: Literal["", "fp16", "me-fp16", "amp", "bf16", "fp32"] = ""
    """me-fp16 is memory-efficient; V100s have no bf16"""
    TRAIN_ARGS: Options[str] = ()
    """more options for fairseq-train, after the recipe's own"""
    WHERE: Literal["here", "slurm"] = "here"
    """on this machine, or as jobs of a Slurm cluster"""
    SLURM: Folder = "slurm.yaml"
    """file with the cluster's settings: partition, account, ..."""
    WATCH: bool = False
    """wait for the cluster's jobs, and print their states"""

    @model_validator(mode="after")
    def _goes_together(self) -> Settings:
        if self.WIDTH % self.HEADS:
            raise ValueError(f"WIDTH={self.WIDTH} is not a multiple of HEADS={self.HEADS}. Give another of them.")
        return self


class Training(Settings):
    """Settings of a recipe that trains one model."""

    METHOD: Scheme = Field("admin", alias="--admin-scheme")
    """scheme of the residual branches"""
    INIT: Rule = Field("reference", alias="--admin-init")
    """rule by which Admin sets omega; other schemes have none"""
    SEED: NonNegativeInt = Field(1, alias="--seed")
    """seed of the weights, the batches and dropout"""
    ANALYSES: Options[Literal["dependency", "output-change"]] = ("dependency", "output-change")
    """parts of the papers' analysis in the report"""

    EPOCHS: Maybe[PositiveInt] = Field(None, alias="--max-epoch")
    """length of a run in epochs, instead of UPDATES, with a checkpoint at the end of each"""
    AVERAGE: PositiveInt = 5
    """number of last checkpoints to average"""

    MERGES: PositiveInt = 1000
    """merges of byte-pair encoding"""
    FFN: PositiveInt = 128
    """width of the feed-forward sub-layers"""
    DROPOUT: Share = Field(0.0, alias="--dropout")
    """dropout of the model"""
    LR: NonNegativeFloat = Field(0.001, alias="--lr")
    """peak learning rate"""
    WARMUP: NonNegativeInt = Field(400, alias="--warmup-updates")
    """updates of warm-up"""

    DEVICE: Literal["cpu", "gpu"] = "cpu"
    """device to train on"""
    TOKENS: Maybe[PositiveInt] = None
    """tokens of an update, over all devices"""
    DEVICE_TOKENS: PositiveInt = 4096
    """tokens of the papers' batch on one device"""
    BY_MEMORY: dict[int, PositiveInt] = {}
    """tokens of a batch by the GB of a GPU"""
    MAX_TOKENS: Maybe[PositiveInt] = Field(None, alias="--max-tokens")
    """largest number of tokens in a batch on one device"""
    UPDATE_FREQ: PositiveInt = Field(1, alias="--update-freq")
    """batches of an update on each device, if TOKENS is not set"""
    GPUS: Maybe[PositiveInt] = None
    """GPUs of a machine; by default all that are visible, or one on a cluster"""
    MEMORY: Maybe[PositiveFloat] = None
    """GB of a GPU, instead of nvidia-smi's number"""
    NODES: PositiveInt = 1
    """number of machines; each runs the same command"""
    NODE_RANK: Maybe[NonNegativeInt] = Field(None, alias="NODE")
    """number of this machine, from 0; Slurm sets it"""
    MASTER: str = ""
    """HOST:PORT of the first machine; WHERE=slurm sets it"""
    PRICE: Maybe[NonNegativeFloat] = None
    """price of a device per hour, for preflight"""

    @model_validator(mode="after")
    def _trains(self) -> Training:
        updates, every, average = self.UPDATES, self.SAVE_EVERY, self.AVERAGE
        if self.EPOCHS and average > self.EPOCHS:
            raise ValueError(
                f"EPOCHS={self.EPOCHS} make fewer checkpoints than AVERAGE={average} averages. Give "
                f"AVERAGE={self.EPOCHS}, or train longer, as with EPOCHS={average}."
            )
        if not self.EPOCHS and (updates % every or updates // every < average):
            count = min(average, updates)
            fitting = next(size for size in range(min(every, updates // count), 0, -1) if updates % size == 0)
            longer = every * max(average, -(-updates // every))
            raise ValueError(
                f"UPDATES={updates} SAVE_EVERY={every} AVERAGE={average}: expected a multiple of SAVE_EVERY, with "
                f"AVERAGE checkpoints or more. Give SAVE_EVERY={fitting} AVERAGE={count}, or UPDATES={longer}."
            )
        host, _, port = self.MASTER.rpartition(":")
        if self.NODES > 1 and self.WHERE == "here" and not (host and port.isdecimal()):
            raise ValueError(
                f"NODES={self.NODES} needs MASTER=HOST:PORT, where the first node is reached; found "
                f"MASTER={self.MASTER}."
            )
        if (self.NODE_RANK or 0) >= self.NODES:
            expected = f"a number from 0 to {self.NODES - 1}"
            raise ValueError(f"NODE_RANK={self.NODE_RANK} is not one of NODES={self.NODES}; expected {expected}.")
        return self

    @property
    def rule(self) -> str:
        """The rule that sets omega; empty for a scheme without omega."""
        return self.INIT if SCHEMES[self.METHOD].omega else ""


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
