"""The kinds of recipes, as their YAML names them, and the settings that each has besides those of every one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from recipes.grid import settings as grids
from recipes.settings import Data, Folder, Maybe, Options, Pair, Settings, Share, Tokenising, Training


class Translation(Training):
    """Of a recipe that trains a model to translate."""

    PAIR: Pair = "de-en"
    """source and target language"""
    DATA: Data | None = None
    """a folder with the archives, or with what is in them, in place of a download"""
    URL: str = ""
    """where to take the archives from, in place of the addresses in the table"""
    TABLE: Folder = "recipes/archives.tsv"
    """sizes, checksums and addresses of archives"""
    INVALID: Literal["refuse", "replace"] = "refuse"
    """bytes that are not UTF-8; replace puts U+FFFD there"""
    TOKENISER: Options[Tokenising] = ()
    """what else tokenising does"""
    CLEAN: Options[str] = ("--drop-empty",)
    """which training pairs are kept, by their words"""
    CLEAN_BPE: Options[str] = ()
    """which pairs are kept, by their BPE tokens, of training and validation"""
    VALID_EVERY: PositiveInt = 23
    """of so many pairs one validates, where they are one text"""
    TOO_LONG: Literal["refuse", "skip"] = "refuse"
    """a line of validation or test that no model reads"""
    EXPECT: Options[str] = ()
    """the numbers of pairs that train, valid and test must have"""
    BLOBS: dict[str, str] = {}
    """git's blob ids of published files"""

    VARIANT: str = ""
    """of a size, with settings of its own"""
    ENCODER_LAYERS: Maybe[PositiveInt] = None
    """where it is not LAYERS"""
    DECODER_LAYERS: Maybe[PositiveInt] = None
    """where it is not LAYERS"""
    ATTENTION_DROPOUT: Share | None = None
    ACTIVATION_DROPOUT: Share | None = None
    BEAM: PositiveInt = 5
    """hypotheses of a search"""
    LENPEN: NonNegativeFloat = 1.0
    """penalty of a hypothesis by its length"""
    GENERATE_ARGS: Options[str] = ()
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
    DATA: Data
    """the folder with train.de and train.en (or .gz), valid and test alike"""
    PAIR: Pair
    """source and target language, as in de-en"""
    CORPUS: str = ""
    """what to call the text; the name of its folder"""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: dict[str, Any]) -> dict[str, Any]:
        name = values.get("CORPUS") or Path(values.get("DATA", "")).name
        if set(name) & set("/:,"):
            raise ValueError(f"CORPUS={name} cannot be; expected a name without slash, colon and comma.")
        return {**values, "CORPUS": name}


class LanguageModel(Training):
    LIBRARY: Folder | None = None
    """the folder of a standard library whose documentation is the text; this Python's"""
    CONTEXT: PositiveInt = 128
    """tokens of a text that the model reads at once"""


_ALL: list[type[Settings]] = [Demo, Multi30k, Own, Translation, LanguageModel, *grids.KINDS]
KINDS = {model.__name__: model for model in _ALL}
