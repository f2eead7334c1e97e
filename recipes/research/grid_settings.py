"""The settings of the grids. Learning rates stay as the user wrote them, because they are parts of folder names."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from fairseq_admin.method.schemes import MODEL_SCHEMES, SCHEMES
from recipes.settings import Common, Depth, Maybe, Rule, Scheme

T = TypeVar("T")
NewLayers: TypeAlias = Literal[tuple(name for name in SCHEMES if name[:2] != "t-")]  # type: ignore[valid-type]


def _divided(value: Any) -> Any:
    """Divide a text as a shell divides words; a single number in a YAML file is one word."""
    return value if isinstance(value, tuple) else tuple(shlex.split(str(value)))


def _once(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values or len({*values}) < len(values):
        raise ValueError("one or more, with spaces between and none twice")
    return values


def _below(limit: float, expected: str) -> Callable[[str], str]:
    """Check that a text is a number of at least 0 and less than the limit."""

    def number(text: str) -> str:
        with suppress(ValueError):
            if 0 <= float(text) < limit:
                return text
        raise ValueError(f"{expected}, one or more, with spaces between and none twice")

    return number


Several = Annotated[tuple[T, ...], BeforeValidator(_divided), AfterValidator(_once)]
"""Different values, at least one."""
Rates = Several[Annotated[str, AfterValidator(_below(math.inf, "numbers of 0 or more, as 1e-3"))]]


class Grid(Common):
    """Settings of every grid."""

    SEEDS: Several[NonNegativeInt] = (1,)
    """seeds of the weights, the batches and dropout"""
    JOBS: PositiveInt = 1
    """runs at a time, each on a GPU of its own where there are any"""
    SEARCH: Literal["every", "first"] = "every"
    """which seeds try every rate: every seed; or the first, and the other seeds run at the best rate only"""
    WORDS: PositiveInt = 100
    """words of the generated language"""


class Translations(Grid):
    """Settings of a grid that trains models to translate."""

    SCHEMES: Several[Scheme] = MODEL_SCHEMES
    """schemes of the residual branches"""
    INIT: Rule = "reference"
    """rule by which Admin sets omega; other schemes have none"""
    PATIENCE: Maybe[PositiveInt] = None
    """a run ends early after so many updates without a better validation"""
    PAIRS: PositiveInt = 20000
    """sentence pairs of the generated text"""
    VALID_PAIRS: PositiveInt = 1000
    """sentence pairs of the generated text to validate on"""
    TEST_PAIRS: PositiveInt = 1000
    """sentence pairs of the generated text to test on"""


class Compare(Translations):
    DEPTHS: Several[Annotated[str, Field(pattern=Depth)]] = ("18",)
    """layers of each stack; 60-12 are 60 of the encoder and 12 of the decoder"""
    RATES: Rates = ("1e-4", "3e-4", "1e-3", "3e-3")
    """peak learning rates"""


class Sensitivity(Translations):
    LAYERS: PositiveInt = 6
    """layers of each stack"""
    LRS: Rates = ("1e-4", "2e-4", "3e-4", "4e-4", "5e-4")
    """peak learning rates"""
    BETA2S: Several[Annotated[str, AfterValidator(_below(1, "numbers below 1, as 0.98"))]] = ("0.99", "0.995", "0.999")
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
    ENCODER_LR_FACTOR: NonNegativeFloat = 0.1
    """the encoder's learning rate, divided by that of the new layers; 0: the encoder is frozen"""
    PRETRAIN: PositiveInt = 40000
    """pairs to pre-train the encoder on"""
    EXAMPLES: PositiveInt = 4000
    """pairs to train the classifiers on"""
    HELD_OUT: PositiveInt = 1000
    """pairs to validate on, and as many to test on"""
    PAIR: Annotated[str, Field(pattern=r"^\w+-\w+$")] = "de-en"
    """the languages of the text in DATA"""
    ENCODER_UPDATES: PositiveInt = 5000
    """updates of the encoder's pre-training"""


KINDS: dict[str, type[Grid]] = {"compare": Compare, "sensitivity": Sensitivity, "warmup": Warmup, "deeper": Deeper}
"""By target."""
