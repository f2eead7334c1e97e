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

from recipes import options as opts
from recipes import recipe
from recipes.steps import results
from recipes.steps.common import read_lines, write_lines
from recipes.training import Run

SMALL = ["PRESET=small", "ARGS=--max-epoch 2 --log-interval 5"]
"""A tiny model, trained for two epochs on the miniature archives."""
TEXT = "--merges 300 --expect="
"""Options of the text. --expect= takes away the numbers of pairs: they are not real."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[str]:
    """An option of the text for the archives on a local server. The table has no sizes or checksums for them."""
    folder = archives.make(tmp_path_factory.mktemp("archives"), pairs=900)
    table = tmp_path_factory.mktemp("table") / "archives.tsv"
    with Server(folder) as server:
        table.write_text("".join(f"{path.name}\t-\t-\t{server.url}/{path.name}\n" for path in folder.iterdir()))
        yield f"--table {table}"


def make(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    return front(recipe, *SMALL, *variables)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    # fairseq's own log holds the time and the path; a lock names its last owner.
    files = [path for path in files if not path.name.endswith(("preprocess.log", ".guard"))]
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
    given = [f"RUNS={runs}", f"PREPARE_ARGS={TEXT} {source}"]
    assert make("iwslt14-prepare", f"RUNS={whole}", *given[1:]).returncode == 0
    run = "iwslt14/admin-small-merges300-s1"
    generating = f"{run}/at-2-epochs/generate.log"
    for stage in ("iwslt14/text-*/tok/*.part", f"{run}/checkpoints/checkpoint*.pt", generating):
        kill_at(stage, runs, *given)
    done = make("iwslt14", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    (data,) = runs.glob("iwslt14/text-*")
    assert digests(data) == digests(whole / data.relative_to(runs))
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
    assert (runs / run / "at-2-epochs/train.log").read_text() == log

    # Every 23rd pair of the cleaned training text is for validation; the test set joins five sets.
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
    every = "--valid-every 50" if target == "fr" else ""
    done = make(recipe, f"RUNS={tmp_path}", f"PREPARE_ARGS={TEXT} {source} {every}")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = results.read(tmp_path / "results.csv")
    # Only German compounds are split.
    assert row["recipe"] == recipe and "case:mixed" in row["signature"] and bool(row["compound"]) == (target == "de")
    (data,) = tmp_path.glob(f"wmt14/en-{target}/text-*")
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


BLOBS = {
    "split/train.de": "30660ed508af1be868cfd3f09a0bd7d71b4517c6",
    "split/train.en": "3b48a76e28ede930fd5e177dce14686147a10ee3",
    "bpe/train.de": "f0a0c7d52fa302aed605f8e0fabe10217cf7b336",
    "bpe/train.en": "6cec12532b28da3d5f9b7251f8011f6d84604738",
}
"""git's ids of files of fairseq's own preparation of IWSLT'14: its tmp/train.* and, after BPE, its train.*."""


def test_the_text_of_iwslt14_is_fairseqs():
    """If `make iwslt14-prepare` has made the text here, it is fairseq's, byte for byte."""
    texts = sorted(ROOT.glob("runs/iwslt14/text-*/bin"))
    if not texts:
        pytest.skip("needs the text of IWSLT'14: make iwslt14-prepare")
    command = ["git", "hash-object", *BLOBS]
    done = subprocess.run(command, cwd=texts[0].parent, capture_output=True, text=True, check=True)
    assert dict(zip(BLOBS, done.stdout.split())) == BLOBS


def test_a_text_of_another_size_than_published_is_refused(tmp_path):
    text = planned("iwslt14", f"RUNS={tmp_path}").text
    assert text.options.expect == [160239, 7283, 6750]
    for split, count in (("train", 160239), ("valid", 7282)):
        for path in text.files("split", split):
            write_lines(path, ["a line"] * count)
    with pytest.raises(ValueError, match="valid.de has 7282 lines, expected 7283, as in the published text"):
        text.check()


def test_the_test_set_of_wmt14_is_not_normalised(tmp_path):
    """As in the papers' scripts, WMT'14's test set keeps its quotes; the training text's are normalised."""
    folder, members = archives.make(tmp_path / "archives", pairs=50), archives.contents(pairs=50)["test-full.tgz"]
    quoted = {name: data.replace("Anna\u2019s".encode(), "\u201eAnna\u201c".encode()) for name, data in members.items()}
    archives.write_tar(folder / "test-full.tgz", quoted)
    (tmp_path / "table.tsv").touch()
    given = {"DATA": str(folder), "PREPARE_ARGS": f"{TEXT} --table {tmp_path}/table.tsv", "RUNS": f"{tmp_path}/runs"}
    text = Run(recipe.read("wmt14-ende-6l", given | {"PRESET": "small"})).text
    text.make()
    texts = [text.folder / f"tok/{name}.de" for name in ("newstest2014", "commoncrawl")]
    assert ["\u201e" in path.read_text(encoding="utf-8") for path in texts] == [True, False]


# -- plans -----------------------------------------------------------------------------------------------------------


def planned(target: str, *words: str) -> Run:
    return Run(recipe.read(target, {"RUNS": "nowhere"} | dict(word.split("=", 1) for word in words)))


PLANS = [
    (
        "iwslt14", 1,
        "--encoder-layers 6 --decoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 1024 --lr 7e-4 "
        "--warmup-updates 6000 --dropout 0.3 --attention-dropout 0.1 --activation-dropout 0.1 "
        "--weight-decay 0.0001 --max-tokens 4096 --update-freq 1 --max-epoch 90 --keep-last-epochs 10",
        "--beam 5 --lenpen 1", "--clean lengths 1 175 ratio 1.5",
    ),
    (
        "wmt14-ende-18l", 4,
        "--encoder-layers 18 --decoder-layers 18 --encoder-ffn-embed-dim 2048 --lr 1e-3 --warmup-updates 8000 "
        "--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --weight-decay 0 --max-tokens 8192 "
        "--update-freq 1 --max-epoch 100",
        "--beam 4 --lenpen 0.6", "--clean lengths 1 80",
    ),
    (
        "wmt14-enfr-6l", 8,
        "--encoder-layers 6 --lr 7e-4 --warmup-updates 8000 --max-tokens 8000 --update-freq 10 --max-epoch 50",
        "--beam 5 --lenpen 0.8", "--valid-every 1333",
    ),
    (
        "wmt14-enfr-60l", 16,
        "--encoder-layers 60 --decoder-layers 12 --max-tokens 5000 --update-freq 16 --max-epoch 50", "--beam 5", "",
    ),
    (
        "wmt14-enfr-60l-deepnmt", 16,
        "--encoder-layers 60 --decoder-layers 12 --lr 1e-3 --dropout 0.2 --max-tokens 3200 --update-freq 8 "
        "--max-epoch 50 --save-dir nowhere/wmt14/en-fr/60l-deepnmt/admin-s1/checkpoints",
        "--beam 10 --lenpen 1", "",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("target", "gpus", "train", "generate", "prepare"), PLANS)
def test_the_plan_is_the_papers(target, gpus, train, generate, prepare):
    run = planned(target, f"GPUS={gpus}")
    shared = (
        "--optimizer radam --adam-betas (0.9, 0.98) --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7 "
        "--label-smoothing 0.1 --clip-norm 0 --fp16 --fp16-scale-window 256 --threshold-loss-scale 0.03125 "
        f"--share-all-embeddings --distributed-world-size {gpus} --no-last-checkpoints"
    )
    given = " ".join(opts.words(run.recipe.options["prepare"]))
    commands = {f"{shared} {train}": run.train_words(), generate: run.generate_words(), prepare: [given]}
    for expected, words in commands.items():
        command = " ".join(words)
        for option in re.findall(r"--\S+(?: (?!--)(?:\([^)]*\)|\S+))*", expected):
            assert re.search(rf"(?<!\S){re.escape(option)}(?!\S)", command), option
    assert run.key()["recipe"] == target and "--max-update" not in " ".join(run.train_words())
    assert run.recipe.file.compounds == ("ende" in target)


def test_a_stranger_reads_the_command_in_the_recipe():
    """The paper's options stand in the recipe's file as a person types them."""
    text = (ROOT / "recipes/iwslt14.yaml").read_text(encoding="utf-8")
    assert "--warmup-updates 6000" in text and "--lr 7e-4" in text and "--beam 5" in text
    numbers = {(row["recipe"], row["method"]): row["bleu"] for row in results.papers()}
    assert len(numbers) == 21 and numbers["iwslt14", "admin"] == "35.67 ± 0.15"
    assert numbers["wmt14-ende-6l", "admin"] == "27.90" and numbers["wmt14-enfr-60l", "post-ln"] == "failed"


def test_other_machines_go_on_with_a_run():
    """A run resumes on other machines: what made it includes its tokens, but nothing about machines."""
    one, four = (planned("wmt14-ende-6l", f"GPUS={gpus}", "ARGS=--max-tokens 4096") for gpus in (1, 4))
    assert one.records() == four.records() and one.folder == four.folder
    assert one.records()[one.folder]["tokens of an update"] == "32768"
    assert (one.machine.update_freq, four.machine.update_freq) == (8, 2)
