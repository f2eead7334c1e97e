"""The settings of the recipes: names, types, meanings, and checks that their values fit together.

KINDS has the kinds of recipes and grids, by the names that YAML files use. A recipe's YAML file has only the values
that differ from the defaults. A user's NAME=VALUE overrides the preset's value, which overrides the recipe's. A grid's
learning rates stay as the user wrote them, because they are parts of folder names.

An alias is a second name of a setting: an option of fairseq-train, or the setting's name in earlier versions.
"""

from __future__ import annotations

import math
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar

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

from fairseq_admin.method.schemes import MODEL_SCHEMES, RULES, SCHEMES, is_number

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
"""An empty text means None."""
Options = Annotated[
    tuple[T, ...], BeforeValidator(lambda value: value if isinstance(value, tuple) else shlex.split(str(value)))
]
"""Several values, divided as a shell divides words, or a single number in a YAML file."""
Share = Annotated[float, Field(ge=0, lt=1)]
Folder = Annotated[str, AfterValidator(_folder)]
Data = Annotated[Folder, AfterValidator(_there)]
Pair = Annotated[str, Field(pattern=r"^\w+-\w+$")]
Scheme: TypeAlias = Literal[MODEL_SCHEMES]  # type: ignore[valid-type]


def _rule(text: str) -> str:
    if text in RULES or is_number(text):
        return text
    raise ValueError(f"one of {', '.join(RULES)}, or a number above 0")


Rule = Annotated[str, AfterValidator(_rule)]
Tokenising = Literal["lowercase", "normalise", "aggressive_dashes", "escape", "perl"]
NewLayers: TypeAlias = Literal[tuple(name for name in SCHEMES if name[:2] != "t-")]  # type: ignore[valid-type]


def _below(limit: float, expected: str) -> AfterValidator:
    """Check that a text is a number of at least 0 and less than the limit."""

    def number(text: str) -> str:
        with suppress(ValueError):
            if 0 <= float(text) < limit:
                return text
        raise ValueError(f"{expected}, one or more, with spaces between and none twice")

    return AfterValidator(number)


def _once(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values or len({*values}) < len(values):
        raise ValueError("one or more, with spaces between and none twice")
    return values


Several = Annotated[Options[T], AfterValidator(_once)]
"""Different values, at least one."""
Rates = Several[Annotated[str, _below(math.inf, "numbers of 0 or more, as 1e-3")]]
Depth = Annotated[str, BeforeValidator(str), Field(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$")]
"""Layers of each stack, or ENCODER-DECODER."""


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

    fixed_options: ClassVar = {"--save-dir", "--arch", "--user-dir"}
    """options of fairseq-train that the recipe sets itself"""

    @model_validator(mode="after")
    def _goes_together(self) -> Settings:
        if fixed := self.fixed_options.intersection(word.partition("=")[0] for word in self.TRAIN_ARGS):
            raise ValueError(f"{min(fixed)} among the options of fairseq-train: the recipe sets it. Leave it out.")
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
        if self.TOKENS and "UPDATE_FREQ" in self.model_fields_set:
            raise ValueError(f"UPDATE_FREQ={self.UPDATE_FREQ} has no effect with TOKENS={self.TOKENS}; change TOKENS=.")
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


# -- recipes of one model -----------------------------------------------------------------------------------------


class Translation(Training):
    """Settings of a recipe that trains a model to translate."""

    PAIR: Pair = "de-en"
    """source and target language"""
    DATA: Data | None = None
    """folder with the archives or their contents, instead of a download"""
    TABLE: Folder = "recipes/archives.tsv"
    """sizes, checksums and addresses of archives"""
    INVALID: Literal["refuse", "replace"] = "refuse"
    """bytes that are not UTF-8: refuse them, or replace them with U+FFFD"""
    TOKENISER: Options[Tokenising] = ()
    """options of tokenising"""
    CLEAN: Options[str] = ("--drop-empty",)
    """rule that keeps or drops training pairs, by their words"""
    CLEAN_BPE: Options[str] = ()
    """rule that keeps or drops training and validation pairs, by their BPE tokens"""
    VALID_EVERY: PositiveInt = 23
    """every VALID_EVERY-th pair goes to the validation set, if it shares a text with the training set"""
    TOO_LONG: Literal["refuse", "skip"] = "refuse"
    """lines of the validation and test sets that are too long for the model"""
    EXPECT: Options[str] = ()
    """expected numbers of pairs of train, valid and test"""
    BLOBS: dict[str, str] = {}
    """git's blob ids of published files"""

    LAYERS: Depth = "18"
    """layers of each stack; 60-12 are 60 of the encoder and 12 of the decoder"""
    BEAM: PositiveInt = 5
    """hypotheses of the search"""
    LENPEN: NonNegativeFloat = 1.0
    """length penalty of the search"""
    GENERATE_ARGS: Options[str] = ()
    """more options for fairseq-generate"""
    COMPOUNDS: bool = False
    """report BLEU of split compounds, too"""

    @model_validator(mode="after")
    def _two_languages(self) -> Translation:
        source, target = self.PAIR.split("-")
        if source == target:
            raise ValueError(
                f"PAIR={self.PAIR} names one language twice, and so one file for both sides; expected two codes. Call "
                "one side otherwise, as in PAIR=en-en_simple: the tokeniser treats a code it does not know as English."
            )
        return self


class Demo(Translation):
    PAIRS: int = Field(30000, ge=100)
    """sentence pairs of the whole corpus; of 30,000, 500 validate and 1,000 test"""


class Multi30k(Translation):
    PAIR: Literal["de-en", "en-de", "de-fr", "fr-de", "en-fr", "fr-en"] = "de-en"
    """source and target language"""
    SUMS: Folder = "recipes/multi30k/SHA256SUMS"
    """SHA-256 of the published texts"""


class Own(Translation):
    DATA: Data
    """the folder with train.de and train.en (or .gz), and valid and test likewise"""
    PAIR: Pair
    """source and target language, as in de-en"""
    CORPUS: str = Field(default_factory=lambda values: Path(os.path.abspath(values["DATA"])).name, pattern="^[^/:,]*$")
    """a name for the text, instead of its folder's name"""


class LanguageModel(Training):
    LAYERS: PositiveInt = 18
    """layers of the decoder"""
    LIBRARY: Folder | None = None
    """folder of the standard library whose documentation is the text; by default that of this Python"""
    CONTEXT: PositiveInt = 128
    """tokens of the model's context"""


# -- grids of runs ------------------------------------------------------------------------------------------------


class Grid(Settings):
    """Settings of every grid."""

    fixed_options: ClassVar = Settings.fixed_options | {
        "--lr", "--seed", "--admin-scheme", "--admin-init", "--more-scheme", "--more-layers"
    }  # fmt: skip

    SEEDS: Several[NonNegativeInt] = (1,)
    """seeds of the weights, the batches and dropout"""
    WORDS: PositiveInt = 100
    """words of the generated language"""
    DATA: Data | None = None
    """folder with a text, instead of a generated or downloaded one"""
    DROPOUT: Share = 0.0
    """dropout of the models"""
    JOBS: PositiveInt = 1
    """runs at a time, each on a GPU of its own where there are any"""
    SEARCH: Literal["every", "first"] = "every"
    """which seeds try every rate: every seed; or the first, and the other seeds run at the best rate only"""

    @model_validator(mode="after")
    def _ends_with_a_checkpoint(self) -> Grid:
        for name in ("UPDATES", "PATIENCE"):
            updates = getattr(self, name, None) or 0
            if updates % self.SAVE_EVERY:
                multiple = max(1, updates // self.SAVE_EVERY) * self.SAVE_EVERY
                raise ValueError(
                    f"{name}={updates} is not a multiple of SAVE_EVERY={self.SAVE_EVERY}, so the last updates would be "
                    f"in no checkpoint. Give {name}={multiple}, or another SAVE_EVERY."
                )
        return self


class Translations(Grid):
    """Settings of a grid that trains models to translate."""

    SCHEMES: Several[Scheme] = MODEL_SCHEMES
    """schemes of the residual branches"""
    FFN: PositiveInt = 256
    """width of the feed-forward sub-layers"""
    CLIP_NORM: NonNegativeFloat = 0.0
    """largest norm of the gradients; 0: no limit"""
    MAX_TOKENS: PositiveInt = 192
    """tokens of a batch"""
    PATIENCE: Maybe[PositiveInt] = Field(None, alias="LEG")
    """a run ends early after so many updates without a better validation"""
    BEAM: PositiveInt = 5
    """hypotheses of the search"""
    PAIRS: PositiveInt = 20000
    """sentence pairs of the generated text"""
    VALID_PAIRS: PositiveInt = 1000
    """sentence pairs of the generated text to validate on"""
    TEST_PAIRS: PositiveInt = 1000
    """sentence pairs of the generated text to test on"""
    SUMS: str = ""
    """with PRESET=multi30k, as for make multi30k"""
    MERGES: Maybe[PositiveInt] = None
    """with PRESET=multi30k, as for make multi30k"""
    PROTOCOL: str = ""
    """page that was committed before the runs; each row names its commit"""


class Compare(Translations):
    DEPTHS: Several[Depth] = ("18",)
    """layers of each stack; 60-12 are 60 of the encoder and 12 of the decoder"""
    INIT: Rule = "reference"
    """rule by which Admin sets omega; other schemes have none"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates"""
    WARMUP: NonNegativeInt = 100
    """updates of warm-up"""


class Sensitivity(Translations):
    LAYERS: PositiveInt = 6
    """layers of each stack"""
    LRS: Rates = ("1e-4", "2e-4", "3e-4", "4e-4", "5e-4")
    """peak learning rates"""
    BETA2S: Several[Annotated[str, _below(1, "numbers below 1, as 0.98")]] = ("0.99", "0.995", "0.999")
    """beta2 of RAdam"""


class Warmup(Translations):
    LAYERS: PositiveInt = 6
    """layers of each stack"""
    OPTIMIZERS: Several[Literal["adam", "sgd"]] = ("adam", "sgd")
    """optimizers"""
    WARMUPS: Several[NonNegativeInt] = (0, 100, 400)
    """updates of warm-up"""
    ADAM_LRS: Rates = ("5e-4", "1e-3", "2e-3")
    """peak learning rates of Adam, whose steps are about as large as the rate"""
    SGD_LRS: Rates = ("1e-2", "1e-1", "1")
    """peak learning rates of SGD, whose steps are the rate times the gradient"""


class Deeper(Grid):
    SCHEMES: Several[NewLayers] = ("dt-fixup", "admin", "post-ln", "pre-ln", "deepnorm", "rezero")
    """schemes of the new layers; the grid always has a run without new layers, too"""
    DEPTHS: Several[PositiveInt] = (2, 8, 24)
    """new layers"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates: the first seed tries each, the other seeds run at the best"""
    WARMUP: NonNegativeInt = 50
    """updates of warm-up; dt-fixup has none"""
    ENCODER_LR_FACTOR: NonNegativeFloat = Field(0.1, alias="FACTOR")
    """the encoder's learning rate, divided by that of the new layers; 0: the encoder is frozen"""
    PRETRAIN: PositiveInt = 40000
    """pairs to pre-train the encoder on"""
    EXAMPLES: PositiveInt = 4000
    """pairs to train the classifiers on"""
    HELD_OUT: PositiveInt = 1000
    """pairs to validate on, and as many to test on"""
    PAIR: Pair = "de-en"
    """the languages of the text in DATA"""
    ENCODER_LAYERS: PositiveInt = 4
    """layers of the pre-trained encoder"""
    ENCODER_UPDATES: PositiveInt = 5000
    """updates of the encoder's pre-training"""
    ENCODER_SAVE_EVERY: PositiveInt = 500
    """updates from one checkpoint of the encoder to the next"""


_ALL: list[type[Settings]] = [Demo, Multi30k, Own, Translation, LanguageModel, Compare, Sensitivity, Warmup, Deeper]
KINDS = {model.__name__: model for model in _ALL}
