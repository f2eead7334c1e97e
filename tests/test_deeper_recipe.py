"""`make deeper`: its text, its summary and its plan."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from recipes.deeper import cell, pairs, summary


def test_near_misses_are_one_change_away() -> None:
    generator, kinds = random.Random(1), Counter()
    for number in range(300):
        words = [f"w{generator.randrange(6)}" for _ in range(1 + number % 7)]
        found = pairs.near_miss(words, ["x0", "x1"], generator)
        changed = [place for place, (a, b) in enumerate(zip(words, found)) if a != b]
        assert len(found) == len(words)
        if len(changed) == 1:
            assert found[changed[0]][0] == "x"
            kinds["replaced"] += 1
        else:
            one, two = changed
            assert two == one + 1 and [found[one], found[two]] == [words[two], words[one]]
            kinds["swapped"] += 1
    assert min(kinds.values()) > 80


def test_texts_share_no_pair(tmp_path: Path) -> None:
    """Half of each are translations, which the others of the same split are not, and no split has another's."""
    given = ["--pretrain", "300", "--examples", "60", "--held-out", "20", "--words", "30"]
    subprocess.run([sys.executable, "-m", "recipes.deeper.pairs", tmp_path, *given], cwd=ROOT, check=True)
    others = pairs.generated("train", 400, 30)
    right = {f"{one} ||| {other}" for one, other in others}
    seen: set[str] = set()
    for split, size in (("train", 60), ("valid", 20), ("test", 20)):
        lines = (tmp_path / f"pairs.{split}").read_text().splitlines()
        labels = (tmp_path / f"label.{split}").read_text().splitlines()
        assert len(lines) == len(labels) == size and Counter(labels) == {"yes": size // 2, "no": size // 2}
        assert all((line in right) == (label == "yes") for line, label in zip(lines, labels))
        firsts = {line.partition(" |||")[0] for line in lines}
        assert not firsts & seen
        seen |= firsts
    words = [
        *(tmp_path / "pretrain.train").read_text().splitlines(),
        *(tmp_path / "pretrain.valid").read_text().splitlines(),
    ]
    assert len(words) == 300 and set(words) <= right and not {it.partition(" |||")[0] for it in words} & seen


def test_best_rate_is_chosen_on_validation() -> None:
    def run(lr: str, seed: int, valid: float, test: float) -> dict:
        return {
            "scheme": "dt-fixup",
            "layers": "8",
            "lr": lr,
            "seed": seed,
            "valid": valid,
            "test": test,
            "diverged": False,
        }

    results = [run("1e-3", 1, 0.7, 0.9), run("1e-3", 2, 0.7, 0.9), run("5e-4", 1, 0.9, 0.6), run("5e-4", 2, 0.8, 0.8)]
    (row,) = summary.rows(results)
    # Student's t for two values a and b is 12.706 |a - b| / 2: 0.7 ± 1.271.
    assert row["best rate"] == "5e-4" and row["accuracy, test"] == "0.700 (-0.571 to 1.971)"


def test_accuracy_is_read_or_refused() -> None:
    assert cell.accuracy("x | accuracy 51.2\n| INFO | valid on 'test' | loss 1 | accuracy 87.5 | wps 3\n") == 0.875
    with pytest.raises(ValueError, match="the log has no accuracy"):
        cell.accuracy("| loss 1.0 |")


@pytest.mark.parametrize("given, said", [("SCHEMES=t-fixup", "SCHEMES=t-fixup is unknown"), ("SCHEMES=dt-fixup", "")])
def test_schemes_that_new_layers_can_have(given: str, said: str, tmp_path: Path) -> None:
    command = ["make", "-n", "-f", "recipes/deeper/Makefile", f"PYTHON={sys.executable}", f"RUNS={tmp_path}", given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (said in done.stderr) if said else ("--more-scheme dt-fixup --more-layers 24" in done.stdout), done.stderr
    assert (done.returncode == 0) == (not said)
