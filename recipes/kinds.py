"""The kinds of recipes and grids, by the names that YAML files use, and the settings that each kind adds.

A grid's learning rates stay as the user wrote them, because they are parts of folder names.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from fairseq_admin.method.schemes import MODEL_SCHEMES, SCHEMES
from recipes.settings import Data, Folder, Maybe, Options, Pair, Rule, Scheme, Settings, Share, Tokenising, Training

T = TypeVar("T")
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


Several = Annotated[
    tuple[T, ...],
    BeforeValidator(lambda value: value if isinstance(value, tuple) else tuple(str(value).split())),
    AfterValidator(_once),
]
"""Words with spaces between them, or a single number in a YAML file."""
Rates = Several[Annotated[str, _below(math.inf, "numbers of 0 or more, as 1e-3")]]


Depth = Annotated[str, BeforeValidator(str), Field(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$")]
"""Layers of each stack, or ENCODER-DECODER."""


# -- recipes of one model -----------------------------------------------------------------------------------------


class Translation(Training):
    """Settings of a recipe that trains a model to translate."""

    PAIR: Pair = "de-en"
    """source and target language"""
    DATA: Data | None = None
    """folder with the archives or their contents, instead of a download"""
    URL: str = ""
    """address of a folder with the archives, instead of the table's addresses"""
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
    PAIRS: PositiveInt = 30000
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
    CORPUS: str = Field(default_factory=lambda values: Path(values["DATA"]).name, pattern="^[^/:,]*$")
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
    URL: str = ""
    """with PRESET=multi30k, as for make multi30k"""
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
