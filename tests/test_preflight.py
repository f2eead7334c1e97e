"""Does the page before a run say what the run will take, and refuse what cannot work?"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.preflight import forecast, known_corpus, machine, page, trial
from recipes.preflight.batches import batches
from recipes.preflight.sample import write_sample
from recipes.steps.activations import Batch, Sizes
from recipes.steps.memory import GB, most, need

ROOT = Path(__file__).parents[1]


def interval(update: int, wall: float, tokens: int = 900, **more: str) -> dict:
    return {"num_updates": str(update), "at": wall, "train_wall": "1.5", "wpb": str(tokens), **more}


def test_an_updates_time_is_the_wall_clocks_after_warm_up():
    # Three slow ones, then 2 s each; of a GPU's 10 GiB, at least 4 were free.
    intervals = [interval(n, 30 + 2 * n, gb_free="6.5") for n in range(1, 7)]
    intervals[4]["gb_free"] = "4"
    found = trial.summarise(intervals, 1024, growth=1, total=10 * 2.0**30)
    assert (found.updates, found.seconds, found.tokens, found.memory) == (6, 2.0, 900, 6 * 2**30)
    alone = trial.summarise(intervals[:1], 1024, growth=123, total=None)
    assert (alone.updates, alone.seconds, alone.memory) == (1, 1.5, 123)
    # The fourth was told at 38, 28 after the beginning, of which four updates took 8.
    assert trial.summarise(intervals, 1024, growth=1, total=None, began=10).start == 20


def test_a_forecast_is_of_the_run_and_not_of_the_trial():
    """Trial: 900 of 1,024 tokens in 2 s. Run: 8 times the update, 90,000 target tokens an epoch: 12.5 of them."""
    measured = trial.Measured(updates=20, seconds=2.0, tokens=900, batch=1024, memory=0)
    corpus = trial.Corpus(("de", "en"), 4500, (20, 20), 100, 1000)
    found = forecast.forecast(measured, corpus, tokens=8192, epochs=432, updates=None, save_every=900)
    assert (found.updates_an_epoch, found.seconds_an_update, found.tokens_a_second) == (12.5, 16.0, 450.0)
    assert found.days == 1.0
    lines = forecast.lines(found, now=datetime.datetime(2030, 1, 31, 12), price=2.5, devices=4, save_every=900)
    said = "\n".join(lines)
    assert "ends on 2030-02-01 12:00" in said and "cost: 240.00, at 2.5 an hour" in said
    assert "up to 900 updates, 4.0 hours" in said and "5400 updates in all: 1.0 days; 438 val" in said
    assert [forecast.length(days) for days in (800, 3, 0.25, 0.01, 0.5 / 1440, 0.00001)] == [
        "2.2 years",
        "3.0 days",
        "6.0 hours",
        "14.4 minutes",
        "30 seconds",
        "0.9 seconds",
    ]


def test_a_forecast_counts_the_start_and_every_validation():
    """1,350 units to validate on at 450 a second, forward alone: 1 s. 700 updates of 1 s, and 7 validations; 96 s."""
    measured = trial.Measured(updates=20, seconds=2.0, tokens=900, batch=2048, memory=0, start=96.0)
    corpus = trial.Corpus(("de", "en"), 1, (20, 10), 100, 1000, valid=135)
    found = forecast.forecast(measured, corpus, tokens=1024, epochs=None, updates=700, save_every=100)
    assert (found.training, found.validation, found.days) == pytest.approx((700 / 86400, 7 / 86400, 803 / 86400))
    (said,) = [line for line in forecast.lines(found, now=datetime.datetime(2030, 1, 1), price=None, devices=1,
                                               save_every=100) if "updates in all" in line]  # fmt: skip
    assert said.endswith(
        "11.7 minutes; 7 validations: 7.0 seconds; start: 1.6 minutes; together 13.4 minutes, checkpoints apart"
    )


def test_on_a_cpu_the_same_model_trains_with_small_batches():
    given = "--arch x --fp16 --fp16-no-flatten-grads --fp16-scale-window 256 --threshold-loss-scale 0.03125 --lr 1"
    given += " --max-tokens 8192 --update-freq 4"
    given += " --distributed-world-size 2 --distributed-init-method tcp://h:1 --distributed-rank 0"
    options = trial.on_cpu(given.split(), 10**8)
    assert not [word for word in options if "fp16" in word or word in ("256", "0.03125", "tcp://h:1")]
    assert [trial.option(options, name) for name in ("--max-tokens", "--update-freq", "--lr")] == ["1024", "1", "1"]
    assert (trial.held(given.split()), trial.held(options)) == (65536, 1024) and "--cpu" in options
    for flag in ("--memory-efficient-fp16", "--amp", "--bf16"):
        assert flag not in trial.on_cpu(["--arch", "x", flag], 10**8)
    # An update of such a model takes minutes with 1,024.
    assert trial.option(trial.on_cpu(given.split(), 10**9), "--max-tokens") == "256"


@pytest.fixture
def args(tmp_path) -> argparse.Namespace:
    given = f"wmt14/en-de --pair en-de --binary {tmp_path}/bin --run {tmp_path}/run --keep 10 --save-every 2000"
    given += " --max-tokens 8192 --archives training-parallel-europarl-v7.tgz dev.tgz"
    given += " --encoder-layers 18 --decoder-layers 18 --devices 4"
    return page.parse(given.split())[0]


def test_the_disk_must_hold_archives_text_and_checkpoints(args, monkeypatch):
    sizes = Sizes(18, 18)
    found = known_corpus.stated("wmt14/en-de", ("en", "de"), 160, 32768)
    # 657,632,379 + 38,654,961 bytes of archives; 13 checkpoints of 12 bytes a parameter, average and model of 4.
    kept = sizes.parameters * (13 * 12 + 8)
    wanted = 657632379 + 38654961 + (5.5 + 0.6) * GB + kept
    for free, fault in ((wanted + 1, None), (wanted - 2 * GB, "the disk is too small by 2.0 GB")):
        monkeypatch.setattr(machine, "free_disk", lambda folder, free=free: free)
        line, found_fault = page.disk(args, sizes, found)
        assert f"checkpoints {kept / GB:.1f})" in line and "archives 0.70" in line
        assert found_fault == fault or found_fault.startswith(fault)


def test_a_text_needs_a_network_or_a_folder(args, monkeypatch, tmp_path):
    found = known_corpus.stated("wmt14/en-de", ("en", "de"), 160, 32768)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    args.url = "http://127.0.0.1:9/x"
    assert "no server of theirs answers; give DATA=" in page.source(args, found)[1]
    args.data = tmp_path
    assert page.source(args, found) == (f"text: from {tmp_path}", None)
    args.data = tmp_path / "missing"
    assert "missing is not a folder" in page.source(args, found)[1]
    with pytest.raises(ValueError, match="nothing is known of the text of own/mine/de-en; prepare it first"):
        known_corpus.stated("own/mine/de-en", ("de", "en"), 256, 10000)


def test_a_text_of_ones_own_is_counted(tmp_path):
    # 4 lines of 45 bytes: 10 units of 4.5 bytes and the sentence's end; of 90 bytes: 20 and the end.
    for language, size in (("de", 45), ("en", 90)):
        (tmp_path / f"train.{language}").write_text(("x" * (size - 1) + "\n") * 4)
        with gzip.open(tmp_path / f"valid.{language}.gz", "wt") as file:
            file.write("x\n" * 7)
    found = known_corpus.stated("own/mine/de-en", ("de", "en"), 256, 10000, tmp_path)
    assert (found.corpus.pairs, found.corpus.units, found.prepared) == (4, (11, 21), False)
    assert (found.text, found.binary, found.corpus.valid) == (3 * 4 * (45 + 90), 2 * 4 * 32, 7)


def test_a_model_that_does_not_fit_is_a_fault(args):
    full = {Batch.full(8192, 160)}
    line, fault = page.weights(args, Sizes(18, 18), full, 80 * GB, False)
    assert line.startswith("memory: at most ") and line.endswith(" of 80.0 GB, with full batches") and fault is None
    assert page.weights(args, Sizes(18, 18), full, 8 * GB, False)[1] == "the model does not fit its device"


def test_the_batches_are_those_that_fairseq_makes(tmp_path):
    """fairseq's own data set of pairs, of which either side may be longer, sorted and split as its trainer does."""
    from fairseq.data import Dictionary, LanguagePairDataset
    from fairseq.data.indexed_dataset import make_builder, make_dataset

    write_sample(tmp_path, ("a", "b"), (9, 14), 40, 100, 5000)
    # In the sample the longer source has the longer target; here the lengths are independent.
    data = make_dataset(str(tmp_path / "train.a-b.b"), "mmap")
    sentences = [data[number].clone() for number in reversed(range(len(data)))]
    builder = make_builder(str(tmp_path / "train.a-b.b.bin"), "mmap", vocab_size=100)
    for sentence in sentences:
        builder.add_item(sentence)
    builder.finalize(str(tmp_path / "train.a-b.b.idx"))
    source, target = (make_dataset(str(tmp_path / f"train.a-b.{side}"), "mmap") for side in "ab")
    words = Dictionary.load(str(tmp_path / "dict.a.txt"))
    pairs = LanguagePairDataset(source, source.sizes, words, target, target.sizes, words)
    made = pairs.batch_by_size(pairs.ordered_indices(), max_tokens=256, required_batch_size_multiple=1)
    shapes = [pairs.collater([pairs[i] for i in rows]) for rows in made]
    expected = {(*each["net_input"]["src_tokens"].shape, each["target"].size(1)) for each in shapes}
    assert batches(tmp_path, ("a", "b"), 256, 40) == expected and len(expected) > 20
    assert any(source > target for _, source, target in expected)
    assert batches(tmp_path, ("a", "a"), 1000, 128) == {Batch(7, 128, 128)}


def test_the_short_form_is_of_the_text_that_is_there(tmp_path, args):
    args.binary, args.cpu, args.max_tokens, args.precision = tmp_path, True, 2048, "fp32"
    nothing = page.short_form(args, ("de", "en"))
    assert len(nothing) == 1 and nothing[0].startswith("# checkpoints: ")
    for side in ("train", "valid"):
        write_sample(tmp_path, ("de", "en"), (9, 14), 40, 700, 3000)
        for language in ("de", "en"):
            for end in ("bin", "idx"):
                path = tmp_path / f"train.de-en.{language}.{end}"
                (tmp_path / f"{side}.de-en.{language}.{end}").write_bytes(path.read_bytes())
    memory, _ = page.short_form(args, ("de", "en"))
    sizes = page.batch.sizes_of(args)
    sizes = page.dataclasses.replace(sizes, words=700)
    wanted = most(sizes, batches(tmp_path, ("de", "en"), 2048, 40), devices=4)
    assert memory.startswith(f"# memory: {wanted} of ")
    assert memory.endswith(" GB, with this text's 700 words and its own batches")
    assert wanted.peak < need(sizes, Batch.full(2048, 256), devices=4).peak


def make(*variables: str) -> subprocess.CompletedProcess:
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    mine |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "-f", "recipes/preflight/Makefile", f"PYTHON={sys.executable}", *variables]
    return subprocess.run(command, cwd=ROOT, env=mine, capture_output=True, text=True)


@pytest.mark.slow
def test_a_recipe_that_works_has_a_page(tmp_path):
    done = make("RECIPE=demo", f"RUNS={tmp_path}", "LAYERS=1", "WIDTH=16", "FFN=16", "TRIAL_UPDATES=5", "PRICE=2")
    assert done.returncode == 0, done.stderr
    for expected in (
        r"trains on the CPU: fp32", r"plan: 1 x 1 x 1 batches of up to 1024 tokens",
        r"memory: at most 0\.\d\d GB \(.*\) of ",
        r"disk: .* free at ", r"timed: 5 updates of \d+ target tokens on this CPU",
        r"1000 updates in all: .* start: \d",
        r"started now, it ends on \d{4}-", r"cost: [\d.]+, at 2 an hour", r"a kill loses .* up to 50 updates",
        r"It can work here\.",
    ):  # fmt: skip
        assert re.search(expected, done.stdout), (expected, done.stdout)
    # What it tried leaves nothing.
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".preflight")]


@pytest.mark.slow
def test_a_recipe_for_gpus_says_here_how_long_it_would_take(tmp_path):
    small = ["ENCODER_LAYERS=1", "DECODER_LAYERS=1", "WIDTH=16", "FFN=16", "MERGES=500", "TRIAL_UPDATES=3"]
    done = make("RECIPE=wmt14-ende-18l", f"RUNS={tmp_path}", "GPUS=4", f"DATA={tmp_path}", *small)
    (fault,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and fault.startswith("It cannot work here: this machine has 0 GPUs")
    assert "timed: 3 updates of" in done.stdout and "an update of the run's holds 32768 tokens, not 1024" in done.stdout
    assert re.search(r"\d+ updates in all: [\d.]+ (hours|days|years)", done.stdout)


def test_a_price_is_a_number(capsys):
    for text in ("abc", "-1", "nan"):
        with pytest.raises(SystemExit) as end:
            page.parse(["demo", f"--price={text}"])
        said = capsys.readouterr().err.splitlines()
        assert end.value.code == 2 and len(said) == 1 and f"PRICE={text} is not a price; expected" in said[0]


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    done = make("RECIPE=own", f"DATA={tmp_path}/none", "PAIR=de-en", "PRESET=cpu", f"RUNS={tmp_path}/runs")
    (fault,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and f"DATA={tmp_path}/none is not a folder; expected one with the text" in fault


def test_an_unknown_recipe_is_refused_in_one_line():
    for variables, message in ((["RECIPE=wmt15"], "RECIPE=wmt15 is unknown"), ([], "RECIPE= is missing")):
        done = make(*variables)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "rows"),
    [
        ("", {}),
        ("METHOD=t-fixup", {"scheme": "t-fixup"}),
        ("TRAIN_ARGS=--admin-fast off", {"layers": "plain"}),
        ("TRAIN_ARGS=--quant-noise-scalar 0.1", {"layers": "plain"}),
        ("TRAIN_ARGS=--admin-fast on --criterion label_smoothed_cross_entropy", {"loss": "plain"}),
        ("TRAIN_ARGS=--criterion label_smoothed_cross_entropy_fast", {}),
    ],
)
def test_a_plan_is_of_the_code_that_will_run(variables, rows):
    sizes = Sizes(30, 3, 32, 64, 2, 10000, 0.3, 0.1, 0.1, "fp32", gpu=False, **rows)
    call = ["make", "-n", "-f", "recipes/iwslt14/Makefile", "RUNS=nowhere", f"PYTHON={sys.executable}"]
    call += ["PRESET=small", "ENCODER_LAYERS=30", *([variables] if variables else [])]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert f"# memory: at most {need(sizes, Batch.full(2048, 256))} memory not known here" in done.stdout.splitlines()


@pytest.mark.parametrize("recipe", ["demo", "lm", "iwslt14", "multi30k PRESET=cpu", "own DATA=. PAIR=de-en PRESET=gpu"])
def test_every_recipe_says_the_short_form_before_it_trains(recipe):
    name, *variables = recipe.split()
    call = ["make", "-n", "-f", f"recipes/{name}/Makefile", f"PYTHON={sys.executable}", "RUNS=nowhere", *variables]
    lines = subprocess.run(call, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    memory, short, training = (
        [number for number, line in enumerate(lines) if re.search(pattern, line)]
        for pattern in (r"^# memory: at most [\d.]+ GB", r"recipes\.preflight\.page .* --short", r"steps\.train ")
    )
    assert len(memory) == len(short) == len(training) == 1 and memory < short < training
    done = subprocess.run(lines[short[0]], shell=True, cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"# checkpoints: [\d.]+ GB of [\d.]+ GB free; a kill loses up to \d+ updates\n", done.stdout)
