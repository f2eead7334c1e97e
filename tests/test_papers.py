"""The papers' recipes run from download to score, on archives of the real layout, and survive kills."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import archives
import pytest
from conftest import ROOT, front, make_environment
from server import Server

from recipes import recipe
from recipes.chain import Chain
from recipes.steps import results
from recipes.steps.common import read_lines
from recipes.text import compare as published
from recipes.translation import Translation

SMALL = ["PRESET=small", "EXPECT=", "MERGES=300", "EPOCHS=2", "LOG_EVERY=5"]
"""A tiny model, trained for two epochs on the miniature archives. EXPECT= is empty: their line counts are not real."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[list[str]]:
    """A recipe's variables for the archives on a local server. The table has no sizes or checksums for them."""
    folder = archives.make(tmp_path_factory.mktemp("archives"), pairs=900)
    table = tmp_path_factory.mktemp("table") / "archives.tsv"
    with Server(folder) as server:
        table.write_text("".join(f"{path.name}\t-\t-\t{server.url}/{path.name}\n" for path in folder.iterdir()))
        yield [f"TABLE={table}"]


def make(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    return front(recipe, *SMALL, *variables)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    # fairseq's own log holds the time and the path; a lock names its last owner.
    files = [path for path in files if not path.name.endswith(("preprocess.log", ".guard"))]
    files = [path for path in files if path.parent.name != ".keys"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kill_at(stage: str, runs: Path, *given: str) -> None:
    """Start the recipe, and kill it and all its processes as soon as a file matches the pattern."""
    making = subprocess.Popen(
        [sys.executable, "-m", "recipes", "iwslt14", *SMALL, *given], cwd=ROOT, env=make_environment(),
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(runs.glob(stage)):
        assert making.poll() is None and time.monotonic() < deadline, f"{stage} never came"
        time.sleep(0.01)
    os.killpg(making.pid, signal.SIGKILL)
    making.wait()


@pytest.mark.slow
def test_iwslt14_from_download_to_a_score_killed_three_times(source, tmp_path):
    """A recipe is killed while it makes the text, trains and translates. It still makes the same text and one row."""
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    given = [f"RUNS={runs}", "ANALYSES=", *source]
    assert make("iwslt14-prepare", f"RUNS={whole}", *source).returncode == 0
    run = "iwslt14/admin-small-s1"
    for stage in ("iwslt14/data/tok/*.part", f"{run}/checkpoints/checkpoint*.pt", f"{run}/generate.txt.*.part"):
        kill_at(stage, runs, *given)
    done = make("iwslt14", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(runs / "iwslt14/data") == digests(whole / "iwslt14/data")
    assert digests(runs / "archives") == digests(whole / "archives")
    log = (runs / run / "train.log").read_text(encoding="utf-8")
    assert "Loaded checkpoint" in log and log.count("num. shared model params") == 2
    assert log.count("Admin: profiled") == 1, "a resumed run profiles nothing"
    (row,) = results.read(runs / "results.csv")
    assert (row["recipe"], row["method"], row["preset"], row["epochs"]) == ("iwslt14", "admin", "small", "2.00")
    assert "case:lc" in row["signature"] and "tok:none" in row["tokenised_signature"] and row["compound"] == ""
    checkpoints = {path.name for path in (runs / run / "checkpoints").iterdir()}
    assert {"checkpoint1.pt", "checkpoint2.pt", "checkpoint_best.pt"} <= checkpoints and len(checkpoints) <= 4
    assert list((runs / run / "tensorboard").rglob("events.*"))

    # Every 23rd pair of the cleaned training text is for validation; the test set joins five sets.
    data = runs / "iwslt14/data"
    train, valid, test = (read_lines(data / f"split/{split}.de") for split in ("train", "valid", "test"))
    talks = read_lines(data / "tok/talks.de")
    assert valid == talks[22::23] and len(train) == len(talks) - len(valid)
    raw = read_lines(data / "raw/test.de")
    assert len(raw) == len(test) == 60
    # The reference keeps its apostrophes; the translated text has Moses' and is lower-cased.
    assert "Anna\u2019s" in " ".join(raw) and "anna &apos; s" in " ".join(test)
    assert all(line == line.lower() for line in [*train, *valid, *test])
    assert not any("talkid" in line or "<" in line for line in train) and any("&lt;" in line for line in train)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "target"), [("wmt14-ende-6l", "de"), ("wmt14-enfr-6l", "fr")])
def test_wmt14_from_download_to_a_score(recipe, target, source, tmp_path):
    every = ["VALID_EVERY=50"] if target == "fr" else []
    done = make(recipe, f"RUNS={tmp_path}", *every, "ANALYSES=", *source)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = results.read(tmp_path / "results.csv")
    # Only German compounds are split.
    assert row["recipe"] == recipe and "case:mixed" in row["signature"] and bool(row["compound"]) == (target == "de")
    data = tmp_path / f"wmt14/en-{target}/data"
    train, valid, test = (read_lines(data / f"split/{split}.en") for split in ("train", "valid", "test"))
    held = len(archives.contents(pairs=900)["dev.tgz"]["dev/newstest2013.en"].splitlines())
    units = [[len(line.split()) for line in read_lines(data / f"bpe/train.{name}")] for name in ("en", target)]
    if target == "de":
        # Three corpora, cleaned before BPE by length alone; validation on newstest2013.
        assert len(valid) == held and max(len(line.split()) for line in train) <= 80 and len(units[0]) == len(train)
    else:
        # Five corpora; nothing is dropped before BPE; after BPE, cleaned by length and ratio.
        parts = ("europarl-v7", "commoncrawl", "undoc", "news-commentary-v9", "giga-fren")
        whole = [line for part in parts for line in read_lines(data / f"tok/{part}.en")]
        assert valid == whole[49::50] and len(train) == len(whole) - len(valid) and 0 < len(units[0]) < len(train)
        assert all(max(pair) <= 250 and max(pair) <= 1.5 * min(pair) for pair in zip(*units))
    assert len(test) == held


def test_a_text_is_compared_with_what_is_published(tmp_path, caplog):
    """A wrong number of pairs is refused. A message says whether the files equal fairseq's, by git blob ids."""
    settings = planned("iwslt14").settings
    assert settings.EXPECT == ("160239", "7283", "6750") and settings.BLOBS["split/train.de"].startswith("30660ed508af")
    for language in ("de", "en"):
        (tmp_path / f"test.{language}").write_text("a line\n" * 3)
    git = subprocess.run(["git", "hash-object", tmp_path / "test.de"], capture_output=True, text=True).stdout.strip()

    def compare(pairs: dict[str, str], **blobs: str) -> str:
        caplog.clear()
        published(tmp_path, ("de", "en"), pairs, {f"test.{code}": value for code, value in blobs.items()})
        return caplog.text

    caplog.set_level("INFO")
    assert "the published text, byte for byte." in compare({"test": "3"}, de=git)
    assert "not the published text, by git's blob ids: test.en." in compare({}, de=git, en="0" * 40)
    # Other units for the published words: BPE may choose among equally frequent pairs.
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/train.de").write_text("a li@@ ne\n")
    caplog.clear()
    published(tmp_path, ("de", "en"), {}, {"test.de": git, "bpe/train.de": "0" * 40})
    assert "another order: bpe/train.de." in caplog.text and "not the published text" not in caplog.text
    for expected in ("2", "4"):
        with pytest.raises(ValueError, match=f"test.de has 3 lines, expected {expected}, as in the published text"):
            compare({"test": expected})


def test_the_test_set_of_wmt14_is_not_normalised(tmp_path):
    """As in the papers' scripts, WMT'14's test set keeps its quotes; the training text's are normalised."""
    folder, members = archives.make(tmp_path / "archives", pairs=50), archives.contents(pairs=50)["test-full.tgz"]
    quoted = {name: data.replace("Anna\u2019s".encode(), "\u201eAnna\u201c".encode()) for name, data in members.items()}
    archives.write_tar(folder / "test-full.tgz", quoted)
    (tmp_path / "table.tsv").touch()
    given = {"DATA": str(folder), "TABLE": f"{tmp_path}/table.tsv", "RUNS": f"{tmp_path}/runs", "PRESET": "small"}
    pipeline = Translation(recipe.read("wmt14-ende-6l", given))
    texts = [pipeline.text.folder / f"tok/{name}.de" for name in ("newstest2014", "commoncrawl")]
    Chain(pipeline.steps()).make(texts)
    assert ["\u201e" in path.read_text(encoding="utf-8") for path in texts] == [True, False]


# -- plans -----------------------------------------------------------------------------------------------------------


def planned(target: str, *words: str) -> Translation:
    return Translation(recipe.read(target, {"RUNS": "nowhere"} | dict(word.split("=", 1) for word in words)))


PLANS = [
    (
        "iwslt14", 1,
        "--encoder-layers 6 --decoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 1024 --lr 0.0007 "
        "--warmup-updates 6000 --dropout 0.3 --attention-dropout 0.1 --activation-dropout 0.1 "
        "--weight-decay 0.0001 --max-tokens 4096 --update-freq 1 --max-epoch 90 --keep-last-epochs 10",
        {"BEAM": 5, "LENPEN": 1, "COMPOUNDS": False, "CLEAN": ("--lengths", "1", "175", "--ratio", "1.5")},
    ),
    (
        "wmt14-ende-18l", 4,
        "--encoder-layers 18 --decoder-layers 18 --encoder-ffn-embed-dim 2048 --lr 0.001 --warmup-updates 8000 "
        "--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --weight-decay 0.0 --max-tokens 8192 "
        "--update-freq 1 --max-epoch 100",
        {"BEAM": 4, "LENPEN": 0.6, "COMPOUNDS": True, "CLEAN": ("--lengths", "1", "80")},
    ),
    (
        "wmt14-enfr-6l", 8,
        "--encoder-layers 6 --lr 0.0007 --warmup-updates 8000 --max-tokens 8000 --update-freq 10 --max-epoch 50",
        {"BEAM": 5, "LENPEN": 0.8, "COMPOUNDS": False, "VALID_EVERY": 1333},
    ),
    (
        "wmt14-enfr-60l", 16,
        "--encoder-layers 60 --decoder-layers 12 --max-tokens 5000 --update-freq 16 --max-epoch 50", {"BEAM": 5},
    ),
    (
        "wmt14-enfr-60l-deepnmt", 16,
        "--encoder-layers 60 --decoder-layers 12 --lr 0.001 --dropout 0.2 --max-tokens 3200 --update-freq 8 "
        "--max-epoch 50 --save-dir nowhere/wmt14/en-fr/60l-deepnmt/admin-paper-s1/checkpoints",
        {"BEAM": 10, "LENPEN": 1.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("target", "gpus", "options", "settings"), PLANS)
def test_the_plan_is_the_papers(target, gpus, options, settings):
    pipeline = planned(target, f"GPUS={gpus}")
    command = " ".join(pipeline.command())
    shared = (
        "--optimizer radam --adam-betas (0.9, 0.98) --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7 "
        "--label-smoothing 0.1 --clip-norm 0.0 --fp16 --fp16-scale-window 256 --threshold-loss-scale 0.03125 "
        f"--share-all-embeddings --distributed-world-size {gpus} --tensorboard-logdir"
    )
    for option in re.findall(r"--\S+(?: (?!--)(?:\([^)]*\)|\S+))*", f"{shared} {options}"):
        assert re.search(rf"(?<!\S){re.escape(option)}(?!\S)", command), option
    assert {name: getattr(pipeline.settings, name) for name in settings} == settings
    assert pipeline.recipe.row == target and "--max-update" not in command


def test_other_machines_go_on_with_a_run():
    """A run resumes on other machines: its fixed settings include its tokens, but nothing about machines."""
    one, four = (planned("wmt14-ende-6l", gpus, "MEMORY=16").resume_settings() for gpus in ("GPUS=1", "GPUS=4"))
    assert one == four and one["--tokens-per-update"] == "32768"
