"""Do the papers' recipes run from download to a score, on archives of the real layout, and through kills?"""

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
import conftest
import pytest
from conftest import make_command, make_environment
from server import Server

from recipes.steps import counts, results
from recipes.steps.common import read_lines

ROOT = Path(__file__).parents[1]
SMALL = ["PRESET=small", "EXPECT=", "MERGES=300", "EPOCHS=2", "LOG_EVERY=5"]
"""A tiny model for two epochs on the miniature archives, whose numbers of lines are not the real ones'."""
PAPERS = {
    "iwslt14": ["iwslt14"],
    "wmt14-ende-6l": ["wmt14", "PAIR=en-de", "SIZE=6l"],
    "wmt14-enfr-6l": ["wmt14", "PAIR=en-fr", "SIZE=6l"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[list[str]]:
    """The archives on our own server, as variables of a recipe; the table has no size or checksum of them."""
    folder = archives.make(tmp_path_factory.mktemp("archives"), pairs=900)
    table = tmp_path_factory.mktemp("table") / "archives.tsv"
    table.write_text("".join(f"{path.name}\t-\t-\thttp://127.0.0.1:9/x\n" for path in folder.iterdir()))
    with Server(folder) as server:
        yield [f"URL={server.url}", f"TABLE={table}"]


def words(recipe: str, *variables: str) -> list[str]:
    name, *more = PAPERS[recipe]
    return [name, *more, *SMALL, *variables]


def make(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    return conftest.make(*words(recipe, *variables))


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    # fairseq's log of its own run holds the time and the path, as does the record of what was read.
    files = [path for path in files if path.name not in ("preprocess.log", "inputs.json", ".guard")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def kill_at(stage: str, runs: Path, *given: str) -> None:
    """Start the recipe, and kill it and all its processes once a file of that pattern is there."""
    making = subprocess.Popen(
        make_command(*words("iwslt14", *given)), cwd=ROOT, env=make_environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(runs.glob(stage)):
        assert making.poll() is None and time.monotonic() < deadline, f"{stage} never came"
        time.sleep(0.01)
    os.killpg(making.pid, signal.SIGKILL)
    making.wait()


@pytest.mark.slow
def test_iwslt14_from_download_to_a_score_killed_three_times(source, tmp_path):
    """In its text, in its training and while it translates: the same text as without a kill, and one row."""
    whole, runs = tmp_path / "whole", tmp_path / "runs"
    given = [f"RUNS={runs}", "ANALYSES=", *source]
    assert make("iwslt14", f"RUNS={whole}", *source, "prepare").returncode == 0
    run = "iwslt14/admin-small-s1"
    for stage in ("iwslt14/data/tok/*.part", f"{run}/checkpoints/checkpoint*.pt", f"{run}/generate.txt.part"):
        kill_at(stage, runs, *given)
    done = make("iwslt14", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(runs / "iwslt14/data") == digests(whole / "iwslt14/data")
    assert digests(runs / "archives") == digests(whole / "archives")
    (row,) = results.read(runs / "results.csv")
    assert (row["recipe"], row["method"], row["preset"], row["epochs"]) == ("iwslt14", "admin", "small", "2.00")
    assert "case:lc" in row["signature"] and "tok:none" in row["tokenised_signature"] and row["compound"] == ""
    again = make("iwslt14", *given)
    assert again.returncode == 0 and "recipes.steps" not in again.stdout
    checkpoints = {path.name for path in (runs / run / "checkpoints").iterdir()}
    assert {"checkpoint1.pt", "checkpoint2.pt", "checkpoint_best.pt"} <= checkpoints and len(checkpoints) <= 4
    assert list((runs / run / "tensorboard").rglob("events.*"))

    # Every 23rd pair of the cleaned training text validates; the five test sets are one, in the script's order.
    data = runs / "iwslt14/data"
    train, valid, test = (read_lines(data / f"split/{split}.de") for split in ("train", "valid", "test"))
    talks = read_lines(data / "tok/talks.de")
    assert valid == talks[22::23] and len(train) == len(talks) - len(valid)
    members = archives.contents(pairs=900)["de-en.tgz"]
    raw = []
    for name in archives.IWSLT_SETS:
        xml = members[f"de-en/IWSLT14.{name}.de-en.de.xml"].decode()
        raw += re.findall(r'<seg id="\d+">\s*(.*?)\s*</seg>', xml)
    assert read_lines(data / "raw/test.de") == raw and len(raw) == len(test) == 60
    # The reference keeps its apostrophes; what is translated has Moses', lower-cased.
    assert "Anna\u2019s" in " ".join(raw) and "anna &apos; s" in " ".join(test)
    assert all(line == line.lower() for line in [*train, *valid, *test])
    assert not any("talkid" in line or "<" in line for line in train) and any("&lt;" in line for line in train)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "target"), [("wmt14-ende-6l", "de"), ("wmt14-enfr-6l", "fr")])
def test_wmt14_from_download_to_a_score(recipe, target, source, tmp_path):
    done = make(recipe, f"RUNS={tmp_path}", "VALID_EVERY=50", "ANALYSES=", *source)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = results.read(tmp_path / "results.csv")
    # Compounds are split for German only.
    assert row["recipe"] == recipe and "case:mixed" in row["signature"] and bool(row["compound"]) == (target == "de")
    data = tmp_path / f"wmt14/en-{target}/data"
    train, valid, test = (read_lines(data / f"split/{split}.en") for split in ("train", "valid", "test"))
    held = len(archives.contents(pairs=900)["dev.tgz"]["dev/newstest2013.en"].splitlines())
    units = [[len(line.split()) for line in read_lines(data / f"bpe/train.{name}")] for name in ("en", target)]
    if target == "de":
        # Three corpora, cleaned before BPE by length alone; newstest2013 validates.
        assert len(valid) == held and max(len(line.split()) for line in train) <= 80 and len(units[0]) == len(train)
    else:
        # Five corpora, nothing dropped before BPE; after BPE, by length and ratio.
        parts = re.search(r"split (.*?) --languages en fr -o \S+train", done.stdout)[1].split()
        whole = [line for part in parts for line in read_lines(f"{part}.en")]
        assert valid == whole[49::50] and len(train) == len(whole) - len(valid) and 0 < len(units[0]) < len(train)
        assert all(max(pair) <= 250 and max(pair) <= 1.5 * min(pair) for pair in zip(*units))
    # Dashes are split; the training text's quotes are normalised, and the test set's left, as the papers' scripts do.
    assert any("&quot;" in line for line in train) and not any("\u201c" in line for line in train)
    assert len(test) == held


def test_a_wrong_archive_leaves_no_trace(tmp_path):
    """In DATA, then the right one there: its text, and nothing to be removed first."""
    members = archives.contents(pairs=50)["de-en.tgz"]
    name = "de-en/IWSLT14.TED.dev2010.de-en.de.xml"
    wrong = {**members, name: members[name].replace(b"<seg id", b"<dropped id", 1)}
    raw = tmp_path / "runs/iwslt14/data/raw/test.de"
    found = []
    for folder, held in (("wrong", wrong), ("right", members), ("right", members)):
        (tmp_path / folder).mkdir(exist_ok=True)
        archives.write_tar(tmp_path / folder / "de-en.tgz", held)
        given = [f"DATA={tmp_path / folder}", f"RUNS={tmp_path}/runs", str(raw)]
        done = make("iwslt14", *given)
        assert done.returncode == 0, done.stderr
        found.append((len(read_lines(raw)), "steps.extract" in done.stdout))
    assert found[:2] == [(59, True), (60, True)] and found[2][0] == 60
    right = tmp_path / "right/de-en.tgz"
    right.write_bytes(right.read_bytes()[: right.stat().st_size // 2])
    done = make("iwslt14", *given)
    assert done.returncode == 2 and f"{right}: found a truncated or corrupt archive" in done.stderr
    assert "(recipes/archives.tsv). Fetch it again, or leave DATA out." in done.stderr


def test_a_text_is_compared_with_what_is_published(tmp_path, monkeypatch, caplog):
    """Another number of pairs is refused; whether the files are fairseq's, by git's blob ids, is said."""
    planned = plan("iwslt14").stdout
    assert "data de en split/train=160239 split/valid=7283 split/test=6750 split/train.de=30660ed508af1be8" in planned
    assert (
        "steps.counts" in plan("iwslt14", "EXPECT=").stdout and "steps.counts" not in plan("PAIR=en-de SIZE=6l").stdout
    )
    for language in ("de", "en"):
        (tmp_path / f"test.{language}").write_text("a line\n" * 3)
    git = subprocess.run(["git", "hash-object", tmp_path / "test.de"], capture_output=True, text=True).stdout.strip()

    def compare(*expected: str) -> str:
        caplog.clear()
        monkeypatch.setattr(sys, "argv", ["counts", str(tmp_path), "de", "en", *expected])
        counts.main()
        return caplog.text

    caplog.set_level("INFO")
    assert "the published text, byte for byte: test.de" in compare("test=3", f"test.de={git}")
    assert "not the published text, by git's blob ids: test.en." in compare(f"test.de={git}", f"test.en={'0' * 40}")
    with pytest.raises(ValueError, match=r"test.de has 3 lines, expected 4, as in the published text"):
        compare("test=4")


# -- plans -----------------------------------------------------------------------------------------------------------


def plan(recipe: str, *variables: str) -> subprocess.CompletedProcess:
    name, *given = PAPERS.get(recipe, ["wmt14", *recipe.split()])
    return conftest.make(name, "-n", "RUNS=nowhere", *given, *variables)


@pytest.mark.parametrize("recipe", list(PAPERS))
def test_archives_that_are_counted_are_those_that_are_read(recipe):
    counted = re.findall(r"--archives (.*?) --", plan(recipe, "preflight").stdout)[0].split()
    assert sorted(counted) == sorted(set(re.findall(r"steps.download (\S+)", plan(recipe, "prepare").stdout)))


def test_archives_at_hand_are_read_where_they_are(tmp_path):
    """Packed or not, and held to the table as a download is."""
    (tmp_path / "de-en.tgz").touch()
    packed = plan("iwslt14", f"DATA={tmp_path}", "prepare").stdout
    assert f" {tmp_path}/de-en.tgz de-en/train.tags.de-en.de --as tags" in packed and "steps.download" not in packed
    assert "--check recipes/archives.tsv" in packed
    (tmp_path / "de-en.tgz").unlink()
    unpacked = plan("iwslt14", f"DATA={tmp_path}", "prepare").stdout
    assert f" {tmp_path} de-en/train.tags.de-en.de --as tags" in unpacked and "steps.download" not in unpacked


@pytest.mark.parametrize(
    ("recipe", "gpus", "options"),
    [
        (
            "iwslt14",
            1,
            "--encoder-layers 6 --decoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 1024 --lr 0.0007 "
            "--warmup-updates 6000 --dropout 0.3 --attention-dropout 0.1 --activation-dropout 0.1 "
            "--weight-decay 0.0001 --max-tokens 4096 --update-freq 1 --max-epoch 90 --keep-last-epochs 10 --beam 5 "
            "--lenpen 1",
        ),
        (
            "PAIR=en-de SIZE=18l",
            4,
            "--encoder-layers 18 --decoder-layers 18 --encoder-ffn-embed-dim 2048 --lr 0.001 --warmup-updates 8000 "
            "--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1 --weight-decay 0.0 --max-tokens 8192 "
            "--update-freq 1 --max-epoch 100 --beam 4 --lenpen 0.6 --compounds --lengths 1 80",
        ),
        (
            "PAIR=en-fr SIZE=6l",
            8,
            "--encoder-layers 6 --lr 0.0007 --warmup-updates 8000 --max-tokens 8000 --update-freq 10 --max-epoch 50 "
            "--beam 5 --lenpen 0.8 --every 1333",
        ),
        (
            "PAIR=en-fr SIZE=60l",
            16,
            "--encoder-layers 60 --decoder-layers 12 --max-tokens 5000 --update-freq 16 --max-epoch 50",
        ),
        (
            "PAIR=en-fr SIZE=60l VARIANT=deepnmt",
            16,
            "--encoder-layers 60 --decoder-layers 12 --lr 0.001 --dropout 0.2 --max-tokens 3200 --update-freq 8 "
            "--max-epoch 50 --beam 10 --lenpen 1.0 --recipe wmt14-enfr-60l-deepnmt "
            "--save-dir nowhere/wmt14/en-fr/60l-deepnmt/admin-paper-s1/checkpoints",
        ),
        ("PAIR=en-de SIZE=100l", 4, "--encoder-layers 100 --decoder-layers 100"),
    ],
)
def test_the_plan_is_the_papers(recipe, gpus, options, tmp_path):
    done = plan(recipe, f"GPUS={gpus}")
    assert done.returncode == 0, done.stderr
    shared = (
        '--optimizer radam --adam-betas "(0.9, 0.98)" --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7 '
        "--label-smoothing 0.1 --clip-norm 0.0 --fp16 --fp16-scale-window 256 --threshold-loss-scale 0.03125 "
        f"--share-all-embeddings --distributed-world-size {gpus} --tensorboard-logdir"
    )
    for option in re.findall(r"--\S+(?: (?!--)(?:\"[^\"]*\"|\S+))*", f"{shared} {options}"):
        assert re.search(rf"(?<!\S){re.escape(option)}(?!\S)", done.stdout), option
    assert "--compounds" in done.stdout or "en-de" not in recipe
    assert "--compounds" not in done.stdout or "en-de" in recipe


@pytest.mark.parametrize(
    ("recipe", "variables", "message"),
    [
        ("iwslt14", ["PRESET=tiny"], "PRESET=tiny is unknown; expected paper, or small"),
        ("iwslt14", ["GPUS=8"], "an update of 4096 tokens does not split over 8 devices"),
        ("iwslt14", ["METHOD=postln"], "METHOD=postln is unknown; expected one of admin post-ln"),
        ("PAIR=en-de SIZE=60l", [], "PAIR=en-de SIZE=60l is unknown; expected en-de with one of 6l 12l 18l 100l"),
        ("PAIR=en-cs SIZE=6l", [], "PAIR=en-cs SIZE=6l is unknown"),
        ("PAIR=en-fr SIZE=6l", ["VARIANT=deepnmt"], "VARIANT=deepnmt is of en-fr with 60l"),
        ("PAIR=en-fr SIZE=60l", ["VARIANT=clinic"], "VARIANT=clinic is unknown; expected deepnmt, or nothing"),
        ("PAIR=en-fr SIZE=60l", ["GPUS=7", "MAX_TOKENS=5000"], "MAX_TOKENS=5000 on 7 devices does not make up"),
    ],
)
def test_impossible_plans_are_refused_in_one_line(recipe, variables, message):
    done = plan(recipe, *variables)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_training_needs_the_gpus_of_its_plan(tmp_path):
    """The check that comes before fairseq-train in a plan for GPUs."""
    (line,) = [line for line in plan("iwslt14", "GPUS=4").stdout.splitlines() if "--check" in line]
    nowhere = {**make_environment(), "PATH": f"{tmp_path}:/bin"}
    done = subprocess.run(line, shell=True, cwd=ROOT, env=nowhere, capture_output=True, text=True)
    assert (
        done.returncode == 2
        and "this machine has 0 GPUs (CUDA_VISIBLE_DEVICES is ''), and the run needs 4" in done.stderr
    )


def test_other_machines_go_on_with_a_run():
    """The settings that a run is held to include its tokens, and nothing about the machines."""
    held = {}
    for gpus in ("GPUS=1", "GPUS=4"):
        lines = plan("PAIR=en-de SIZE=6l", gpus, "MEMORY=16").stdout.splitlines()
        (held[gpus],) = [line for line in lines if line.startswith("--length") or "save_every=" in line]
    assert held["GPUS=1"] == held["GPUS=4"] and "--tokens-per-update 32768" in held["GPUS=1"]
