"""The settings of the recipes: what each is called, may be and means, and what goes with what.

A recipe's YAML has only what differs from the defaults here. What a user gives as NAME=VALUE comes before a preset's
value, and that before the recipe's.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from recipes.steps.plugin import SCHEMES

Share = Annotated[float, Field(ge=0, lt=1)]


def _split(value: Any) -> Any:
    return value.split() if isinstance(value, str) else value


def _words(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) else value


def _nothing(value: Any) -> Any:
    return None if value == "" else value


def _folder(path: str) -> str:
    if path.startswith("-") or not path or set(path) & set(":\n"):
        raise ValueError("a path without a colon, where fairseq divides paths, that does not begin with -")
    return path


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Several, with spaces between."""
Options = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""Options of a command, as a shell divides them."""
Folder = Annotated[str, AfterValidator(_folder)]
Table = dict[int, PositiveInt]


def _scheme(name: str) -> str:
    if name not in SCHEMES:
        raise ValueError(f"one of {' '.join(SCHEMES)}")
    return name


Method = Annotated[str, Field(json_schema_extra={"enum": list(SCHEMES)}), AfterValidator(_scheme)]
Tokenising = Literal["lowercase", "normalise", "aggressive_dashes", "escape", "perl"]
Analysis = Literal["dependency", "output-change"]


class Settings(BaseModel):
    """Of every recipe."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )

    RUNS: Folder = "runs"
    """the folder in which everything is written"""
    OMP_NUM_THREADS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
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
        """What the processes of a recipe are told by their environment.

        Threads that wait for one another spin for a moment, as long as most waits are, and then sleep: those that only
        spin are many times slower on a machine that is busy, and those that only sleep slower on one that is not. With
        memory in pages of 2 MB a small model's update takes less time on a CPU, and a large one's no more. What
        fairseq and its libraries warn of about one another is nothing that the user can fix.
        """
        spinning = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"} if self.OMP_WAIT_POLICY is None else {}
        chosen = {
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",
            "PYTHONWARNINGS": "ignore",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            **spinning,
        }
        for name in Settings.model_fields:
            if name != "RUNS" and getattr(self, name) is not None:
                chosen[name] = str(getattr(self, name))
        return chosen


class Training(Settings):
    """Of a recipe that trains one model."""

    PRESET: str = ""
    """a set of sizes, for a CPU or for GPUs"""
    METHOD: Method = "admin"
    """the scheme of the residual branches"""
    FFN_INIT: Literal["xavier", "stock"] = "xavier"
    """feed-forward weights of every method: as in the fairseq of the papers, or as in today's"""
    SEED: NonNegativeInt = 1
    """of the weights, the batches and dropout"""
    TRAIN_ARGS: Options = ()
    """more options for fairseq-train, after the recipe's own"""
    WANDB: str = ""
    """a project of Weights & Biases to log to"""
    ANALYSES: Annotated[tuple[Analysis, ...], BeforeValidator(_split)] = ("dependency", "output-change")
    """what of the papers' analysis the report shows"""

    UPDATES: PositiveInt = 1000
    """how long a run is; a checkpoint comes every SAVE_EVERY of them"""
    EPOCHS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """how long a run is in epochs, in place of UPDATES, with a checkpoint at the end of each"""
    SAVE_EVERY: PositiveInt = 50
    """updates from one checkpoint and validation to the next"""
    LOG_EVERY: PositiveInt = 10
    """updates from one line of progress to the next"""
    AVERAGE: PositiveInt = 5
    """how many of the last checkpoints are averaged"""

    MERGES: PositiveInt = 1000
    """merges of byte-pair encoding"""
    LAYERS: PositiveInt = 18
    """of each stack"""
    WIDTH: PositiveInt = 64
    """of the model"""
    FFN: PositiveInt = 128
    """width of its feed-forward sub-layers"""
    HEADS: PositiveInt = 4
    """of attention; WIDTH is a multiple of them"""
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
    PRECISION: Literal["", "fp16", "me-fp16", "amp", "bf16", "fp32"] = ""
    """me-fp16 is memory-efficient; V100s have no bf16"""
    TOKENS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """of an update, on all devices together"""
    DEVICE_TOKENS: PositiveInt = 4096
    """tokens of the papers' batch on one device"""
    BY_MEMORY: Table = {}
    """tokens of a batch by the GB of a GPU"""
    MAX_TOKENS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """of a batch on one device"""
    UPDATE_FREQ: PositiveInt = 1
    """batches of an update on each device, where TOKENS does not say it"""
    GPUS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """of a machine; all that are visible"""
    MEMORY: Annotated[float | None, Field(gt=0), BeforeValidator(_nothing)] = None
    """GB of a GPU, as nvidia-smi says"""
    NODES: PositiveInt = 1
    """machines, each of which runs the same command"""
    NODE: Annotated[NonNegativeInt | None, BeforeValidator(_nothing)] = None
    """the number of this one, from 0; SLURM sets it"""
    MASTER: str = ""
    """HOST:PORT, where the first of several machines is reached"""
    PRICE: Annotated[NonNegativeFloat | None, BeforeValidator(_nothing)] = None
    """of a device an hour, for preflight"""

    @model_validator(mode="after")
    def _goes_together(self) -> Training:
        if self.WIDTH % self.HEADS:
            raise ValueError(f"WIDTH={self.WIDTH} is not a multiple of HEADS={self.HEADS}. Give another of them.")
        self._check_length()
        if self.NODES > 1:
            host, _, port = self.MASTER.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(
                    f"NODES={self.NODES} needs MASTER=HOST:PORT, where the first node is reached; found "
                    f"MASTER={self.MASTER}."
                )
        if (self.NODE or 0) >= self.NODES:
            expected = f"a number from 0 to {self.NODES - 1}"
            raise ValueError(f"NODE={self.NODE} is not one of NODES={self.NODES}; expected {expected}.")
        return self

    def _check_length(self) -> None:
        length, checkpoints = (self.UPDATES, self.UPDATES // self.SAVE_EVERY) if not self.EPOCHS else (0, self.EPOCHS)
        if length % self.SAVE_EVERY:
            raise ValueError(
                f"UPDATES={length} is not a multiple of SAVE_EVERY={self.SAVE_EVERY}, so the last updates would be in "
                f"no checkpoint. Give UPDATES={max(1, checkpoints) * self.SAVE_EVERY}, or another SAVE_EVERY."
            )
        if self.AVERAGE > checkpoints:
            of = f"EPOCHS={self.EPOCHS}" if self.EPOCHS else f"UPDATES={length} and SAVE_EVERY={self.SAVE_EVERY}"
            raise ValueError(
                f"AVERAGE={self.AVERAGE} is more than the {checkpoints} checkpoints of {of}. Give "
                f"AVERAGE={checkpoints}, or train longer."
            )


class Translation(Training):
    """Of a recipe that trains a model to translate."""

    PAIR: Annotated[str, Field(pattern=r"^\w+-\w+$")] = "de-en"
    """source and target language"""
    DATA: Folder | None = None
    """a folder with the archives, or with what is in them, in place of a download"""
    URL: str = ""
    """where to take the archives from, in place of the addresses in the table"""
    TABLE: Folder = "recipes/archives.tsv"
    """sizes, checksums and addresses of archives"""
    INVALID: Literal["refuse", "replace"] = "refuse"
    """bytes that are not UTF-8; replace puts U+FFFD there"""
    TOKENISER: Annotated[tuple[Tokenising, ...], BeforeValidator(_split)] = ()
    """what else tokenising does"""
    CLEAN: Options = ("--drop-empty",)
    """which training pairs are kept, by their words"""
    CLEAN_BPE: Options = ()
    """which pairs are kept, by their BPE tokens, of training and validation"""
    VALID_EVERY: PositiveInt = 23
    """of so many pairs one validates, where they are one text"""
    TOO_LONG: Literal["refuse", "skip"] = "refuse"
    """a line of validation or test that no model reads"""
    EXPECT: Words = ()
    """the numbers of pairs that train, valid and test must have"""
    BLOBS: dict[str, str] = {}
    """git's blob ids of published files"""

    VARIANT: str = ""
    """of a size, with settings of its own"""
    ENCODER_LAYERS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """where it is not LAYERS"""
    DECODER_LAYERS: Annotated[PositiveInt | None, BeforeValidator(_nothing)] = None
    """where it is not LAYERS"""
    ATTENTION_DROPOUT: Share | None = None
    ACTIVATION_DROPOUT: Share | None = None
    BEAM: PositiveInt = 5
    """hypotheses of a search"""
    LENPEN: NonNegativeFloat = 1.0
    """penalty of a hypothesis by its length"""
    GENERATE_ARGS: Options = ()
    """more options for fairseq-generate"""
    COMPOUNDS: bool = False
    """whether BLEU of split compounds is reported too"""

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
    PAIRS: PositiveInt = 30000
    """sentence pairs of the whole corpus, of which 500 in 30,000 validate and 1,000 test"""


class Multi30k(Translation):
    PAIR: Literal["de-en", "en-de", "de-fr", "fr-de", "en-fr", "fr-en"] = "de-en"
    """source and target language"""
    SUMS: Folder = "recipes/multi30k/SHA256SUMS"
    """SHA-256 of the published texts"""


class Own(Translation):
    DATA: Folder
    """the folder with train.de and train.en (or .gz), valid and test alike"""
    PAIR: Annotated[str, Field(pattern=r"^\w+-\w+$")]
    """source and target language, as in de-en"""
    CORPUS: Annotated[str, Field(pattern=r"^[^/:]*$")] = ""
    """what to call the text; the name of its folder"""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "CORPUS": values.get("CORPUS") or Path(values.get("DATA", "")).name}


class LanguageModel(Training):
    LIBRARY: Folder | None = None
    """the folder of a standard library whose documentation is the text; this Python's"""
    CONTEXT: PositiveInt = 128
    """tokens of a text that the model reads at once"""


KINDS: dict[str, type[Training]] = {
    model.__name__: model for model in (Demo, Multi30k, Own, Translation, LanguageModel)
}
"""The kinds of recipes, as their YAML names them."""
