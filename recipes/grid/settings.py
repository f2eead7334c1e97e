"""The settings of the grids of runs: what each is called, may be and means. Rates stay the text that the user wrote:
they are in the names of folders."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from fairseq_admin.method.schemes import MODEL_SCHEMES, RULES, SCHEMES
from recipes.settings import Data, Maybe, Pair, Scheme, Settings, Share

T = TypeVar("T")
if TYPE_CHECKING:
    NewLayers = str
    Rule = str
else:
    Rule = Literal[RULES]
    NewLayers = Literal[tuple(name for name in SCHEMES if not name.startswith("t-fixup"))]


def _below(limit: float, what: str) -> AfterValidator:
    """A number from 0 to less than the limit, as the user wrote it."""

    def number(text: str) -> str:
        with suppress(ValueError):
            if 0 <= float(text) < limit:
                return text
        raise ValueError(f"{what}, one or more, with spaces between and none twice")

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
"""Words, or one number of a YAML."""
Rates = Several[Annotated[str, _below(math.inf, "numbers of 0 or more, as 1e-3")]]


Depth = Annotated[str, BeforeValidator(str), Field(pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$")]
"""Layers of both stacks, or ENCODER-DECODER."""


class Grid(Settings):
    """Of every grid."""

    SEEDS: Several[NonNegativeInt] = (1,)
    """of the weights, the batches and dropout"""
    WORDS: PositiveInt = 100
    """of a generated language"""
    DATA: Data | None = None
    """a folder with a text, in place of the one that the grid makes or fetches"""
    DROPOUT: Share = 0.0
    """of the model, while it trains on what is compared"""
    JOBS: PositiveInt = 1
    """runs at a time, each on a GPU of its own where there are any"""


class Translations(Grid):
    """Of a grid that trains models to translate."""

    SCHEMES: Several[Scheme] = MODEL_SCHEMES
    """of the residual branches"""
    FFN: PositiveInt = 256
    """width of the feed-forward sub-layers"""
    CLIP_NORM: NonNegativeFloat = 0.0
    """norm of the gradients, 0 for any"""
    MAX_TOKENS: PositiveInt = 192
    """of a batch"""
    LEG: Maybe[PositiveInt] = None
    """a run ends early after so many updates without a better validation"""
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
    MERGES: Maybe[PositiveInt] = None
    """of Multi30k, as make multi30k takes it"""
    PROTOCOL: str = ""
    """a page that was committed before the runs; each row then names its commit"""


class Compare(Translations):
    DEPTHS: Several[Depth] = ("18",)
    """layers of the encoder, and as many of the decoder or, as in 60-12, another number"""
    INIT: Rule = "reference"
    """the rule by which Admin sets omega; other schemes have none"""
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


class Sensitivity(Translations):
    LAYERS: PositiveInt = 6
    """of each stack"""
    LRS: Rates = ("1e-4", "2e-4", "3e-4", "4e-4", "5e-4")
    """peak learning rates"""
    BETA2S: Several[Annotated[str, _below(1, "numbers below 1, as 0.98")]] = ("0.99", "0.995", "0.999")
    """of RAdam"""


class Warmup(Translations):
    QUICK: str = ""
    """anything, for a few minutes with small sizes"""
    LAYERS: PositiveInt = 6
    """of each stack"""
    OPTIMIZERS: Several[Literal["adam", "sgd"]] = ("adam", "sgd")
    WARMUPS: Several[NonNegativeInt] = (0, 100, 400)
    """updates of warm-up"""
    ADAM_LRS: Rates = ("5e-4", "1e-3", "2e-3")
    """peak learning rates of Adam, which moves by about the rate"""
    SGD_LRS: Rates = ("1e-2", "1e-1", "1")
    """peak learning rates of SGD, which moves by the gradient itself"""


class Deeper(Grid):
    QUICK: str = ""
    """anything, for a few minutes with small sizes"""
    SCHEMES: Several[NewLayers] = ("dt-fixup", "admin", "post-ln", "pre-ln", "deepnorm", "rezero")
    """of the new layers; a head without any is always among the runs"""
    DEPTHS: Several[PositiveInt] = (2, 8, 24)
    """new layers"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates: the first seed is run with every one, the others at the best"""
    SEARCH: Literal["first"] = "first"
    """seeds that every rate is run with"""
    WARMUP: NonNegativeInt = 50
    """updates of warm-up, in every scheme but dt-fixup, which has none"""
    FACTOR: NonNegativeFloat = 0.1
    """the encoder's rate by the new layers'; 0: it is frozen"""
    PRETRAIN: PositiveInt = 40000
    """pairs to pre-train the encoder on"""
    EXAMPLES: PositiveInt = 4000
    """pairs to train the classifiers on"""
    HELD_OUT: PositiveInt = 1000
    """pairs to validate on, and as many to test on"""
    PAIR: Pair = "de-en"
    """the languages of the text in DATA"""
    ENCODER_LAYERS: PositiveInt = 4
    """of the pre-trained encoder"""
    ENCODER_UPDATES: PositiveInt = 5000
    """how long it is pre-trained"""
    ENCODER_SAVE_EVERY: PositiveInt = 500
    """updates from one of its checkpoints to the next"""


KINDS: list[type[Grid]] = [Compare, Sensitivity, Warmup, Deeper]
