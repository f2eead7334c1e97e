"""The text of a grid, as fairseq's binary data: generated, or a recipe's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.compare import reversed_corpus
from recipes.compare.entropy import unigram_entropy
from recipes.deeper import pairs
from recipes.grid.deeper import Deeper
from recipes.grid.grids import Grid
from recipes.steps.common import write_lines
from recipes.steps.extract import extract


def preprocess(folder: Path, *calls: list[object]) -> None:
    """fairseq's binary data, whole or not at all.

    Args:
        calls: the options of one fairseq-preprocess after another, with `{}` where its folder is meant.

    Raises:
        ValueError: one of them failed.
    """
    part = folder.with_name(f"{folder.name}.part")
    for old in (folder, part):
        shutil.rmtree(old, ignore_errors=True)
    log = folder.with_name("preprocess.log")
    with log.open("wb") as out:
        for words in calls:
            command = [sys.executable, "-m", "fairseq_cli.preprocess", *(str(word).format(part) for word in words)]
            if subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode:
                raise ValueError(f"{folder}: fairseq-preprocess could not make it. Its whole output: {log}.")
    part.rename(folder)


def splits(prefix: str, *names: str) -> list[object]:
    """fairseq-preprocess' options for a text's splits."""
    return [word for name in names for word in (f"--{name}pref", f"{prefix}{name}")]


def generated(grid: Grid) -> None:
    s, text = grid.settings, grid.folder / "text"
    if (grid.data / "dict.b.txt").exists():
        return
    for split, size in {"train": s.PAIRS, "valid": s.VALID_PAIRS, "test": s.TEST_PAIRS}.items():
        reversed_corpus.write(text, split, size, s.WORDS)
    languages = ["--source-lang", "a", "--target-lang", "b", "--joined-dictionary", "--destdir", "{}"]
    preprocess(grid.data, [*languages, *splits(f"{text}/", "train", "valid", "test")])


def of_a_recipe(grid: Grid) -> None:
    """The demo's text, or Multi30k's. The recipe gets those settings alone that it is given here."""
    if (grid.data / "dict.en.txt").exists():
        return
    s = grid.settings
    target = {"gpu": "demo", "multi30k": "multi30k"}[s.PRESET]
    words = ["PRESET=cpu", f"RUNS={s.RUNS}"]
    if target == "multi30k":
        words += [f"{name}={getattr(s, name)}" for name in ("DATA", "URL", "SUMS", "MERGES") if getattr(s, name)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", *type(s).model_fields)
    }
    if subprocess.run([sys.executable, "-m", "recipes", f"{target}-prepare", *words], env=environment).returncode:
        raise ValueError(f"the text of {target} could not be made; see above.")


def for_classes(grid: Deeper) -> None:
    s, text = grid.settings, grid.folder / "text"
    if (grid.data / "dict.txt").exists():
        return
    if s.DATA:
        for language in s.PAIR.split("-"):
            extract(Path(s.DATA), [f"train.{language}"], text / f"raw/train.{language}")
        sentences = list(dict.fromkeys(pairs.read(text / "raw", s.PAIR)))
    else:
        sentences = pairs.generated(s.PRETRAIN + s.EXAMPLES + 2 * s.HELD_OUT, s.WORDS)
    pairs.write(text, sentences, s.PRETRAIN, s.EXAMPLES, s.HELD_OUT)
    three = ("train", "valid", "test")
    one: list[object] = ["--only-source"]
    preprocess(
        grid.data,
        [*one, "--nwordssrc", 8000, *splits(f"{text}/pretrain.", "train", "valid"), "--destdir", "{}"],
        [*one, "--srcdict", "{}/dict.txt", *splits(f"{text}/pairs.", *three), "--destdir", "{}/input0"],
        [*one, *splits(f"{text}/label.", *three), "--destdir", "{}/label"],
    )


def make(grid: Grid) -> None:
    """The text of a grid; and the entropy of one of its tokens, by which its runs are judged."""
    if isinstance(grid, Deeper):
        return for_classes(grid)
    generated(grid) if grid.generated else of_a_recipe(grid)
    entropy = grid.folder / "entropy.json"
    if not entropy.exists():
        bits = unigram_entropy(grid.data, grid.source, grid.target)
        write_lines(entropy, [json.dumps({"bits": bits})])
