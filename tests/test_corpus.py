"""The demo's corpus: the same every time, no sentence twice, both languages saying the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.demo import generate_corpus

ROOT = Path(__file__).parents[1]
SPLITS = ("train", "valid", "test")


def write_corpus(folder: Path, size: int) -> dict[str, list[str]]:
    for split in SPLITS:
        generate_corpus.write(split, ("de", "en"), folder / split, size)
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 30000)


def test_has_thirty_thousand_pairs_in_three_splits(files):
    counts = {name: len(lines) for name, lines in files.items()}
    assert counts == {
        **{"train.de": 28500, "train.en": 28500},
        **{"valid.de": 500, "valid.en": 500},
        **{"test.de": 1000, "test.en": 1000},
    }


@pytest.mark.parametrize("language", ["de", "en"])
def test_no_sentence_occurs_twice_in_any_split(files, language):
    sentences = [line for split in ("train", "valid", "test") for line in files[f"{split}.{language}"]]
    assert len(set(sentences)) == len(sentences) == 30000


def test_is_the_same_in_every_process():
    """A hash seed or the order of a set must not leak into the draw."""
    code = "from recipes.demo.generate_corpus import corpus; print(corpus(300))"
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
        assert done.stdout.decode().strip() == str(generate_corpus.corpus(300))


def test_sentences_are_whole(files):
    """Capital first, full stop or question mark last, no phrase left open, 3 to 25 words."""
    for lines in files.values():
        for line in lines:
            assert line[0].isupper() and line[-1] in ".?", line
            assert not set("{}") & set(line) and ",." not in line and "  " not in line, line
            assert 3 <= len(line.split()) <= 25, line


def test_times_are_read_right():
    """German counts a half towards the coming hour: halb acht is half past seven; after twelve comes one."""
    draw = random.Random(1)
    times = dict(generate_corpus.time(draw) for _ in range(2000))
    assert times["halb acht"] == "half past seven"
    assert times["halb eins"] == "half past twelve"
    assert times["ein Uhr"] == "one o'clock"
    assert times["Viertel vor eins"] == "a quarter to one"
    assert times["zwanzig nach sechs"] == "twenty past six"


def test_dates_and_numbers_are_read_right():
    draw = random.Random(1)
    assert dict(generate_corpus.day(draw) for _ in range(3000))["dritten März"] == "the third of March"
    assert dict(generate_corpus.number(draw, 2, 99) for _ in range(3000))["einundzwanzig"] == "twenty-one"
    assert dict(generate_corpus.territory(draw) for _ in range(3000))["Österreich"] == "Austria"


def test_a_sentence_of_either_side_counts_once(monkeypatch):
    monkeypatch.setattr(
        generate_corpus, "TEMPLATES", [("{weekday}: ja.", "{weekday}."), ("{weekday}: nein.", "{weekday}.")]
    )
    with pytest.raises(ValueError, match="PAIRS=8: the templates gave 7 distinct pairs"):
        generate_corpus.corpus(8)
