"""The recipes' steps, and the demo's chain run small from the shell: interrupted, resumed, wrong input."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import make, make_command, make_environment, run_module

from fairseq_admin.method.schemes import SCHEMES
from recipes.demo.generate_corpus import corpus
from recipes.steps import logs, score, settings
from recipes.steps.common import read_lines, write_lines
from recipes.steps.progress import progress
from recipes.steps.text import Text

ROOT = Path(__file__).parents[1]


def step(name: str, *args: object) -> subprocess.CompletedProcess:
    """Run a step as the Makefile does, in a process that has fairseq imported already; all it prints is its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_module(f"recipes.{name}", *args, log=Path(folder) / "log")
    return subprocess.CompletedProcess([name, *map(str, args)], done.status, "", done.output)


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line a step ends with when the user must fix something."""
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# -- text ------------------------------------------------------------------------------------------------------------


PLAIN = Text("de", "en")


def test_text_settings_are_written_from_the_recipe(tmp_path):
    done = step("steps.text", "de", "fr", "normalise", "escape", "-o", tmp_path / "data/text.json")
    assert done.returncode == 0, done.stderr
    assert Text.read(tmp_path / "data/text.json") == Text("de", "fr", normalise=True, escape=True)
    done = step("steps.text", "de", "fr", "truecase", "-o", tmp_path / "other/text.json")
    assert "truecase is not a setting of the text; expected some of lowercase," in refused(done)
    assert not names(tmp_path / "other")


def test_the_demo_survives_its_tokenising():
    """Detokenising restores every line of the corpus, German ones too; a score of nearly 100 needs that."""
    made = make("demo", "-n", "RUNS=nowhere", "LR=1e-3", "DROPOUT=.1", "SEED=0", "WARMUP=0", "LENPEN=0.6")
    assert made.returncode == 0, made.stderr
    assert "steps.text de en normalise aggressive_dashes escape -o nowhere/demo/data/text.json" in made.stdout
    text = Text("de", "en", normalise=True, aggressive_dashes=True, escape=True)
    reverse = Text("en", "de", normalise=True, aggressive_dashes=True, escape=True)
    for de, en in corpus(3000):
        assert text.detokenise(text.tokenise(en, "en")) == en
        assert reverse.detokenise(reverse.tokenise(de, "de")) == de


FAULTS = {
    "a path that is none": ("open('setup.py/x')", 2, "setup.py/x: Not a directory. Check the path and its permissions"),
    "a full disk": ("with open('/dev/full', 'w') as out: out.write('x')", 2, "No space left on device. Check the path"),
    "a reader that has read enough": ("print('x', flush=True)", 141, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_machine_is_one_line(fault):
    """And none where whoever reads what is printed has gone, as `head -1` does."""
    code, status, said = FAULTS[fault]
    reader, writer = os.pipe()
    os.close(reader)
    source = f"from recipes.steps.common import run\ndef main():\n    {code}\nrun(main)"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == bool(said)


# -- settings, logs, progress ----------------------------------------------------------------------------------------


def test_settings_are_written_once_and_held(tmp_path):
    """Others take their place until a model depends on the old ones."""
    path = tmp_path / "data/settings.json"
    settings.hold(path, {"width": "64"}, [], tmp_path)
    written = path.stat().st_mtime_ns
    settings.hold(path, {"width": "64"}, [], tmp_path)
    assert path.stat().st_mtime_ns == written
    settings.hold(path, {"width": "128"}, [], tmp_path)
    assert settings.read(path) == {"width": "128"} and path.stat().st_mtime_ns > written
    write_lines(tmp_path / "admin-cpu-s1/checkpoints/checkpoint_1_50.pt", [])
    settings.hold(path, {"width": "128"}, [], tmp_path)
    said = f"data was made with other settings .width 128 -> 64., and {tmp_path}/admin-cpu-s1 holds a model of them. .*"
    with pytest.raises(ValueError, match=f"{said}remove {tmp_path} to begin again"):
        settings.hold(path, {"width": "64"}, [], tmp_path)
    with pytest.raises(ValueError, match="depth unset -> 2"):
        settings.hold(path, {"width": "128", "depth": "2"}, [], tmp_path)
    settings.hold(path, {"width": "64"}, [], tmp_path, redo=True)
    assert settings.read(path) == {"width": "64"}


def test_a_command_line_differs_by_its_options():
    held = settings.options(
        ["--lr", "0.1", "--adam-betas", "(0.9, 0.98)", "--fp16", "--clip-norm", "-1", "--lr", "0.2"]
    )
    assert held == {"--lr": "0.2", "--adam-betas": "(0.9, 0.98)", "--fp16": "on", "--clip-norm": "-1"}
    other = {**held, "--lr": "0.3"}
    other.pop("--fp16")
    assert settings.differences(held, other) == ["--fp16 on -> unset", "--lr 0.2 -> 0.3"]


@pytest.mark.parametrize(
    ("unit", "left", "reached"),
    [
        ("updates", ["trained-60", "trained-90", "checkpoints/checkpoint_7_80.pt"], 90),
        ("updates", ["trained-60", "checkpoints/checkpoint_7_80.pt", "checkpoints/checkpoint_best.pt"], 80),
        ("epochs", ["trained-2-epochs", "trained-900", "checkpoints/checkpoint3.pt"], 3),
        ("epochs", ["checkpoints/checkpoint3.pt", "checkpoints/checkpoint_4_80.pt"], 4),
    ],
)
def test_a_training_is_not_taken_back(tmp_path, unit, left, reached):
    for name in left:
        write_lines(tmp_path / name, [])
    settings.check_length(tmp_path, unit, reached)
    with pytest.raises(ValueError, match=f"{unit.upper()}={reached - 1} is less than .* was trained for, {reached}. "):
        settings.check_length(tmp_path, unit, reached - 1)


def test_a_text_is_read_again_where_its_files_changed(tmp_path):
    """By content, wherever the files are; what was hashed once is not again, unless a file was written to."""
    pairs = corpus(100)
    for folder in ("a/corpus", "b/corpus"):
        for number, language in enumerate(("de", "en")):
            for split, some in (("train", pairs[:80]), ("valid", pairs[80:90]), ("test", pairs[90:])):
                write_lines(tmp_path / folder / f"{split}.{language}", [pair[number] for pair in some])

    def own(data: str, *goals: str) -> subprocess.CompletedProcess:
        given = [f"DATA={tmp_path / data}", f"RUNS={tmp_path}/runs", "PAIR=de-en", "PRESET=cpu", "MERGES=50", *goals]
        return make("own", *given, timeout=60)

    text = tmp_path / "runs/own/corpus/de-en/data"
    raw = text / "raw/test.en"
    assert own("a/corpus", str(raw)).returncode == 0
    first = raw.stat().st_mtime_ns
    assert own("b/corpus", str(raw)).returncode == 0 and raw.stat().st_mtime_ns == first, "it is the same text"
    changed = tmp_path / "a/corpus/test.en"
    lines = [line.swapcase() for line in read_lines(changed)]
    written = changed.stat()
    write_lines(changed, lines)
    os.utime(changed, ns=(written.st_atime_ns, written.st_mtime_ns))
    done = own("a/corpus", str(raw))
    assert done.returncode == 0 and f"test.en {tmp_path}/a/corpus/test.en ({written.st_size} bytes, SHA" in done.stderr
    assert read_lines(raw) == lines
    write_lines(text.parent / "admin-cpu-s1/trained-5", [])
    done = own("b/corpus", str(raw))
    assert done.returncode == 2 and read_lines(raw) == lines
    said = done.stderr.splitlines()[0]
    assert f"remove {text.parent} to begin again" in said and f"-> {tmp_path}/b/corpus/test.en (" in said


def test_what_a_killed_process_left_is_cleared(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = platform.node()
    left = tmp_path / f"text.{host}.{dead.pid}.part"
    others = [tmp_path / f"text.{host}.{os.getppid()}.part", tmp_path / f"text.elsewhere.{dead.pid}.part"]
    others += [tmp_path / f"text2.{host}.{dead.pid}.part", tmp_path / "text.part"]
    for path in (left, *others):
        path.write_text("half")
    write_lines(tmp_path / "text", ["whole"])
    assert names(tmp_path) == {"text", *(path.name for path in others)}


HEAD = "2026-01-01 00:00:00 | INFO |"


def log_line(tag: str, updates: int, bits: float) -> str:
    if tag == "valid":
        values = {"epoch": -(-updates // 16), "valid_nll_loss": str(bits), "valid_num_updates": str(updates)}
    else:
        values = {"epoch": -(-updates // 16), "update": updates / 16, "nll_loss": str(bits)}
        values |= {"num_updates": str(updates), "lr": "0.001", "train_wall": "36"}
    return f"{HEAD} {tag} | {json.dumps(values)}"


PARAMS = f"{HEAD} fairseq_cli.train | num. shared model params: 1,234 (num. trained: 1,234)"
LOG = [
    PARAMS,
    log_line("train_inner", 10, 8.0),
    log_line("train_inner", 20, 7.0),
    log_line("valid", 20, 6.5),
    # Killed in mid-line, resumed from update 10: the new log continues on that line.
    log_line("train_inner", 30, 6.0)[:-20] + log_line("valid", 10, 8.0),
    PARAMS,
    log_line("train_inner", 20, 7.5),
    log_line("valid", 20, 6.25),
]


def test_what_a_killed_run_did_beyond_its_checkpoint_is_void(tmp_path):
    lines = [log_line("train_inner", n, 8.0) for n in (10, 20, 30)]  # killed; the newest checkpoint is of update 10
    lines += [PARAMS, log_line("train_inner", 15, 7.0), log_line("valid", 15, 6.5)]
    write_lines(tmp_path / "train.log", [PARAMS, *lines])
    log = logs.read_log(tmp_path / "train.log")
    assert (log.train, log.valid) == ({10: 8.0, 15: 7.0}, {15: 6.5})


def test_a_log_without_training_is_refused(tmp_path):
    write_lines(tmp_path / "train.log", [PARAMS])
    with pytest.raises(ValueError, match="found 0 training intervals, 0 validations and a parameter count"):
        logs.read_log(tmp_path / "train.log")


def test_progress_shows_the_pace_and_hides_no_error():
    lines = [
        f"{HEAD} fairseq_cli.train | TransformerModel(",
        "  (encoder): TransformerEncoder(",
        ")",
        log_line("train_inner", 10, 8.0),
        log_line("train_inner", 20, 7.0),
        log_line("valid", 20, 6.5),
        f"{HEAD} fairseq_admin.method.profiling | Admin: profiled",
        "2026-01-01 00:00:00 | WARNING | fairseq.trainer | beware",
        f"{HEAD} fairseq.trainer | nothing new",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "ZeroDivisionError: division by zero",
    ]
    ticks = iter([100.0, 105.0])
    shown = list(progress(lines, updates=100, clock=lambda: next(ticks)))
    # Ten updates in five seconds, and eighty to go.
    assert "0.50 s/update  40 s left" in shown[1]
    assert [line.split()[0] for line in shown[:3]] == ["update"] * 3
    assert "Admin: profiled" in shown[3] and "beware" in shown[4]
    assert shown[5:] == lines[-3:]


def test_progress_of_a_run_in_epochs():
    ticks = iter([100.0, 105.0])
    lines = [log_line("train_inner", 8, 8.0), log_line("train_inner", 24, 7.0), log_line("valid", 24, 6.5)]
    shown = list(progress(lines, epochs=3, clock=lambda: next(ticks)))
    # One epoch in five seconds, and one and a half to go.
    assert shown[1].startswith("epoch   1.50/3  update     24  train  7.000") and "5.00 s/epoch  8 s left" in shown[1]
    assert shown[2].startswith("epoch   2.00/3  update     24  valid")


# -- score -----------------------------------------------------------------------------------------------------------

GENERATED = ["S-1\tb", "T-1\tB", "H-1\t-0.5\tB@@ e .", "D-1\t-0.5\tBe .", "P-1\t-0.1", "H-0\t-0.2\tA", "H-2\t-1\t"]


def test_hypotheses_come_in_the_order_of_the_test_set():
    assert score.hypotheses(GENERATED, 3) == ["A", "B@@ e .", ""]


@pytest.mark.parametrize(
    ("lines", "count", "message"),
    [
        (GENERATED, 5, "2 of 5 hypotheses are missing, the first for sentence 4"),
        (GENERATED, 2, "H-2 is outside"),
        ([*GENERATED, "H-0\t-1\tA"], 3, "H-0 comes twice"),
        ([], 1, "1 of 1 hypotheses are missing"),
    ],
)
def test_missing_or_strange_hypotheses_are_refused(lines, count, message):
    with pytest.raises(ValueError, match=message):
        score.hypotheses(lines, count)


REFERENCES = ["The concert starts at seven o'clock.", "Anna was born in Italy.", "Peter has to pay two euros, I think."]


def make_run(folder: Path, translations: list[str] = REFERENCES, bits: float = 6.0) -> Path:
    """A run's folder as it is before scoring, and the raw test set two levels up."""
    write_lines(folder.parent / "raw/test.de", ["eins", "zwei", "drei"])
    write_lines(folder.parent / "raw/test.en", REFERENCES)
    write_lines(folder.parent / "bpe/test.de", ["eins", "zwei", "drei"])
    write_lines(folder.parent / "bpe/test.en", REFERENCES)
    write_lines(folder / "train.log", [*LOG, log_line("valid", 30, bits)])
    write_lines(folder.parent / "tok/test.en", [PLAIN.tokenise(line, "en") for line in REFERENCES])
    tokens = [PLAIN.tokenise(line, "en") for line in translations]
    PLAIN.write(folder.parent / "text.json")
    write_lines(folder / "generate.txt", reversed([f"H-{n}\t-1\t{line}" for n, line in enumerate(tokens)]))
    return folder


def run_score(folder: Path, method: str = "admin", seed: int = 1) -> subprocess.CompletedProcess:
    key = ("--recipe", "demo", "--method", method, "--preset", "cpu", "--seed", seed, "--tokens", 2048)
    where = ("--raw", folder.parent / "raw/test", "--text", folder.parent / "text.json")
    where += ("--tokenised", folder.parent / "tok/test.en", "--compounds")
    where += ("--units", folder.parent / "bpe/test", "--results", folder.parent / "results.csv")
    return step("steps.score", folder, *where, *key)


def read_results(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_score_is_on_detokenised_text_and_a_run_has_one_row(tmp_path):
    folder = make_run(tmp_path / "admin-cpu-s1")
    for seed in (1, 2, 1):
        done = run_score(folder, seed=seed)
        assert done.returncode == 0, done.stderr
    rows = read_results(tmp_path)
    assert sorted(row["seed"] for row in rows) == ["1", "2"]
    # Translations equal to the references, character by character.
    assert {row[name] for row in rows for name in ("score", "tokenised", "compound")} == {"100.00"}
    assert all(row["signature"].startswith("nrefs:1|case:mixed") and row["updates"] == "30" for row in rows)
    curve = logs.read_log(folder / "train.log").valid
    assert curve and all(logs.from_cell(row["valid"]) == pytest.approx(curve, rel=1e-3) for row in rows)
    assert read_lines(folder / "translations.txt") == REFERENCES


def test_what_is_too_long_for_the_model_counts_as_empty(tmp_path):
    """A translation less, and the score with it; but no other may be missing."""
    folder = make_run(tmp_path / "admin-cpu-s1", REFERENCES[:2])
    write_lines(tmp_path / "bpe/test.de", ["eins", "zwei", "drei " * 1023 + "drei"])
    done = run_score(folder)
    assert done.returncode == 0 and "1 of 3 sentences are too long for the model and scored as empty" in done.stderr
    assert read_lines(folder / "translations.txt") == [*REFERENCES[:2], ""]
    assert 40 < float(read_results(tmp_path)[0]["score"]) < 60
    write_lines(tmp_path / "bpe/test.de", ["eins", "zwei", "drei " * 1022 + "drei"])
    assert "1 of 3 hypotheses are missing" in refused(run_score(folder))


# -- summary ---------------------------------------------------------------------------------------------------------


def run_summary(folder: Path) -> str:
    where = ("--raw", folder.parent / "raw/test", "--pair", "de-en", "--command", "make demo")
    done = step("steps.summary", folder, *where)
    assert done.returncode == 0, done.stderr
    return (folder / "summary.txt").read_text(encoding="utf-8")


def test_summary_of_one_run_and_then_of_two(tmp_path):
    admin = make_run(tmp_path / "admin-cpu-s1", bits=1.5)
    assert run_score(admin).returncode == 0
    stack = [{"layer": 0, "sublayer": "self_attn", "min": 1.0, "mean": 1.5, "max": 2.0}]
    write_lines(admin / "omega.json", [json.dumps({"encoder": stack, "decoder": stack, "provenance": {}})])
    alone = run_summary(admin)
    assert "100.00" in alone and "Post-LN" not in alone and "make demo METHOD=post-ln" in alone
    assert all(line in alone for line in REFERENCES)
    assert (admin / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (admin / "omega.png").read_bytes().startswith(b"\x89PNG")

    post_ln = make_run(tmp_path / "post-ln-cpu-s1", ["at at at"] * 3, bits=5.5)
    make_run(tmp_path / "pre-ln-cpu-s1")  # Not scored, so not shown.
    make_run(tmp_path / "post-ln-cpu-s2")  # Another seed, so not shown.
    assert run_score(post_ln, "post-ln").returncode == 0
    both = run_summary(post_ln)
    (head, scores, *_) = (line.split() for line in both.splitlines()[2:])
    assert head == ["Admin", "Post-LN"]
    assert scores == ["sacreBLEU", "100.00", "0.00"]
    assert "update 30 1.500 5.500" in " ".join(both.split())
    assert "at at at" in both and "make demo METHOD=pre-ln" in both and "METHOD=post-ln" not in both
    assert "omega.png" not in both


def test_as_many_checkpoints_are_kept_as_are_averaged():
    made = make("demo", "-n", "RUNS=nowhere", "AVERAGE=7").stdout
    assert re.findall(r"--keep-interval-updates (\d+)", made) == ["7"]
    made = make("iwslt14", "-n", "RUNS=nowhere", "AVERAGE=7", "EPOCHS=9").stdout
    assert re.findall(r"--keep-last-epochs (\d+)", made) == re.findall(r"--by epochs --last (\d+)", made) == ["7"]


# -- make ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "variable", "message"),
    [
        ("demo", "METHOD=sandwich", f"METHOD=sandwich is unknown; expected one of {' '.join(SCHEMES)}."),
        ("demo", "METHOD=admin pre-ln", "METHOD=admin pre-ln is unknown"),
        ("multi30k", "PAIR=de-de", "PAIR=de-de is unknown; expected one of de-en"),
        ("own", "PAIR=en-en", "PAIR=en-en names one language twice"),
        ("multi30k", "PRESET=tpu", "PRESET=tpu is unknown; expected cpu or gpu"),
        ("demo", "PRESET=gpu", "PRESET=gpu is unknown; the demo has cpu alone. For a GPU: make multi30k PRESET=gpu"),
        ("iwslt14", "UPDATES=1000", "UPDATES=1000 is given, and EPOCHS=90 says how long it trains; give another"),
        ("demo", "UPDATES=1e3", "UPDATES=1e3 is not a number that a run can have; expected a whole one above 0"),
        ("demo", "MAX_TOKENS=0900", "MAX_TOKENS=0900 is not a number that a run can have"),
        ("demo", "UPDATES=1010", "so the last updates would be in no checkpoint. Give UPDATES=1000, or another"),
        ("demo", "AVERAGE=21", "AVERAGE=21 is more than the 20 checkpoints of UPDATES=1000 and SAVE_EVERY=50."),
        ("demo", "EPOCHS=2", "AVERAGE=3 is more than the 2 checkpoints of EPOCHS=2. Give AVERAGE=2, or train longer."),
        ("compare", "SEEDS=", "SEEDS= is empty; expected one or more"),
        ("compare", "SEEDS=1 2 1", "SEEDS=1 2 1 names one twice; expected each once"),
        ("compare", "RATES=1e-3 1e-x", "RATES=1e-3 1e-x is not a number"),
        ("compare", "SCHEMES=admin sandwich", "SCHEMES=admin sandwich is unknown; expected some of admin"),
        ("warmup", "PRESET=tpu", "PRESET=tpu is unknown; expected cpu, gpu or multi30k"),
        ("sensitivity", "BETA2S=0.9 1.5", "BETA2S=0.9 1.5 is not a number that a run can have; expected one of 0"),
        ("deeper", "HEADS=3", "=3; expected one. Give another WIDTH or HEADS"),
        *(
            ("demo", given, f"{given} is not a number that a run can have; expected")
            for given in ("LR=abc", "LR=1 2", "SEED=../x", "SEED=1.5", "DROPOUT=1", "LENPEN=abc")
        ),
        ("preflight", "RECIPE=demo own", "RECIPE=demo own names more than one; expected one, as RECIPE=demo"),
        ("gpu_trial", "DEVICE=tpu", "DEVICE=tpu is unknown; expected one of cuda cpu"),
    ],
)
def test_unknown_choices_are_refused(recipe, variable, message):
    done = make(recipe, "-n", "DATA=nowhere", variable)
    assert done.returncode == 2
    assert message in refused(done)


def test_text_is_utf_8_whatever_the_locale(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # where Python does not take C for one of UTF-8
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    done = make("demo", "--eval", "show: ; @$(PYTHON) -c 'import sys; print(sys.flags.utf8_mode)'", "show")
    assert done.stdout == "1\n"


def test_all_of_a_text_is_there_before_the_first_long_step():
    plan = make("own", "-n", "RUNS=nowhere", "DATA=nowhere", "PAIR=de-en", "PRESET=cpu").stdout
    steps = re.findall(r"# (raw text|tokens of train)", plan)
    assert steps == ["raw text"] * 6 + ["tokens of train"]


@pytest.mark.slow
def test_a_run_outlives_its_report(tmp_path):
    """A measure that fails is told and left out; a report that fails ends the command, and names the summary."""
    small = [f"RUNS={tmp_path}", "-o", f"{tmp_path}/demo/admin-cpu-s1/summary.txt", "GUARDED=yes"]
    run = tmp_path / "demo/admin-cpu-s1"
    write_lines(run / "average.pt", ["no checkpoint"])
    write_lines(run / "summary.txt", ["what came out"])
    done = make("demo", *small, "-o", str(run / "average.pt"), str(run / "report.html"), timeout=120)
    assert (
        done.returncode == 2 and names(run) == {"average.pt", "summary.txt", "analysis"} and not names(run / "analysis")
    )
    assert len(re.findall(r"fairseq-admin: .*average.pt is not a torch file", done.stderr)) == 3
    assert done.stderr.count("(ignored)") == 2
    assert f"The report could not be made; the run is whole: {run}/summary.txt" in done.stderr


@pytest.mark.parametrize(("method", "folds"), [("admin", True), ("post-ln", True), ("b2t", False)])
def test_every_scheme_is_trained_in_one_way(method, folds):
    """Through the plugin, with its option; folded where the table's row says so, and then used without the plugin."""
    done = make("demo", "-n", "RUNS=nowhere", f"METHOD={method}")
    assert done.returncode == 0, done.stderr
    (training,) = [line for line in done.stdout.splitlines() if "recipes.steps.train" in line]
    arch = f"--arch transformer_admin_18l --admin-scheme {method}"
    assert f"--user-dir fairseq_admin --source-lang de --target-lang en {arch} " in training
    assert ("fairseq_admin.cli fold" in done.stdout) == folds == SCHEMES[method].folds
    (generating,) = [line for line in done.stdout.splitlines() if "fairseq_cli.generate" in line]
    assert ("--user-dir" in generating) == (not folds)
    assert ("omega.json" in done.stdout) == SCHEMES[method].omega


def plain_make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, env=make_environment())


@pytest.mark.parametrize(
    ("variable", "unfit"),
    [
        ("RUNS=a:b", ":"),
        ("RUNS=a#b", "#"),
        ("DATA=a b", "space"),
        ("VENV=a$(shell touch here)", "( ) $ space"),
    ],
)
def test_paths_that_make_cannot_take_are_refused(variable, unfit):
    """While the makefiles are read, in one line; by the recipes, and by the Makefile before them."""
    for arguments in (["-n", "-f", "recipes/demo/Makefile"], ["-n", "demo"]):
        message = refused(plain_make(*arguments, variable))
        assert f" {variable} has {unfit} in it, which make cannot take in the name of a file; expected" in message


def test_distclean_removes_virtual_environments_only(tmp_path):
    (tmp_path / "thesis").write_text("mine")
    assert str(tmp_path) not in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout
    (tmp_path / "pyvenv.cfg").touch()
    assert f"rm -rf {tmp_path}\n" in plain_make("-n", "distclean", f"VENV={tmp_path}").stdout


@pytest.mark.parametrize("makefile", ["Makefile", "recipes/demo/Makefile"])
def test_an_old_make_is_refused_in_one_line(makefile):
    """Before any line that such a make could not read."""
    message = refused(plain_make("-f", makefile, ".FEATURES=target-specific order-only else-if", "MAKE_VERSION=3.81"))
    assert "GNU make 3.81 is here; 4.3 or newer is needed" in message


@pytest.mark.slow
def test_demo_runs_small_is_killed_and_goes_on(tmp_path):
    """The whole chain with 2+2 layers; training is killed with SIGKILL once a checkpoint is there."""
    small = [f"RUNS={tmp_path}", "PAIRS=2000", "LAYERS=2", "UPDATES=200", "SAVE_EVERY=20", "LOG_EVERY=10", "AVERAGE=2"]
    run = tmp_path / "demo/admin-cpu-s1"
    making = subprocess.Popen(
        make_command("demo", *small), cwd=ROOT, env=make_environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(run.glob("checkpoints/checkpoint_*_*.pt")):
        assert making.poll() is None and time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    second = make("demo", *small, timeout=60)
    assert second.returncode == 2 and f"{run}: process " in second.stderr and " is at work there. " in second.stderr
    os.killpg(making.pid, signal.SIGKILL)
    making.wait()
    assert not list(run.glob("trained-*")) and not (run / "summary.txt").exists()

    done = make("demo", *small, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (run / "train.log").read_text(encoding="utf-8")
    assert "Loaded checkpoint" in log and log.count("num. shared model params") == 2
    assert log.count("Admin: profiled") == 1, "a resumed run profiles nothing"
    text = (run / "summary.txt").read_text(encoding="utf-8")
    assert text in done.stdout and done.stdout.endswith(f"Report: {run}/report.html\n")
    assert names(run / "analysis") == {"dependency.json", "output-change.json"}
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert about["command"] == "make demo METHOD=admin SEED=1" and about["paper"] is None and len(about["samples"]) == 5
    report = (run / "report.html").read_text(encoding="utf-8")
    for told in (about["samples"][0]["source"], about["versions"]["torch"], "bound 0.0001", "Random perturbation"):
        assert told in report
    assert "Not measured" not in report and "No translations" not in report
    assert names(run) >= {"loss.png", "omega.png", "average.pt", "omega.json", "translations.txt", "score.json"}
    assert [row["updates"] for row in read_results(tmp_path)] == ["200"]
    assert {path.stem.rpartition("_")[2] for path in run.glob("checkpoints/checkpoint_*_*.pt")} == {"180", "200"}

    assert "model.pt: transformer_wmt_en_de, fp32; log-probabilities of" in done.stdout
    assert names(run / "model") == {"model.pt", "codes", "text.json", "dict.de.txt", "dict.en.txt"}
    translations = read_lines(run / "translations.txt")
    given = ["--user-dir", "fairseq_admin", "--path", run / "average.pt", "--gen-subset", "test", "--beam", 5, "--cpu"]
    given += ["--max-tokens", 1024, "--required-batch-size-multiple", 1, "--num-workers", 0]
    unfolded = run_module("fairseq_cli.generate", tmp_path / "demo/data/bin", *given, log=tmp_path / "unfolded.log")
    found = [read_lines(path) for path in (run / "generate.txt", tmp_path / "unfolded.log")]
    folded, unfolded = (score.hypotheses(lines, len(translations)) for lines in found)
    assert folded == unfolded and len(set(folded)) > 20
    lines = read_lines(tmp_path / "demo/data/raw/test.de")
    write_lines(tmp_path / "some.de", lines[:20])
    command = ["translate", run / "model/model.pt", tmp_path / "some.de", "-o", tmp_path / "some.en", "--device", "cpu"]
    assert run_module("fairseq_admin.cli", *command, log=tmp_path / "log").status == 0
    assert read_lines(tmp_path / "some.en") == translations[:20]

    again = make("demo", *small, timeout=60)
    assert again.returncode == 0 and "fairseq_cli" not in again.stdout, "the second time, all is there"
    other = make("demo", *small, "WIDTH=32", timeout=60)
    assert "made with other settings (--decoder-embed-dim 64 -> 32; --encoder-embed-dim 64 -> 32)" in other.stderr
    assert other.returncode == 2
    less = make("demo", *small, "UPDATES=140", timeout=60)
    assert less.returncode == 2 and "UPDATES=140 is less than" in less.stderr
    assert [row["beam"] for row in read_results(tmp_path)] == ["5"]
    mean = make("demo", *small, "BEAM=1", "AVERAGE=1", timeout=300)
    assert mean.returncode == 0 and "beam 5 -> 1" in mean.stderr and "average of checkpoint_" in mean.stdout
    assert "steps.train" not in mean.stdout
    assert [(row["average"], row["beam"]) for row in read_results(tmp_path)] == [("1", "1")]
    more = make("demo", *small, "AVERAGE=3", timeout=60)
    assert more.returncode == 2 and "AVERAGE 1 -> 3: " in more.stderr and "holds 2 to average" in more.stderr
