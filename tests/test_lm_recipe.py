"""The language model's recipe: its text, its score, and a small chain run from the shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import front

from recipes.lm import python_docs
from recipes.recipe import read
from recipes.steps.score import perplexity
from recipes.training import Run

MODULE = '''"""A module about %s, which says in a whole sentence what it is for.

>>> this is an example, and no prose at all.

    a  table  of  things:

It goes on (with a second paragraph, that is long enough) here.
"""


def function():
    "This function does a thing, and says so in nine words."
    x = "This is a string like any other, and is no documentation."
'''
TOPICS = "topics = {'if': 'The if statement is used for conditional execution of a suite.\\n\\nx ::= y'}\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library: enough modules for every split."""
    for number in range(80):
        (tmp_path / f"lib/m{number}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"lib/m{number}.py").write_text(MODULE % f"the number {number}")
    for name, text in (("test/test_m.py", MODULE % "tests"), ("pydoc_data/topics.py", TOPICS)):
        (tmp_path / "lib" / name).parent.mkdir()
        (tmp_path / "lib" / name).write_text(text)
    return tmp_path / "lib"


def test_corpus(library: Path) -> None:
    """Is every paragraph in one split, without test modules, and are the topics read?"""
    found = python_docs.corpus(library)
    every = [line for lines in found.values() for line in lines]
    assert len(every) == len(set(every)) == 80 + 2 + 1
    assert "The if statement is used for conditional execution of a suite ." in every
    assert not any("tests" in line or "example" in line or "string like" in line for line in every)
    assert all(found.values()) and len(found["train"]) > 10 * max(len(found["valid"]), len(found["test"])) / 2
    for split, lines in found.items():
        for line in lines:
            if "the number" in line:
                assert python_docs.split_of(f"m{line.split('the number ')[1].split()[0]}.py") == split


def test_perplexity_is_read_or_refused():
    line = "INFO:fairseq_cli.eval_lm:Loss (base 2): 9.5818, Perplexity: 766.32"
    assert perplexity(["something", line]) == "766.32"
    dated = "2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | Loss (base 2): 9.5818, Perplexity: 766.32"
    assert perplexity([dated]) == "766.32"
    for lines in ([], [line, line], ["Loss (base 2): nan, Perplexity: nan"]):
        with pytest.raises(ValueError, match=r"found \d perplexities in fairseq-eval-lm's output; expected one"):
            perplexity(lines)


def make(runs: Path, library: Path, *words: str, step: str = "", updates: int = 12) -> subprocess.CompletedProcess:
    sizes = ("embed", "input", "output", "ffn-embed")
    args = " ".join(f"--decoder-{size}-dim 16" for size in sizes) + " --decoder-attention-heads 2"
    # With these betas radam makes its first step at update 6, and equal checkpoints are not averaged.
    small = [f"UPDATES={updates}", "LAYERS=2", f"ARGS={args} --save-interval-updates 3"]
    small += [f"PREPARE_ARGS=--merges 20 --library {library}"]
    return front(f"lm-demo{step}", f"RUNS={runs}", *small, *words)


@pytest.mark.nightly
def test_the_whole_chain(tmp_path: Path, library: Path) -> None:
    """Are a folded and an unfolded method evaluated and compared, and is a longer training resumed?"""
    for number in range(80):
        wordy = [f"'It does the thing number {number} times {n}, and says so in many words.'" for n in range(10)]
        text = "".join(f"def function{n}():\n    {words}\n\n\n" for n, words in enumerate(wordy))
        (library / f"m{number}.py").write_text(text)
    for method in ("admin", "pre-ln"):
        done = make(tmp_path, library, f"METHOD={method}")
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    head, perplexities, *_ = (
        line.split() for line in next(tmp_path.glob("lm-demo/pre-ln-*/at-12*/summary.txt")).open() if "  " in line
    )
    assert head == ["Admin,", "constant", "Pre-LN"] and perplexities[0] == "perplexity" and len(perplexities) == 3
    assert (tmp_path / "results.csv").read_text().count("lm-demo,") == 2
    more = make(tmp_path, library, "METHOD=pre-ln", step="-train", updates=15)
    assert more.returncode == 0 and "update     15/15" in more.stdout and "update     12/15" not in more.stdout


def test_a_changed_library_is_noticed(tmp_path: Path, library: Path) -> None:
    """Does only the library's content count? A changed library is read again, a moved one is not."""

    def key(folder: Path) -> str:
        return Run(read("lm-demo", {"PREPARE_ARGS": f"--library {folder}"})).text.folder.name

    before = key(library)
    (library / "m5.py").write_text(MODULE % "the digit 5")
    after = key(library)
    assert before != after == key(library.rename(tmp_path / "moved"))
