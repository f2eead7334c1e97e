"""A recipe's text: archives, raw text, words, splits and BPE tokens. All runs on the same text share its folder.

The folder is named after a hash of the sources' content, of the options that change the text, and of the versions of
the programs. So a text never changes: with another source, option or program, it is another text. fairseq-preprocess
then makes the binary data in the folder's `bin` (training.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from fairseq_admin.text.tokens import Text as Tokens
from recipes.recipe import NEUTRAL, Raw, Recipe
from recipes.settings import Folder, validated
from recipes.steps import bpe, pairs
from recipes.steps.extract import extract, unpacked
from recipes.steps.sources import Sources
from recipes.steps.table import Archive, read_table

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
UNKNOWN = "text-unknown"
"""Name of a text's folder as long as an archive must be downloaded to know its content."""


class Options(BaseModel):
    """The options of a text, PREPARE_ARGS."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    table: Folder = "recipes/archives.tsv"
    """sizes, checksums and addresses of archives"""
    sums: Folder | None = None
    """SHA-256 of published texts"""
    invalid: Literal["refuse", "replace"] = "refuse"
    """bytes that are not UTF-8: refuse them, or replace them with U+FFFD"""
    tokeniser: list[Literal["lowercase", "normalise", "aggressive_dashes", "escape", "perl"]] = []
    """options of tokenising"""
    clean: str = ""
    """training pairs to keep, by their words: drop-empty, or lengths MIN MAX and ratio R"""
    clean_bpe: str = ""
    """training and validation pairs to keep, by their BPE tokens"""
    valid_every: PositiveInt = 23
    """every so many pairs, one goes to the validation set, if it shares a text with the training set"""
    too_long: Literal["refuse", "skip"] = "refuse"
    """lines of the validation and test sets that are too long for the model"""
    merges: PositiveInt
    """merges of byte-pair encoding"""
    expect: list[int] = []
    """numbers of pairs of train, valid and test as published"""
    pairs: int = Field(30000, ge=100)
    """sentence pairs of the generated corpus; of 30,000, 500 validate and 1,000 test"""
    library: Folder | None = None
    """folder of the standard library whose documentation is the text; by default that of this Python"""


def read_options(recipe: Recipe) -> Options:
    """The text's options.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    values: dict[str, Any] = {}
    for name, value in recipe.options["prepare"].items():
        key = name[2:].replace("-", "_")
        listed = key in ("tokeniser", "expect")
        values[key] = shlex.split(value) if listed else " ".join(shlex.split(value))
    try:
        return validated(Options, values)
    except ValueError as error:
        raise ValueError(f"An option of the text, PREPARE_ARGS: {error}") from None


@dataclass(frozen=True)
class Step:
    """A step of a recipe, or a part of its text: it is done if its outputs are there."""

    name: str
    outputs: Sequence[Path]
    program: Callable[[], object]
    shell: Sequence[str] = ()
    """the same as lines for a shell"""
    reads: Sequence[Path] = ()
    """files of other runs; the step is not done if one of them is newer than an output"""

    @property
    def is_done(self) -> bool:
        if not all(path.exists() for path in self.outputs):
            return False
        written = min(path.stat().st_mtime_ns for path in self.outputs)
        return all(path.stat().st_mtime_ns <= written for path in self.reads)


class Text:
    """The text of a recipe, which all its runs share. Subclasses make its words."""

    languages: Sequence[str]
    """endings of the files of a split"""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.options = recipe, read_options(recipe)
        self.sources = Sources(Path(recipe.settings.RUNS, "sources.json"))

    # -- its name ----------------------------------------------------------------------------------------------------

    def contents(self) -> dict[str, str | None]:
        """A hash of the content of every source; None for an archive that must be downloaded to know it."""
        raise NotImplementedError

    @property
    def identity(self) -> list[Any]:
        """All that decides the text, but for its sources."""
        file, neutral = self.recipe.file, {name[2:].replace("-", "_") for name in NEUTRAL["prepare"]}
        options = self.options.model_dump(exclude=neutral | {"library"}) | {"tokeniser": sorted(self.options.tokeniser)}
        texts = [{name: part.model_dump() for name, part in parts.items()} for parts in (file.texts, file.splits)]
        return [pairs.VERSION, bpe.VERSION, self.languages, options, texts]

    @functools.cached_property
    def folder(self) -> Path:
        """The text's folder."""
        contents = self.contents()
        if None in contents.values():
            return self.recipe.base / UNKNOWN
        content = json.dumps([*self.identity, sorted(contents.items())])  # type: ignore[arg-type]
        return self.recipe.base / f"text-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def archives(self) -> list[Archive]:
        """The archives from which the text is made. They may be there already."""
        return []

    def fetch(self) -> None:
        """Download what has to be there before the text has a name."""

    # -- its files ---------------------------------------------------------------------------------------------------

    @property
    def binary(self) -> Path:
        return self.folder / "bin"

    @property
    def binarised(self) -> Path:
        """The file of the binary data that is written last."""
        return self.binary / ".".join(filter(None, ["dict", self.languages[-1], "txt"]))

    @property
    def assets(self) -> tuple[Path, ...]:
        """Files that a model needs next to it."""
        return ()

    def files(self, folder: str, *names: str) -> tuple[Path, ...]:
        return tuple(
            self.folder / folder / ".".join(filter(None, [name, language]))
            for name in names
            for language in self.languages
        )

    @property
    def words(self) -> str:
        """The folder of the words of the splits."""
        return "tok"

    @property
    def kept(self) -> tuple[Path, ...]:
        """The files that later steps read. The others may be deleted once these are there."""
        return (*self.files("bpe", *SPLITS), self.folder / "codes")

    @property
    def is_done(self) -> bool:
        return all(path.exists() for path in self.kept)

    def make(self) -> None:
        """Make what is not there. Files appear whole, so an interrupted text goes on with its next part."""
        for step in () if self.is_done else self.steps():
            if not step.is_done:
                print(f"# {step.name}", flush=True)
                step.program()

    def steps(self) -> Iterator[Step]:
        yield from self.word_steps()
        options, codes, units = self.options, self.folder / "codes", self.folder / "bpe"
        train = self.files(self.words, "train")
        yield Step("codes", [codes], partial(bpe.write, codes, train, options.merges))
        for name in SPLITS:
            clean = options.clean_bpe.split() if name != "test" else ()
            # fairseq skips long pairs of the training set itself, and logs how many. It joins a language model's lines.
            too_long = options.too_long if name != "train" and len(self.languages) == 2 else ""
            words = self.files(self.words, name)
            yield Step(f"bpe {name}", self.files("bpe", name), partial(bpe.apply, codes, words, units, clean, too_long))

    def word_steps(self) -> Iterator[Step]:
        raise NotImplementedError

    def check(self) -> None:
        """Compare the text with what is published, before it becomes binary data."""


class Translation(Text):
    """A parallel text."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.source, self.target = self.languages = recipe.pair.split("-")
        self.rows = read_table(Path(self.options.table))

    @property
    def words(self) -> str:
        return "split" if self.recipe.file.splits else "tok"

    @property
    def json(self) -> Path:
        return self.folder / "text.json"

    @property
    def assets(self) -> tuple[Path, ...]:
        dictionaries = (self.binary / f"dict.{language}.txt" for language in self.languages)
        return (*dictionaries, self.folder / "codes", self.json)

    @property
    def kept(self) -> tuple[Path, ...]:
        return (*super().kept, self.json, *self.files("raw", "test"), *self.files(self.words, "test"))

    # -- sources -----------------------------------------------------------------------------------------------------

    def _from(self, text: Raw, language: str) -> tuple[Path, list[str]]:
        """The archive of a raw text, or the folder of its unpacked files, and its members."""
        side = "src" if language == self.source else "ref"
        members = [member.format(language=language, side=side) for member in text.members]
        archive = (
            self.recipe.archives / text.archive.format(language=language) if text.archive else self.recipe.archives
        )
        unpacks = (
            text.archive and self.recipe.settings.DATA and not archive.is_file() and not self.sources.known(archive)
        )
        return self.recipe.archives if unpacks else archive, members

    def contents(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for text in self.recipe.file.texts.values():
            for language in self.languages:
                archive, members = self._from(text, language)
                if archive == self.recipe.archives:
                    for member in members:
                        found[member] = self._content(unpacked(archive, member))
                elif self.recipe.settings.DATA or not (row := self.rows.get(archive.name)) or not row.checksum:
                    found[archive.name] = self._content(archive)
                else:
                    found[archive.name] = row.checksum  # what is downloaded is compared with it
        return found

    def _content(self, path: Path) -> str | None:
        content = self.sources.content(path)
        if content is None and self.recipe.settings.DATA:
            raise ValueError(f"{path}: is not there; expected a plain file of that name. Check the names.")
        return content

    def fetch(self) -> None:
        if self.folder.name == UNKNOWN:
            for name in [name for name, content in self.contents().items() if content is None]:
                self._download(self.recipe.archives / name)
            del self.folder

    def archives(self) -> list[Archive]:
        texts = self.recipe.file.texts.values()
        names = [text.archive.format(language=code) for text in texts for code in self.languages if text.archive]
        return [self.rows[name] for name in dict.fromkeys(names) if name in self.rows]

    def _download(self, archive: Path) -> None:
        from recipes.steps.download import download  # imports requests

        names = [row.name for row in self.archives()]
        download(archive, Path(self.options.table), names, self.recipe.file.needs.text)

    # -- raw text and words ------------------------------------------------------------------------------------------

    def word_steps(self) -> Iterator[Step]:
        options, file = self.options, self.recipe.file
        for name in () if file.texts else SPLITS:
            yield Step(f"raw {name}", self.files("raw", name), partial(self._generate, name))
        for name, text in file.texts.items():
            for language in self.languages:
                out = self.folder / f"raw/{name}.{language}"
                yield Step(f"raw {out.name}", [out], partial(self._extract, text, language, out))
        yield Step("text", [self.json], partial(write_rules, self.json, self.source, self.target, options.tokeniser))
        trains = file.splits["train"].texts if file.splits else ["train"]
        for name in dict.fromkeys(name for split in file.splits.values() for name in split.texts) or SPLITS:
            raw = file.texts.get(name)
            program = partial(
                pairs.tokenise, self.json, self.folder / "raw" / name, self.folder / "tok" / name,
                options.clean.split() if name in trains else (),
                normalise=not raw or "--no-normalise" not in raw.tokenise,
            )  # fmt: skip
            yield Step(f"tokens {name}", self.files("tok", name), program)
        for name, split in file.splits.items():
            parts = [self.folder / "tok" / part for part in split.texts]
            every = options.valid_every if split.keep else 1
            program = partial(pairs.split, parts, self.languages, self.folder / "split" / name, every, split.keep)
            yield Step(f"split {name}", self.files("split", name), program)

    def _generate(self, name: str) -> None:
        from recipes.demo import generate_corpus  # imports Babel

        generate_corpus.write(name, self.languages, self.folder / "raw" / name, self.options.pairs)

    def _extract(self, text: Raw, language: str, out: Path) -> None:
        """Extract a raw text. Its archive is downloaded first if it is not there."""
        archive, members = self._from(text, language)
        if not (self.recipe.settings.DATA or archive.exists()):
            self._download(archive)
        options: dict[str, Any] = {"straight": text.straight_apostrophe, "invalid": self.options.invalid}
        options["sums"] = Path(self.options.sums) if self.options.sums else None
        options["table"] = Path(self.options.table) if self.recipe.settings.DATA and not self.options.sums else None
        extract(archive, members, out, text.kind, **options)

    def check(self) -> None:
        for name, expected in zip(SPLITS, self.options.expect):
            for path in self.files(self.words, name):
                with path.open("rb") as file:
                    count = sum(1 for _ in file)
                if count != expected:
                    raise ValueError(
                        f"{path} has {count} lines, expected {expected}, as in the published text. Check where the "
                        "archive came from, or give PREPARE_ARGS=--expect= to train on this text anyway."
                    )


class Documentation(Text):
    """The text of a language model: Python's own documentation."""

    languages = ("",)

    @property
    def library(self) -> Path:
        return Path(self.options.library or sysconfig.get_paths()["stdlib"])

    def contents(self) -> dict[str, str | None]:
        from recipes.lm import python_docs

        return {"library": python_docs.digest(self.library)}

    def word_steps(self) -> Iterator[Step]:
        from recipes.lm import python_docs

        yield Step("words", self.files("tok", *SPLITS), partial(python_docs.write, self.folder / "tok", self.library))


def write_rules(out: Path, source: str, target: str, settings: Iterable[str]) -> None:
    """Write text.json, the rules of tokenising, for the steps and for `fairseq-admin translate`.

    Log the languages that the tokeniser does not know.

    Raises:
        ValueError: the package that scores the target language is missing.
    """
    from sacremoses.corpus import NonbreakingPrefixes

    from recipes.steps.score import metrics_of  # imports sacreBLEU, which takes a fifth of a second

    rules = Tokens(source, target, **dict.fromkeys(settings, True))
    known = {*NonbreakingPrefixes().available_langs, "ja", "ko"}
    if unknown := [language for language in (source, target) if language not in known]:
        log.info("The tokeniser does not know %s and treats it as English.", " and ".join(unknown))
    metrics_of(rules)  # fails now, not after the training
    out.parent.mkdir(parents=True, exist_ok=True)
    rules.write(out)
