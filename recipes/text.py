"""The steps of a translation recipe's text: archives, raw text, words, splits, joint BPE, fairseq's binary data."""

from __future__ import annotations

import hashlib
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_admin.text.tokens import Text as Tokens
from recipes.chain import Step
from recipes.processes import stream
from recipes.recipe import Raw, Recipe
from recipes.settings import Demo, Multi30k
from recipes.steps import bpe, pairs
from recipes.steps.common import replacing
from recipes.steps.extract import extract, unpacked
from recipes.steps.records import describe
from recipes.steps.streaming import cores

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")


def binarise(folder: Path, prefix: str, *options: object, splits: Sequence[str] = SPLITS) -> None:
    """Write a folder of fairseq's binary data, completely or not at all.

    Args:
        prefix: path of the texts up to the name of the split.

    Raises:
        Failed: fairseq-preprocess failed. Its output is in preprocess.log next to the folder.
    """
    part = folder.with_name(f"{folder.name}.part")
    for old in (folder, part):
        shutil.rmtree(old, ignore_errors=True)
    command = [sys.executable, "-m", "fairseq_cli.preprocess", *map(str, options), "--destdir", str(part)]
    command += [word for split in splits for word in (f"--{split}pref", f"{prefix}{split}")]
    stream(command, folder.with_name("preprocess.log"), "wb")
    part.rename(folder)


def compare(folder: Path, languages: Iterable[str], pairs: Mapping[str, str], blobs: Mapping[str, str]) -> None:
    """Compare a text with the published one. Refuse a different number of pairs; log whether the files are the same.

    Args:
        pairs: the published number of pairs, by the prefix of the files.
        blobs: git's ids of the published files.

    Raises:
        ValueError: the number of pairs differs.
    """
    for path, expected in [(folder / f"{name}.{code}", count) for name, count in pairs.items() for code in languages]:
        with path.open("rb") as file:
            count = sum(1 for _ in file)
        if count != int(expected):
            raise ValueError(
                f"{path} has {count} lines, expected {expected}, as in the published text. Check where the archive "
                "came from, or give EXPECT= to train on this text anyway."
            )
    others = [name for name, blob in blobs.items() if blob_id((folder / name).read_bytes()) != blob]
    if blobs and not others:
        log.info("%s: the published text, byte for byte.", folder)
    elif others and all(name.startswith("bpe/") for name in others):
        message = "%s: the published words; BPE merged pairs of equal frequency in another order: %s."
        log.info(message, folder, ", ".join(others))
    elif others:
        log.info("%s: not the published text, by git's blob ids: %s.", folder, ", ".join(others))


def blob_id(content: bytes) -> str:
    """git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


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
    with replacing(out) as part:
        rules.write(part)


class Text:
    """The text of a translation recipe, which all its runs share."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.settings = recipe, recipe.settings
        self.folder, self.raw = recipe.text, recipe.raw
        self.source, self.target = self.settings.PAIR.split("-")
        self.binary = self.folder / "bin"
        self.binarised = self.binary / f"dict.{self.target}.txt"
        self.json, self.codes = self.folder / "text.json", self.folder / "codes"
        self.assets = (self.binary / f"dict.{self.source}.txt", self.binarised, self.codes, self.json)
        self.words = self.folder / ("split" if recipe.file.splits else "tok")
        self.goals = (self.binarised, *self.both(self.raw, "test"))

    def both(self, folder: Path, *names: str) -> tuple[Path, ...]:
        return tuple(folder / f"{name}.{language}" for name in names for language in (self.source, self.target))

    def record(self) -> dict[str, Any]:
        """The text's settings, as the settings.json of its runs has them."""
        s = self.settings
        gather = self._gather("train") if self.recipe.file.splits else []
        kept: dict[str, Any] = {"pair": s.PAIR, "merges": str(s.MERGES), "tokeniser": " ".join(sorted(s.TOKENISER))}
        kept["cleaning"] = " ".join([*s.CLEAN, *s.CLEAN_BPE, *gather])
        kept |= {"pairs": str(s.PAIRS)} if isinstance(s, Demo) else {}
        return kept | ({"sums": describe(Path(s.SUMS))} if isinstance(s, Multi30k) else {})

    def steps(self) -> Iterator[Step]:
        yield from self._raw_steps()
        tokeniser = self.settings.TOKENISER
        yield Step(
            "text", self.folder, (self.json,),
            partial(write_rules, self.json, self.source, self.target, tokeniser),
            settings={"languages": [self.source, self.target], "tokeniser": sorted(tokeniser)},
        )  # fmt: skip
        yield from self._word_steps()
        yield from self._token_steps()

    # -- raw text ----------------------------------------------------------------------------------------------------

    def _raw_steps(self) -> Iterator[Step]:
        texts = self.recipe.file.texts
        for name in () if texts else SPLITS:
            yield Step(
                f"raw {name}", self.folder, self.both(self.raw, name), partial(self._generate, name),
                settings={"pairs": self.settings.PAIRS},
            )  # fmt: skip
        for name, text in texts.items():
            yield from (self._extraction(name, text, language) for language in (self.source, self.target))

    def _generate(self, name: str) -> None:
        from recipes.demo import generate_corpus  # imports Babel

        generate_corpus.write(name, (self.source, self.target), self.raw / name, self.settings.PAIRS)

    def _extract(self, archive: Path, *arguments: Any, **options: Any) -> None:
        """Extract a raw text. Its archive is downloaded first if it is not there."""
        s, texts = self.settings, self.recipe.file.texts.values()
        if not (s.DATA or archive.exists()):
            from recipes.steps.download import download  # imports requests

            sides = (self.source, self.target)
            names = [text.archive.format(language=side) for text in texts for side in sides if text.archive]
            download(archive, Path(s.TABLE), dict.fromkeys(names), self.recipe.file.needs.text)
        extract(archive, *arguments, **options)

    def _extraction(self, name: str, text: Raw, language: str) -> Step:
        """A raw text, from an archive or from its unpacked files."""
        s, out = self.settings, self.raw / f"{name}.{language}"
        side = "src" if language == self.source else "ref"
        members = [member.format(language=language, side=side) for member in text.members]
        options: dict[str, Any] = {"straight": text.straight_apostrophe}
        settings = {"members": members, "as": [text.kind], **options}
        if isinstance(s, Multi30k):
            options["sums"] = Path(s.SUMS)
            settings["sums"] = describe(options["sums"])["sha256"]
        else:
            options["invalid"] = settings["invalid"] = s.INVALID
            options["table"] = Path(s.TABLE) if s.DATA else None
        archive = self.recipe.archives / (text.archive or "").format(language=language)
        reads: tuple[Path, ...] = (archive,)
        if s.DATA and not archive.is_file():
            archive = self.recipe.archives
            reads = tuple(unpacked(archive, member) for member in members)
        program = partial(self._extract, archive, members, out, text.kind, **options)
        return Step(f"raw {name}.{language}", self.raw, (out,), program, reads, settings)

    # -- words and BPE tokens ----------------------------------------------------------------------------------------

    def _word_steps(self) -> Iterator[Step]:
        """Tokenising and splitting."""
        s, splits = self.settings, self.recipe.file.splits
        trains = splits["train"].texts if splits else ["train"]
        names = list(dict.fromkeys(name for split in splits.values() for name in split.texts)) or list(SPLITS)
        for name in names:
            text = self.recipe.file.texts.get(name)
            clean, kind = s.CLEAN if name in trains else (), text.tokenise if text else []
            program = partial(
                pairs.tokenise, self.json, self.raw / name, self.folder / "tok" / name, clean,
                normalise="--no-normalise" not in kind,
            )  # fmt: skip
            yield Step(
                f"tokens {name}", self.folder, self.both(self.folder / "tok", name), program,
                (*self.both(self.raw, name), self.json), {"options": [*clean, *kind]}, pairs.VERSION,
            )  # fmt: skip
        for name, gathered in splits.items():
            parts = [self.folder / "tok" / part for part in gathered.texts]
            every = s.VALID_EVERY if gathered.keep else 1
            yield Step(
                f"split {name}", self.folder, self.both(self.words, name),
                partial(pairs.split, parts, (self.source, self.target), self.words / name, every, gathered.keep),
                self.both(self.folder / "tok", *gathered.texts), {"gather": self._gather(name)},
            )  # fmt: skip

    def _gather(self, name: str) -> list[str]:
        keep = self.recipe.file.splits[name].keep
        return ["--every", str(self.settings.VALID_EVERY), "--keep", keep] if keep else []

    def _token_steps(self) -> Iterator[Step]:
        s, units = self.settings, self.folder / "bpe"
        train = self.both(self.words, "train")
        learn = partial(bpe.write, self.codes, train, s.MERGES)
        yield Step("codes", self.folder, (self.codes,), learn, train, {"merges": s.MERGES}, bpe.VERSION)
        for name in SPLITS:
            clean = s.CLEAN_BPE if name != "test" else ()
            # fairseq itself skips long pairs of the training set, and logs how many.
            too_long = s.TOO_LONG if name != "train" else ""
            words = self.both(self.words, name)
            yield Step(
                f"bpe {name}", self.folder, self.both(units, name),
                partial(bpe.apply, self.codes, words, units, clean, too_long), (*words, self.codes),
                {"options": [*clean, *(["--too-long", too_long] if too_long else [])]}, bpe.VERSION,
            )  # fmt: skip
        expected = {"expect": list(s.EXPECT)}
        yield Step("bin", self.folder, (self.binarised,), self._binarise, self.both(units, *SPLITS), expected)

    def _binarise(self) -> None:
        s = self.settings
        expected = {f"{self.words.name}/{name}": count for name, count in zip(SPLITS, s.EXPECT)}
        compare(self.folder, (self.source, self.target), expected, s.BLOBS)
        options = ("--source-lang", self.source, "--target-lang", self.target, "--joined-dictionary")
        binarise(self.binary, f"{self.folder}/bpe/", *options, "--workers", cores())
