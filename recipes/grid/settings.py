"""The settings of the grids of runs: what each is called, may be and means. A grid's YAML has what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from recipes.jobs import Resources
from recipes.recipe import described
from recipes.settings import Folder, Options, Settings
from recipes.steps.plugin import EVERY, SCHEMES

HERE = Path(__file__).parent


def _is_number(text: str, below: float = math.inf) -> bool:
    try:
        return 0 <= float(text) < below
    except ValueError:
        return False


def _number(text: str) -> str:
    if not _is_number(text):
        raise ValueError("a number of 0 or more, as 0.001 or 1e-3")
    return text


def _share(text: str) -> str:
    if not _is_number(text, below=1):
        raise ValueError("a number of 0 or more and below 1, as 0.1")
    return text


def _words(value: Any) -> Any:
    return value if isinstance(value, tuple) else tuple(str(value).split())


def _each(check: Callable[[str], bool], what: str) -> AfterValidator:
    """Several words, each of which passes, none twice."""

    def checked(values: tuple[str, ...]) -> tuple[str, ...]:
        if not values or not all(map(check, values)) or len({*values}) < len(values):
            raise ValueError(f"{what}, one or more, with spaces between and none twice")
        return values

    return AfterValidator(checked)


def _is_count(text: str, least: int) -> bool:
    return text.isdecimal() and str(int(text)) == text and int(text) >= least


NEW_LAYERS = [name for name in EVERY if not name.startswith("t-fixup")]
Number = Annotated[str, BeforeValidator(str), AfterValidator(_number)]
"""As it was given: it is part of the names of folders, and what a folder is held to."""
Share = Annotated[str, BeforeValidator(str), AfterValidator(_share)]
Rates = Annotated[tuple[str, ...], BeforeValidator(_words), _each(_is_number, "numbers of 0 or more, as 1e-3")]
Shares = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(lambda text: _is_number(text, 1), "numbers below 1, as 0.98")
]
Seeds = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(lambda text: _is_count(text, 0), "whole numbers of 0 or more")
]
Depths = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(lambda text: _is_count(text, 1), "whole numbers above 0")
]
Schemes = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(SCHEMES.__contains__, f"some of {' '.join(SCHEMES)}")
]
NewLayers = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(NEW_LAYERS.__contains__, f"some of {' '.join(NEW_LAYERS)}")
]
Optimizers = Annotated[
    tuple[str, ...], BeforeValidator(_words), _each(lambda name: name in ("adam", "sgd"), "some of adam sgd")
]


class Grid(Settings):
    """Of every grid."""

    PRESET: str = ""
    """a text, and sizes for it"""
    SEEDS: Seeds = ("1",)
    """of the weights, the batches and dropout"""
    FFN_INIT: Literal["xavier", "stock"] = "xavier"
    """feed-forward weights of every scheme: as in the fairseq of the papers, or as in today's"""
    WIDTH: PositiveInt = 128
    """of the model"""
    HEADS: PositiveInt = 4
    """of attention; WIDTH is a multiple of them"""
    UPDATES: PositiveInt
    """how long a run is"""
    SAVE_EVERY: PositiveInt = 100
    """updates from one checkpoint and validation to the next"""
    WORDS: PositiveInt = 100
    """of a generated language"""
    DATA: Folder | None = None
    """a folder with a text, in place of the one that the grid makes or fetches"""
    PRECISION: Literal["", "fp16", "me-fp16", "amp", "bf16", "fp32"] = ""
    """me-fp16 is memory-efficient; V100s have no bf16"""
    TRAIN_ARGS: Options = ()
    """more options for fairseq-train, after the grid's own"""
    JOBS: PositiveInt = 1
    """runs at a time, each on a GPU of its own where there are any"""
    WHERE: Literal["here", "slurm"] = "here"
    """on this machine, or as jobs of a Slurm cluster"""
    SLURM: Folder = "slurm.yaml"
    """what the cluster wants to be told: partition, account"""

    @model_validator(mode="after")
    def _goes_together(self) -> Grid:
        if self.WIDTH % self.HEADS:
            raise ValueError(f"WIDTH={self.WIDTH} is not a multiple of HEADS={self.HEADS}. Give another of them.")
        for name in ("UPDATES", "LEG", "SHORT"):
            updates = getattr(self, name, None) or self.SAVE_EVERY
            if updates % self.SAVE_EVERY:
                raise ValueError(
                    f"{name}={updates} is not a multiple of SAVE_EVERY={self.SAVE_EVERY}; its last update must be "
                    "validated. Give another of them."
                )
        return self


class Translation(Grid):
    """Of a grid that trains models to translate."""

    SCHEMES: Schemes = tuple(SCHEMES)
    """of the residual branches"""
    FFN: PositiveInt = 256
    """width of the feed-forward sub-layers"""
    DROPOUT: Share = "0.0"
    CLIP_NORM: Number = "0.0"
    """norm of the gradients, 0 for any"""
    MAX_TOKENS: PositiveInt = 192
    """of a batch"""
    LEG: PositiveInt | None = None
    """a run ends early after so many updates without a better validation"""
    LOG_EVERY: PositiveInt = 10
    """updates from one line of the log to the next"""
    BEAM: PositiveInt = 5
    """hypotheses of a search"""
    PAIRS: PositiveInt = 20000
    """sentence pairs of the generated text"""
    VALID_PAIRS: PositiveInt = 1000
    """of it, to validate on"""
    TEST_PAIRS: PositiveInt = 1000
    """of it, to test on"""
    URL: str = ""
    """of Multi30k, as make multi30k takes it"""
    SUMS: str = ""
    """of Multi30k, as make multi30k takes it"""
    MERGES: PositiveInt | None = None
    """of Multi30k, as make multi30k takes it"""
    PROTOCOL: str = ""
    """a page that was committed before the runs; each row then names its commit"""


class Compare(Translation):
    DEPTHS: Depths = ("18",)
    """layers of the encoder, and as many of the decoder"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates"""
    WARMUP: NonNegativeInt = 100
    """updates of warm-up"""
    TIED: Literal["yes", "no"] = "yes"
    """whether all embeddings are one"""
    SEARCH: Literal["every", "first", "short"] = "every"
    """seeds that every rate is run with: every one; the first, and then the others at the best rate; or the first in
    runs of SHORT updates, and then all at the best rate"""
    SHORT: PositiveInt = 1000
    """updates of the runs that SEARCH=short tries the rates in"""


class Sensitivity(Translation):
    LAYERS: PositiveInt = 6
    """of each stack"""
    LRS: Rates = ("1e-4", "2e-4", "3e-4", "4e-4", "5e-4")
    """peak learning rates"""
    BETA2S: Shares = ("0.99", "0.995", "0.999")
    """of RAdam"""


class Warmup(Translation):
    LAYERS: PositiveInt = 6
    """of each stack"""
    OPTIMIZERS: Optimizers = ("adam", "sgd")
    WARMUPS: Seeds = ("0", "100", "400")
    """updates of warm-up"""
    ADAM_LRS: Rates = ("5e-4", "1e-3", "2e-3")
    """peak learning rates of Adam, which moves by about the rate"""
    SGD_LRS: Rates = ("1e-2", "1e-1", "1")
    """peak learning rates of SGD, which moves by the gradient itself"""


class Deeper(Grid):
    SCHEMES: NewLayers
    """of the new layers; a head without any is always among the runs"""
    DEPTHS: Depths = ("2", "8", "24")
    """new layers"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates: the first seed is run with every one, the others at the best"""
    WARMUP: NonNegativeInt = 50
    """updates of warm-up, in every scheme but dt-fixup, which has none"""
    FACTOR: Number = "0.1"
    """the encoder's rate by the new layers'; 0: it is frozen"""
    DROPOUT: Share = "0"
    """of the encoder, while the task is learnt"""
    PRETRAIN: PositiveInt = 40000
    """pairs to pre-train the encoder on"""
    EXAMPLES: PositiveInt = 4000
    """pairs to train the classifiers on"""
    HELD_OUT: PositiveInt = 1000
    """pairs to validate on, and as many to test on"""
    PAIR: str = "de-en"
    """the languages of the text in DATA"""
    ENCODER_LAYERS: PositiveInt = 4
    """of the pre-trained encoder"""
    ENCODER_UPDATES: PositiveInt = 5000
    """how long it is pre-trained"""
    ENCODER_SAVE_EVERY: PositiveInt = 500
    """updates from one of its checkpoints to the next"""


KINDS: dict[str, type[Grid]] = {"compare": Compare, "sensitivity": Sensitivity, "warmup": Warmup, "deeper": Deeper}


class Needs(BaseModel):
    """What a run needs of a cluster."""

    model_config = ConfigDict(extra="forbid")

    hours: float
    memory: float


class File(BaseModel):
    """What a grid's YAML holds."""

    model_config = ConfigDict(extra="forbid")

    about: str
    needs: Needs
    settings: dict[str, Any] = {}
    presets: dict[str, dict[str, Any]]
    quick: dict[str, Any] = {}
    """sizes with which it takes a few minutes: does it work here?"""

    def resources(self, gpus: int) -> Resources:
        return Resources(gpus=gpus, hours=self.needs.hours, memory=self.needs.memory)


def load(target: str) -> File:
    return File.model_validate(yaml.safe_load((HERE / f"{target}.yaml").read_text(encoding="utf-8")))


def names(target: str) -> list[str]:
    """The settings that a user may give for a target."""
    return [*KINDS[target].model_fields, *(["QUICK"] if load(target).quick else [])]


def help_lines(target: str) -> list[str]:
    """Every setting of a grid: its name, its value here, what it may be, what it means."""
    file = load(target)
    lines = [f"make {target}: {file.about}", f"presets: {' '.join(file.presets)}", ""]
    lines += ["QUICK: anything, for a few minutes with small sizes"] if file.quick else []
    values = {**file.settings, **next(iter(file.presets.values()))}
    return [*lines, *described(KINDS[target], list(KINDS[target].model_fields), values)]
