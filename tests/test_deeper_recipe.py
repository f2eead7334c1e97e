"""`make deeper`: its text, its table and its plan."""

from __future__ import annotations

import gzip
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import front

from recipes.research import runs, texts
from recipes.research.grid import of
from recipes.research.ranking import table
from recipes.research.rows import read_results
from recipes.steps.common import write_lines


def test_near_misses_differ_in_two_places() -> None:
    """A near miss has two words of another sentence, or two swapped neighbours. One word alone is replaced."""
    generator, kinds = random.Random(1), Counter()
    for number in range(300):
        words = [f"w{generator.randrange(6)}" for _ in range(1 + number % 7)]
        found = texts.near_miss(words, ["x0", "x1"], generator)
        changed = [place for place, (a, b) in enumerate(zip(words, found, strict=True)) if a != b]
        assert len(changed) == min(2, len(words))
        swapped = sorted(found) == sorted(words)
        assert not swapped or changed[1] == changed[0] + 1
        kinds[swapped] += 1
    assert min(kinds[True], kinds[False]) > 80


def test_texts_share_no_pair(tmp_path: Path) -> None:
    """Half of each split's pairs are translations, the other half are not, and no two splits share a pair."""
    text = texts.generated_pairs(400, 30)
    right = {f"{one} ||| {other}" for one, other in text}
    texts.write_classified(tmp_path, text, pretrain=300, examples=60, held_out=20)
    seen: set[str] = set()
    for split, size in (("train", 60), ("valid", 20), ("test", 20)):
        lines = (tmp_path / f"pairs.{split}").read_text().splitlines()
        labels = (tmp_path / f"label.{split}").read_text().splitlines()
        assert len(lines) == len(labels) == size and Counter(labels) == {"yes": size // 2, "no": size // 2}
        assert all((line in right) == (label == "yes") for line, label in zip(lines, labels))
        firsts = {line.partition(" |||")[0] for line in lines}
        assert not firsts & seen
        seen |= firsts
    words = [line for split in ("train", "valid") for line in (tmp_path / f"pretrain.{split}").read_text().splitlines()]
    assert len(words) == 300 and set(words) <= right and not {it.partition(" |||")[0] for it in words} & seen
    with pytest.raises(ValueError, match="400 different pairs, 401 are needed. Give PRETRAIN= or EXAMPLES= that fit."):
        texts.write_classified(tmp_path, texts.generated_pairs(400, 30), pretrain=301, examples=60, held_out=20)


def test_a_text_of_ones_own_may_be_compressed(tmp_path: Path) -> None:
    """A user's text may be compressed, as for `make own`, and counts by its content.

    fairseq takes carriage returns as line ends. Here, they do not end a sentence.
    """
    sides = ["".join(f"{word}{number}\r{word}{number + 1} b\n" for number in range(60)) for word in ("w", "X")]
    (tmp_path / "given").mkdir()
    (tmp_path / "given/train.de.gz").write_bytes(gzip.compress(sides[0].encode()))
    (tmp_path / "given/train.en").write_bytes(sides[1].encode())
    sizes = {"PRESET": "quick", "PRETRAIN": "30", "EXAMPLES": "10", "HELD_OUT": "5", "RUNS": str(tmp_path)}
    grid = of("deeper", {**sizes, "DATA": f"{tmp_path}/given"})
    grid.run({}).make("prepare")
    (made,) = (tmp_path / "deeper-text-quick").glob("text-*")
    assert re.match(rb"w(\d+) w\d+ b \|\|\| x\1 x\d+ b\n", (made / "text/pretrain.train").read_bytes())
    assert {path.name for path in (made / "bin").iterdir()} >= {"dict.txt", "input0", "label", "train.bin"}
    assert grid.run({}).is_done("prepare")
    (tmp_path / "given/train.en").write_bytes(sides[0].encode())
    assert not grid.run({}).is_done("prepare"), "another text under the same name"


def run(scheme: str, lr: str, seed: int, valid: float, test: float, layers: str = "8") -> dict:
    found = {"scheme": scheme, "layers": layers, "lr": lr, "seed": str(seed), "diverged": False, "valid": valid}
    return {**found, "test": test, "params": 1, "seconds": 2, "hardware": "h", "commit": "c"}


def test_the_first_seed_chooses_the_rate_on_validation() -> None:
    """The first seed's validation chooses the rate, not the test set or other seeds. Only this rate is compared."""
    tried = [("1e-3", 0.7, 0.9), ("5e-4", 0.9, 0.6), ("2e-4", 0.9, 0.5), ("2e-3", 0.8, 0.9)]
    results = [run("dt-fixup", rate, 1, valid, test) for rate, valid, test in tried]
    results += [run("none", "1e-3", 1, 0.5, 0.5, "0"), run("dt-fixup", "2e-4", 2, 0.4, 0.7)]
    ours, alone = table(results)
    assert ours["best rate"] == "2e-4 (edge)" and ours["accuracy, test"] == "0.500, 0.700"
    assert alone["best rate"] == "1e-3" and alone["accuracy, test"] == "0.500"


def test_accuracy_is_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'x | {"accuracy": "51.2"}\n{"valid_accuracy": "75", "test_accuracy": "60"}\n{"valid_accuracy": "87.5"}\n'
    )
    assert (runs.accuracy(log, "valid"), runs.accuracy(log, "test")) == (0.875, 0.6)


def test_the_runs_of_a_grid_of_new_layers(tmp_path: Path) -> None:
    """The grid's runs: the encoder, then the first seed at every rate, with the given encoder options."""
    args = "--dropout 0.1 --attention-dropout 0.1"
    grid = of("deeper", {"ENCODER_LR_FACTOR": "0", "ARGS": args, "RUNS": str(tmp_path)})
    stages = grid.stages()
    (encoder,), tried = next(stages), next(stages)
    words = " ".join(grid.run(encoder).train_words())
    assert (
        "--arch masked_lm_admin " in words and "--finetune-from-model" not in words and "--admin-ffn-init" not in words
    )
    assert "--clip-norm 0 --lr 1e-3 " in words and "--seed 1 " in words and "--max-update 5000 " in words
    assert {axes["seed"] for axes in tried} == {"1"} and len(tried) == 4 * (1 + 6 * 3)
    (deep,) = (axes for axes in tried if grid.name(axes) == "dt-fixup-24l-lr1e-4-s1")
    checkpoint = tmp_path / "deeper-dropout0.1-attention-dropout0.1-factor0/encoder/checkpoints/checkpoint_3_5000.pt"
    write_lines(checkpoint, [])
    words = " ".join(grid.run(deep).train_words())
    assert "--pretrained-lr-factor 0.0 " in words and "--dropout 0.1 --attention-dropout 0.1" in words
    assert "--more-layers 24 --more-scheme dt-fixup " in words and "--warmup-updates 0 " in words
    assert f"--finetune-from-model {checkpoint}" in words and "--clip-norm 5 " in words


@pytest.mark.nightly
def test_new_layers_end_to_end(tmp_path: Path) -> None:
    done = front("deeper", "PRESET=quick", "SEEDS=1 2", "SCHEMES=admin", f"RUNS={tmp_path}", "JOBS=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| Admin " in done.stdout and "1 of 1 runs done" in done.stdout
    assert (tmp_path / "deeper-quick/accuracy.png").exists()
    seeds = [row["seed"] for row in read_results([tmp_path / "deeper-quick/runs.csv"])]
    assert sorted(seeds) == ["1", "1", "2", "2"]
