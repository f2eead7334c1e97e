"""The settings of the recipes: what each is called, may be and means, and what goes with what. recipe.py reads them.

Here are those of every target and of training one model; kinds.py and grid/settings.py have what each kind adds. A
recipe's YAML has only what differs from the defaults. What a user gives as NAME=VALUE comes before a preset's value,
and that before the recipe's.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

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
    model_validator,
)

from fairseq_admin.method.schemes import MODEL_SCHEMES

T = TypeVar("T")


def _folder(path: str) -> str:
    if path.startswith("-") or not path or set(path) & set(":,\n"):
        raise ValueError("a path without a colon or a comma, where fairseq divides paths, that does not begin with -")
    return path


def _there(path: str) -> str:
    if not Path(path).is_dir():
        raise ValueError("a folder that is there; no folder has that name. Check the path")
    return path


Maybe = Annotated[T | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty one is none."""
Options = Annotated[
    tuple[T, ...], BeforeValidator(lambda value: shlex.split(value) if isinstance(value, str) else value)
]
"""Several, as a shell divides them."""
Share = Annotated[float, Field(ge=0, lt=1)]
Folder = Annotated[str, AfterValidator(_folder)]
Data = Annotated[Folder, AfterValidator(_there)]
Pair = Annotated[str, Field(pattern=r"^\w+-\w+$")]
if TYPE_CHECKING:
    Scheme = str
else:
    Scheme = Literal[MODEL_SCHEMES]
Tokenising = Literal["lowercase", "normalise", "aggressive_dashes", "escape", "perl"]


class Machine(BaseModel):
    """Of every target: where it writes, and what its processes are told by their environment."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )

    RUNS: Folder = "runs"
    """the folder in which everything is written"""
    OMP_NUM_THREADS: Maybe[PositiveInt] = None
    """threads of a process on a CPU"""
    OMP_WAIT_POLICY: str | None = None
    """what threads do that wait for one another: by default they spin for a moment, then sleep"""
    GOMP_SPINCOUNT: str | None = None
    """how long they spin"""
    GLIBC_TUNABLES: str | None = None
    """of memory; by default it comes in pages of 2 MB, where Linux has glibc 2.35 or newer"""
    CUDA_VISIBLE_DEVICES: str | None = None
    """the GPUs that may be used"""

    def exported(self) -> dict[str, str]:
        """The environment.

        Threads that wait for one another spin for a moment, as long as most waits are, and then sleep: those that only
        spin are many times slower on a machine that is busy, and those that only sleep slower on one that is not. With
        memory in pages of 2 MB a small model's update takes less time on a CPU, and a large one's no more. What
        fairseq and its libraries warn of about one another is nothing that the user can fix.
        """
        spinning = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"} if self.OMP_WAIT_POLICY is None else {}
        always = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", "PYTHONWARNINGS": "ignore"}
        values = {name: getattr(self, name) for name in Machine.model_fields if name != "RUNS"}
        chosen = {name: str(value) for name, value in values.items() if value is not None}
        return {**always, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **spinning, **chosen}


class Settings(Machine):
    """Of every recipe and grid."""

    PRESET: str = ""
    """sizes for a CPU or for GPUs, or a text and sizes for it"""
    FFN_INIT: Literal["xavier", "stock"] = "xavier"
    """feed-forward weights of every scheme: as in the fairseq of the papers, or as in today's"""
    WIDTH: PositiveInt = 64
    """of the model"""
    HEADS: PositiveInt = 4
    """of attention; WIDTH is a multiple of them"""
    UPDATES: PositiveInt = 1000
    """how long a run is"""
    SAVE_EVERY: PositiveInt = 50
    """updates from one checkpoint and validation to the next"""
    LOG_EVERY: PositiveInt = 10
    """updates from one line of progress to the next"""
    PRECISION: Literal["", "fp16", "me-fp16", "amp", "bf16", "fp32"] = ""
    """me-fp16 is memory-efficient; V100s have no bf16"""
    TRAIN_ARGS: Options[str] = ()
    """more options for fairseq-train, after the recipe's own"""
    WHERE: Literal["here", "slurm"] = "here"
    """on this machine, or as jobs of a Slurm cluster"""
    SLURM: Folder = "slurm.yaml"
    """what the cluster wants to be told: partition, account"""
    WATCH: bool = False
    """wait for the cluster's jobs, and say how they stand"""

    @model_validator(mode="after")
    def _goes_together(self) -> Settings:
        if self.WIDTH % self.HEADS:
            raise ValueError(f"WIDTH={self.WIDTH} is not a multiple of HEADS={self.HEADS}. Give another of them.")
        for name in ("UPDATES", "LEG", "SHORT") if not getattr(self, "EPOCHS", None) else ():
            updates = getattr(self, name, None) or self.SAVE_EVERY
            if updates % self.SAVE_EVERY:
                raise ValueError(
                    f"{name}={updates} is not a multiple of SAVE_EVERY={self.SAVE_EVERY}, so the last updates would be "
                    f"in no checkpoint. Give {name}={max(1, updates // self.SAVE_EVERY) * self.SAVE_EVERY}, or another "
                    "SAVE_EVERY."
                )
        return self


class Training(Settings):
    """Of a recipe that trains one model."""

    METHOD: Scheme = "admin"
    """the scheme of the residual branches"""
    SEED: NonNegativeInt = 1
    """of the weights, the batches and dropout"""
    WANDB: str = ""
    """a project of Weights & Biases to log to"""
    ANALYSES: Options[Literal["dependency", "output-change"]] = ("dependency", "output-change")
    """what of the papers' analysis the report shows"""

    EPOCHS: Maybe[PositiveInt] = None
    """how long a run is in epochs, in place of UPDATES, with a checkpoint at the end of each"""
    AVERAGE: PositiveInt = 5
    """how many of the last checkpoints are averaged"""

    MERGES: PositiveInt = 1000
    """merges of byte-pair encoding"""
    LAYERS: PositiveInt = 18
    """of each stack"""
    FFN: PositiveInt = 128
    """width of its feed-forward sub-layers"""
    DROPOUT: Share = 0.0
    LR: NonNegativeFloat = 0.001
    """the peak learning rate"""
    WARMUP: NonNegativeInt = 400
    """updates of warm-up"""
    CLIP_NORM: NonNegativeFloat = 1.0
    """norm of the gradients, 0 for any"""
    WEIGHT_DECAY: NonNegativeFloat = 0.0
    LABEL_SMOOTHING: Share = 0.1

    DEVICE: Literal["cpu", "gpu"] = "cpu"
    """what it trains on"""
    TOKENS: Maybe[PositiveInt] = None
    """of an update, on all devices together"""
    DEVICE_TOKENS: PositiveInt = 4096
    """tokens of the papers' batch on one device"""
    BY_MEMORY: dict[int, PositiveInt] = {}
    """tokens of a batch by the GB of a GPU"""
    MAX_TOKENS: Maybe[PositiveInt] = None
    """of a batch on one device"""
    UPDATE_FREQ: PositiveInt = 1
    """batches of an update on each device, where TOKENS does not say it"""
    GPUS: Maybe[PositiveInt] = None
    """of a machine; all that are visible, or one of a cluster's"""
    MEMORY: Maybe[PositiveFloat] = None
    """GB of a GPU, as nvidia-smi says"""
    NODES: PositiveInt = 1
    """machines, each of which runs the same command"""
    NODE: Maybe[NonNegativeInt] = None
    """the number of this one, from 0; SLURM sets it"""
    MASTER: str = ""
    """HOST:PORT, where the first of several machines is reached; WHERE=slurm sets it"""
    PRICE: Maybe[NonNegativeFloat] = None
    """of a device an hour, for preflight"""

    @model_validator(mode="after")
    def _trains(self) -> Training:
        checkpoints = self.EPOCHS or self.UPDATES // self.SAVE_EVERY
        if self.AVERAGE > checkpoints:
            of = f"EPOCHS={self.EPOCHS}" if self.EPOCHS else f"UPDATES={self.UPDATES} and SAVE_EVERY={self.SAVE_EVERY}"
            raise ValueError(
                f"AVERAGE={self.AVERAGE} is more than the {checkpoints} checkpoints of {of}. Give "
                f"AVERAGE={checkpoints}, or train longer."
            )
        host, _, port = self.MASTER.rpartition(":")
        if self.NODES > 1 and self.WHERE == "here" and not (host and port.isdecimal()):
            raise ValueError(
                f"NODES={self.NODES} needs MASTER=HOST:PORT, where the first node is reached; found "
                f"MASTER={self.MASTER}."
            )
        if (self.NODE or 0) >= self.NODES:
            expected = f"a number from 0 to {self.NODES - 1}"
            raise ValueError(f"NODE={self.NODE} is not one of NODES={self.NODES}; expected {expected}.")
        return self
