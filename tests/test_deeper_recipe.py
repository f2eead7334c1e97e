"""`make deeper`: its text, its summary and its plan."""

from __future__ import annotations

import gzip
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, front

from recipes.compare import grid_table
from recipes.deeper import pairs, standing, summary
from recipes.grid import judge, texts
from recipes.grid.front import read


def test_near_misses_differ_in_two_places() -> None:
    """Two words of another sentence, or two neighbours swapped; a sentence of one word has only that."""
    generator, kinds = random.Random(1), Counter()
    for number in range(300):
        words = [f"w{generator.randrange(6)}" for _ in range(1 + number % 7)]
        found = pairs.near_miss(words, ["x0", "x1"], generator)
        changed = [place for place, (a, b) in enumerate(zip(words, found)) if a != b]
        assert len(found) == len(words) and len(changed) == min(2, len(words))
        if all(found[place][0] == "x" for place in changed):
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


def test_a_text_of_ones_own_may_be_compressed(tmp_path: Path) -> None:
    """As make own takes it; and one that is not there is a line."""
    sides = ["\n".join(f"{word}{number} {word}{number + 1} b" for number in range(60)) + "\n" for word in ("w", "x")]
    (tmp_path / "given").mkdir()
    (tmp_path / "given/train.de.gz").write_bytes(gzip.compress(sides[0].encode()))
    (tmp_path / "given/train.en").write_text(sides[1])
    sizes = {"QUICK": "1", "PRETRAIN": "30", "EXAMPLES": "10", "HELD_OUT": "5", "RUNS": str(tmp_path)}
    texts.make(read("deeper", {**sizes, "DATA": f"{tmp_path}/given"}))
    made = tmp_path / "deeper-quick-text"
    assert re.match(r"w(\d+) w\d+ b \|\|\| x\1 x\d+ b\n", (made / "text/pretrain.train").read_text())
    assert {path.name for path in (made / "bin").iterdir()} >= {"dict.txt", "input0", "label", "train.bin"}
    with pytest.raises((ValueError, OSError), match=f"{tmp_path}/none"):
        texts.make(read("deeper", {**sizes, "DATA": f"{tmp_path}/none", "RUNS": f"{tmp_path}/other"}))


def run(scheme: str, lr: str, seed: int, valid: float, test: float, layers: str = "8") -> dict:
    found = {"scheme": scheme, "layers": layers, "lr": lr, "seed": str(seed), "diverged": False, "valid": valid}
    return {**found, "test": test, "params": 1, "seconds": 2, "hardware": "h", "commit": "c"}


def test_the_first_seed_chooses_the_rate_on_validation(tmp_path: Path) -> None:
    """Not by the test set, nor by what another seed finds; and only that rate is among what is compared."""
    tried = [("1e-3", 0.7, 0.9), ("5e-4", 0.9, 0.6), ("2e-4", 0.9, 0.5), ("2e-3", 0.8, 0.9)]
    results = [run("dt-fixup", rate, 1, valid, test) for rate, valid, test in tried]
    results += [run("none", "1e-3", 1, 0.5, 0.5, "0"), run("dt-fixup", "2e-4", 2, 0.4, 0.7)]
    assert [(it.scheme, it.best) for it in standing.at_best_rates(results)] == [("dt-fixup", "2e-4"), ("none", "1e-3")]
    ours, alone = summary.rows(results)
    assert ours["best rate"] == "2e-4 (edge)" and ours["accuracy, test"] == "0.500, 0.700"
    assert alone["best rate"] == "1e-3" and alone["accuracy, test"] == "0.500"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("scheme,", "name,"), "has no scheme; expected results of a grid of scheme, layers, lr, seed. Give those."),
        (("diverged,", "d,"), "has no column diverged; expected the runs.csv of a grid. Give that."),
        ((",24,", ","), "row 1 has other columns than the first line names. Fix it."),
        ((",0.", ",zero"), "row 1: could not convert string to float: 'zero"),
    ],
)
def test_a_damaged_table_is_one_line(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    head, *rows = (ROOT / "docs/deeper.csv").read_text().splitlines()
    rows = [row for row in rows if ",24," in row]
    path.write_text("\n".join([head, *rows]).replace(*change, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {said}')}"):
        standing.read_results([path])


def test_a_carriage_return_ends_no_sentence(tmp_path: Path) -> None:
    """fairseq-preprocess takes it for the end of a line, and the labels would be those of other sentences."""
    for side in ("de", "en"):
        (tmp_path / f"train.{side}").write_bytes(b"".join(b"one %d\rtwo\n" % n for n in range(40)))
    given = ["--pretrain", "20", "--examples", "10", "--held-out", "5", "--text", tmp_path]
    done = subprocess.run([sys.executable, "-m", "recipes.deeper.pairs", tmp_path / "out", *given], cwd=ROOT)
    assert done.returncode == 0 and not [path for path in (tmp_path / "out").iterdir() if b"\r" in path.read_bytes()]


def test_differences_are_at_the_same_depth_and_seed(tmp_path: Path) -> None:
    results = []
    for scheme, accuracies in (("admin", (0.6, 0.7, 0.8)), ("post-ln", (0.51, 0.6, 0.69)), ("pre-ln", (0.7, 0.5, 0.9))):
        results += [run(scheme, "1e-3", seed, 0.5, test) for seed, test in enumerate(accuracies, 1)]
    results += [run("post-ln", "1e-3", seed, 0.5, 0.9, "24") for seed in (1, 2, 3)]
    admin, post, pre, deep = summary.rows(results)
    # 0.09, 0.1, 0.11: 0.1 +- 4.303 * 0.01 / sqrt(3) = 0.0248.
    assert admin["vs. Post-LN"] == "ahead: +0.100 (+0.075 to +0.125)" and admin["vs. Admin"] == ""
    assert post["vs. Admin"] == "behind: -0.100 (-0.125 to -0.075)" and admin["vs. DT-Fixup"] == ""
    assert pre["vs. Admin"].startswith("no difference shown: +0.000") and deep["vs. Admin"] == ""
    grid_table.write_csv(tmp_path / "runs.csv", results)
    assert standing.read_results([tmp_path / "runs.csv"]) == results


def test_accuracy_is_the_last_or_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'x | {"accuracy": "51.2"}\n{"valid_accuracy": "75", "test_accuracy": "60"}\n{"valid_accuracy": "87.5"}\n'
    )
    assert (judge.accuracy(log, "valid"), judge.accuracy(log, "test")) == (0.875, 0.6)
    with pytest.raises(ValueError, match="log: has no accuracy on train"):
        judge.accuracy(log, "train")


def test_the_runs_of_a_grid_of_new_layers(tmp_path: Path) -> None:
    """First the encoder; then the first seed at every rate, with the encoder's rate and dropout that are asked for."""
    grid = read("deeper", {"FACTOR": "0", "DROPOUT": "0.1", "RUNS": str(tmp_path)})
    stages = grid.stages()
    (encoder,), tried = next(stages), next(stages)
    assert "--finetune-from-model" not in grid.run(encoder).options and grid.run(encoder).judge == ""
    assert {point.axes["seed"] for point in tried} == {"1"} and len(tried) == 4 * (1 + 6 * 3)
    deep = next(point for point in tried if point.name == "dt-fixup-24l-lr1e-4-s1")
    words = " ".join(grid.run(deep).options)
    assert "--pretrained-lr-factor 0 " in words and "--dropout 0.1 --attention-dropout 0.1" in words
    assert "--more-scheme dt-fixup --more-layers 24 " in words and words.endswith("--warmup-updates 0")
    assert grid.run(deep).start == f"{tmp_path}/deeper-factor0-dropout0.1/encoder/checkpoints"


@pytest.mark.nightly
def test_new_layers_end_to_end(tmp_path: Path) -> None:
    done = front("deeper", "QUICK=1", "SEEDS=1 2", "SCHEMES=admin", f"RUNS={tmp_path}", "JOBS=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| Admin " in done.stdout and "encoder: trained; 1 of 1 runs done" in done.stdout
    assert (tmp_path / "deeper-quick/accuracy.png").exists()
    seeds = [row["seed"] for row in standing.read_results([tmp_path / "deeper-quick/runs.csv"])]
    assert sorted(seeds) == ["1", "1", "2", "2"]
