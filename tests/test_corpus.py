"""The demo's corpus: it is the same every time, repeats no sentence, and both languages have the same meaning."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from recipes.demo import generate_corpus

SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("corpus")
    for split in SPLITS:
        generate_corpus.write(split, ("de", "en"), folder / split, 30000)
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in folder.iterdir()}


def test_is_thirty_thousand_pairs_and_the_same_everywhere(files):
    """The corpus has thirty thousand pairs. Hash seeds, set order and library versions do not change it."""
    sizes = {"train": 28500, "valid": 500, "test": 1000}
    assert {name: len(lines) for name, lines in files.items()} == {
        f"{split}.{language}": size for split, size in sizes.items() for language in ("de", "en")
    }
    corpus = repr(generate_corpus.corpus(1234)).encode()
    assert hashlib.sha256(corpus).hexdigest() == "2ebb1ba128b349ddcbdfb4e9b1af00f2963fc0754b79bfc19bc67043c9ed74f8"


@pytest.mark.parametrize("language", ["de", "en"])
def test_no_sentence_occurs_twice_and_all_are_whole(files, language):
    """No sentence repeats. All start with a capital, end in a full stop or question mark, and have 3 to 25 words."""
    sentences = [line for split in SPLITS for line in files[f"{split}.{language}"]]
    assert len(set(sentences)) == len(sentences) == 30000
    for line in sentences:
        assert line[0].isupper() and line[-1] in ".?", line
        assert not set("{}") & set(line) and ",." not in line and "  " not in line, line
        assert 3 <= len(line.split()) <= 25, line
