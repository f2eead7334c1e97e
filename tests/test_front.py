"""The front: checked settings, the table of steps, and a small demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT, front, make_environment, names, run_module

from fairseq_admin.method.schemes import SCHEMES
from recipes import recipe as recipes
from recipes.__main__ import STEPS
from recipes.chain import Chain, Step
from recipes.steps.common import read_lines, write_lines
from recipes.steps.guard import exclusive_folder
from recipes.steps.results import read as read_results
from recipes.translation import Translation


def read(target: str, *words: str) -> recipes.Recipe:
    return recipes.read(target, dict(word.split("=", 1) for word in words))


def pipeline(target: str, *words: str) -> Translation:
    return Translation(read(target, *words))


# -- settings --------------------------------------------------------------------------------------------------------

WRONG = [
    ("demo", "METHOD=admin pre-ln", "METHOD=admin pre-ln is invalid: input should be 'admin', 'post-ln', "),
    ("multi30k", "PRESET=tpu", "PRESET=tpu is unknown; expected cpu or gpu"),
    ("own", "PAIR=en-en", "PAIR=en-en names one language twice"),
    ("own", "PAIR=../x", "PAIR=../x is invalid: string should match pattern '^"),
    ("own", "CORPUS=a/b", "CORPUS=a/b is invalid: string should match pattern"),
    ("own", "DATA=README.md", "DATA=README.md is invalid: expected a folder that is there"),
    ("demo", "UPDATES=1e3", "UPDATES=1e3 is invalid: input should be a valid integer"),
    ("demo", "UPDATES=1010", "Give SAVE_EVERY=10 AVERAGE=3, or UPDATES=1050."),
    ("demo", "AVERAGE=21", "expected a multiple of SAVE_EVERY, with AVERAGE checkpoints or more. Give SAVE_EVERY=28"),
    ("iwslt14", "AVERAGE=91", "EPOCHS=90 make fewer checkpoints than AVERAGE=91 averages. Give AVERAGE=90"),
    ("iwslt14", "UPDATES=1000", "UPDATES=1000 is given, and EPOCHS=90 says how long it trains"),
    ("wmt14-ende-6l", "UPDATE_FREQ=4", "UPDATE_FREQ=4 has no effect with TOKENS=32768; change TOKENS=."),
    ("demo", "LR=inf", "LR=inf is invalid: input should be a finite number (peak learning rate)."),
    ("demo", "PAIRS=99", "PAIRS=99 is invalid: input should be greater than or equal to 100 (sentence pairs"),
    ("demo", "WIDTH=30", "WIDTH=30 is not a multiple of HEADS=4"),
    ("demo", "TOKENISER=normalise truecase", "is invalid: input should be 'lowercase', 'normalise',"),
    ("demo", "RUNS=a:b", "RUNS=a:b is invalid: expected a path without a colon or a comma"),
    ("demo", "DATA=x", "DATA=x is not a setting of demo. See make help TARGET=demo."),
    ("demo", "SEEED=2", "SEEED=2 is not a setting of demo. SEED is one. See make help TARGET=demo."),
    ("demo", "NODES=2", "NODES=2 needs MASTER=HOST:PORT, where the first node is reached; found MASTER=."),
    ("demo", "NODES=2|MASTER=h:1|NODE_RANK=2", "NODE_RANK=2 is not one of NODES=2; expected a number from 0 to 1"),
    ("compare", "RATES=1e-3 nan", "RATES=1e-3 nan is invalid: expected numbers of 0 or more, as 1e-3, one or more"),
    ("compare", "RATES=1 1", "RATES=1 1 is invalid: expected one or more, with spaces between and none twice ("),
    ("compare", "PATIENCE=50", "PATIENCE=50 is not a multiple of SAVE_EVERY=100"),
    ("demo", "TRAIN_ARGS=--save-dir x", "--save-dir among the options of fairseq-train: the recipe sets it."),
    ("compare", "TRAIN_ARGS=--adam-eps 1e-6 --lr=1e-4", "--lr among the options of fairseq-train: the recipe sets it."),
    ("compare", "TRAIN_ARGS=--admin-init log", "--admin-init among the options of fairseq-train: the recipe sets it."),
    ("sensitivity", "BETA2S=1", "BETA2S=1 is invalid: expected numbers below 1, as 0.98"),
]


@pytest.mark.parametrize(("target", "words", "message"), WRONG)
def test_what_cannot_be_is_named(target, words, message):
    more = ["DATA=docs", "PAIR=de-en"] if target == "own" else []
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(target, *more, *words.split("|"))
    assert "\n" not in str(error.value)


COMMAND_LINES = [
    ("", 0, "Targets: compare deeper demo"),
    ("--help", 0, "-n, --dry-run"),
    ("demo --help", 0, "make demo PRESET=cpu"),
    ("demo PRESET=tpu --help", 2, "PRESET=tpu is unknown; expected cpu."),
    ("status --help", 0, "status (of all runs in RUNS=)"),
    ("demo LAYERS=2 --lr 3", 2, "unrecognized arguments: --lr 3"),
    ("wmt15-preflight", 2, "wmt15-preflight is unknown; expected one of compare"),
    ("demo typo", 2, "typo: expected NAME=VALUE, a setting of demo."),
    ("demo -- --lr", 2, "--: error: argument --lr: expected one argument"),
    ("demo -- 0.2", 2, "0.2 after --: expected an option of fairseq-train"),
    ("status RUN=x", 2, "expected RUNS=FOLDER, or nothing"),
    ("status RUNS=no/such", 2, "RUNS=no/such: no such folder"),
    ("status", 0, "runs: no runs yet."),
]


@pytest.mark.parametrize(("words", "status", "message"), COMMAND_LINES)
def test_the_command_line_is_read_before_anything_starts(words, status, message, tmp_path):
    done = front(*words.split(), RUNS=str(tmp_path / "runs"))
    assert done.returncode == status and message in " ".join((done.stdout + done.stderr).split()), done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_option_of_fairseqs_is_the_setting_that_renames_it():
    file, _ = recipes.files()["demo"]
    options = "--dropout 0.2 --lr=5e-4 --adam-eps 1e-6".split()
    given = recipes.collect("demo", ["NODE=0", "TRAIN_ARGS=--seed 7 --fp16"], file.names, options, file.aliases)
    given = {name: value for name, value in given.items() if name not in os.environ}
    assert given.pop("NODE_RANK") == "0", "its name in earlier versions"
    assert given == {"DROPOUT": "0.2", "LR": "5e-4", "SEED": "7", "TRAIN_ARGS": "--fp16 --adam-eps 1e-6"}
    command = " ".join(Translation(recipes.read("demo", given)).command())
    assert (
        command.count("--dropout") == 1 and "--dropout 0.2 " in command and command.endswith("--fp16 --adam-eps 1e-6")
    )


def test_help_lists_nothing_that_the_recipe_refuses():
    """Help lists only settings that can be given: none that the recipe refuses or another setting overrides."""
    assert "MEMORY" not in " ".join(recipes.help_lines("demo", {}))
    lines = recipes.help_lines("compare", {"JOBS": "2"})
    assert "JOBS=2: runs at a time, each on a GPU of its own where there are any" in lines
    assert any(re.fullmatch("SEARCH=every: .*; one of: every first", line) for line in lines)
    for target, (file, _) in recipes.files().items():
        more = ["DATA=docs", "PAIR=de-en"] if target == "own" else []
        for preset in file.presets:
            listed = [line.partition(": ")[0] for line in recipes.help_lines(target, {"PRESET": preset})[2:]]
            given = [word for word in listed if "=" in word and not word.startswith("GPUS=")]
            assert read(target, *given, *more).settings.PRESET == preset, target


def test_a_rule_is_in_the_folder_the_options_and_the_key_of_a_run():
    """A run's folder name, options and key contain its rule, except for the paper's rule, which keeps old names.

    A method without ω has no rule.
    """
    paper, ours, none = (pipeline("demo", *words) for words in (["INIT=reference"], [], ["METHOD=pre-ln"]))
    assert [run.folder.name for run in (paper, ours, none)] == [
        "admin-cpu-s1", "admin-constant-cpu-s1", "pre-ln-cpu-s1"
    ]  # fmt: skip
    assert ours.resume_settings() == {**paper.resume_settings(), "--admin-init": "constant"}
    assert ["--admin-init" in run.command() for run in (paper, ours, none)] == [False, True, False]
    for target in ("iwslt14", "wmt14-ende-6l", "wmt14-enfr-60l"):
        assert read(target, "GPUS=1").settings.rule == "reference"


def test_status_says_how_far_each_run_is(tmp_path):
    more = ["report.html", "trained-40", "checkpoints/checkpoint_stopped_2_55.pt"]
    runs = {"done": ["report.html"], "more": more, "part": ["checkpoints/checkpoint_1_40.pt"], "busy": []}
    for name, files in runs.items():
        for file in ["train.log", *files]:
            write_lines(tmp_path / f"demo/{name}/{file}", [])
    with exclusive_folder(tmp_path / "demo/busy"):
        busy, done, *stopped = front("status", f"RUNS={tmp_path}").stdout.splitlines()
    assert busy.startswith(f"{tmp_path}/demo/busy: at work: process {os.getpid()} on ")
    assert done == f"{tmp_path}/demo/done: done" and [line.split(": ")[1] for line in stopped] == [
        "stopped after 55 updates", "stopped after 40 updates"
    ]  # fmt: skip


def test_values_reach_the_front_through_make_as_they_are(tmp_path):
    """make passes values unchanged, from its command line and the environment. An unknown setting is refused."""
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"demo:\n\t+@{sys.executable} -m recipes $@\n")

    def make(*words: str, **more: str) -> subprocess.CompletedProcess:
        command = ["make", "-f", str(makefile), "-n", "demo", *words]
        return subprocess.run(command, cwd=ROOT, env=make_environment(**more), capture_output=True, text=True)

    done = make("RUNS=a b$$c'd\"", TRAIN_ARGS="--x 'y z'", SEED="7")
    assert done.returncode == 0 and "a b$c'd\"/demo/admin-constant-cpu-s7/trained-700" in done.stdout, done.stderr
    done = make("SEDE=2")
    assert done.returncode == 2 and "SEDE=2 is not a setting of demo. SEED is one." in done.stderr
    assert "From the environment: SEED=7" in make("RUNS=x", SEED="7").stderr


def test_make_has_every_target_of_the_recipes():
    targets = [*recipes.files()]
    for name, (file, _) in recipes.files().items():
        targets += [f"{name}-{step}" for step in STEPS if not file.is_grid]
    command = ["make", "-n", "VENV=none", *targets]
    done = subprocess.run(command, cwd=ROOT, env=make_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\nmake setup comes first") == len(targets), done.stderr


def test_the_front_loads_no_fairseq():
    """The front and its steps do not import fairseq, which takes seconds and changes logging.

    train.py and early_stop.py are the exception: they are fairseq-train, in a process of its own.
    """
    steps = sorted({path.stem for path in ROOT.glob("recipes/steps/*.py")} - {"train", "early_stop"})
    code = f"import sys, recipes.__main__, {', '.join(f'recipes.steps.{name}' for name in steps)}\n"
    code += "print({'torch', 'fairseq'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


# -- the table -------------------------------------------------------------------------------------------------------


def table(folder: Path, done: list[str], width: int = 1, version: int = 1, texts: Path | None = None) -> Chain:
    """A chain of steps: two user texts are joined, the first alone is cut, and the last step reads both results."""

    def program(name: str, *reads: Path):
        def write() -> None:
            done.append(name)
            write_lines(folder / name, [line for path in reads for line in read_lines(path)])

        return write

    first, second, joined = (texts or folder) / "first", (texts or folder) / "second", folder / "joined"
    return Chain(
        [
            Step("join", folder, (joined,), program("joined", first, second), (first, second), {"width": width}),
            Step("cut", folder, (folder / "cut",), program("cut", first), (first,), version=version),
            Step("end", folder, (folder / "end",), program("end", joined, folder / "cut"), (joined, folder / "cut")),
        ]
    )


def test_a_change_makes_again_what_depends_on_it_and_nothing_else(tmp_path, capsys):
    """A file counts by its content. Once a model depends on the result, a change is refused."""
    done: list[str] = []

    def made(width: int = 1, texts: Path | None = None) -> list[str]:
        done.clear()
        table(tmp_path, done, width, texts=texts).make([tmp_path / "end"], tmp_path)
        return list(done)

    write_lines(tmp_path / "first", ["a"])
    write_lines(tmp_path / "second", ["b"])
    assert made() == ["joined", "cut", "end"] and read_lines(tmp_path / "end") == ["a", "b", "a"]
    assert made() == []
    written = (tmp_path / "second").stat()
    write_lines(tmp_path / "second", ["c"])
    os.utime(tmp_path / "second", ns=(written.st_atime_ns, written.st_mtime_ns))
    assert made() == ["joined", "end"], "although its size and time of modification are the same"
    assert f"# join (second {tmp_path}/second (2 bytes, SHA-256 " in capsys.readouterr().out
    os.utime(tmp_path / "second")
    assert made() == [], "the same content"
    for name in ("first", "second"):
        write_lines(tmp_path / "moved" / name, read_lines(tmp_path / name))
    assert made(texts=tmp_path / "moved") == [], "the same content in another folder"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty/first"):
        made(texts=tmp_path / "empty")
    assert made(width=2) == ["joined", "end"]
    (tmp_path / "joined").unlink()
    (tmp_path / "second").unlink()
    assert made(width=2) == [], "what only a step that is done reads is not made again"
    (tmp_path / "cut").unlink()
    write_lines(tmp_path / "second", ["c"])
    (tmp_path / "end").unlink()
    assert made(width=2) == ["joined", "cut", "end"]
    write_lines(tmp_path / "run/trained-5", [])
    with pytest.raises(ValueError, match=rf"made with other settings .width 2 -> 3., and {tmp_path}/run holds a model"):
        made(width=3)
    assert not done


def test_a_program_of_another_version_makes_its_step_again(tmp_path, capsys):
    """A new program version repeats its step and later steps, unless a model depends on the old version's result."""
    done: list[str] = []
    for name in ("first", "second"):
        write_lines(tmp_path / name, ["a"])
    table(tmp_path, done).make([tmp_path / "end"])
    done.clear()
    kept = table(tmp_path, done, version=2)
    assert kept.keep_versions() == ["cut"] and not kept.plan([tmp_path / "end"])
    table(tmp_path, done, version=2).make([tmp_path / "end"])
    assert done == ["cut", "end"] and "# cut (version unset -> 2)" in capsys.readouterr().out


def test_a_step_that_was_killed_with_other_settings_is_done_again(tmp_path, monkeypatch):
    """Files that another setting wrote do not count as those of the present one, wherever that run was killed."""
    done: list[str] = []
    for name in ("first", "second"):
        write_lines(tmp_path / name, ["a"])
    table(tmp_path, done).make([tmp_path / "end"])
    keep = Chain.keep
    for killed in ("join", "end"):

        def until_killed(chain: Chain, step: Step, killed: str = killed) -> None:
            if step.name == killed:
                raise KeyboardInterrupt
            keep(chain, step)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Chain, "keep", until_killed)
            table(tmp_path, done, width=2).make([tmp_path / "end"])
        done.clear()
        table(tmp_path, done).make([tmp_path / "end"])
        assert done == ["joined", "end"], killed


# -- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "folds"), [("admin", True), ("b2t", False)])
def test_every_scheme_is_trained_in_one_way(method, folds):
    """Every scheme trains with the plugin and its option. Schemes that fold are then used without the plugin."""
    run = pipeline("demo", f"METHOD={method}")
    arch = f"--arch transformer_admin_18l --admin-scheme {method} "
    assert f"--user-dir fairseq_admin --source-lang de --target-lang en {arch}" in " ".join(run.command())
    assert run.folded == folds == SCHEMES[method].folds and run.user_dir == (
        [] if folds else ["--user-dir", "fairseq_admin"]
    )


def test_what_to_run_next_repeats_every_setting(tmp_path):
    (tmp_path / "my text").mkdir()
    given = read("own", f"DATA={tmp_path}/my text", "PAIR=de-en", "METHOD=pre-ln", "SEED=3", "UPDATES=2000", "LAYERS=6")
    assert given.command == f"make own 'DATA={tmp_path}/my text' LAYERS=6 PAIR=de-en PRESET=cpu UPDATES=2000"
    assert read("own", "DATA=docs/..", "PAIR=de-en").base == Path("runs/own", ROOT.name, "de-en")


@pytest.mark.slow
def test_a_run_from_before_the_front_is_not_trained_again(tmp_path):
    """A run of commit 8e7c53e has its settings compared and its text prepared again. It is scored and resumed."""
    with tarfile.open(ROOT / "tests/golden/run-of-8e7c53e.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    given = "INIT=reference PAIRS=100 MERGES=30 LAYERS=1 WIDTH=4 FFN=4 HEADS=1 AVERAGE=1 MAX_TOKENS=512 WARMUP=10"
    given += " SAVE_EVERY=4 LOG_EVERY=1"
    run, given = tmp_path / "demo/admin-cpu-s1", [f"RUNS={tmp_path}", *given.split()]
    checkpoint = run / "checkpoints/checkpoint_1_8.pt"
    weights = checkpoint.read_bytes()
    other = front("demo-train", *given, "UPDATES=8", "LR=0.1")
    assert other.returncode == 2 and "made with other settings (--lr 0.0015 -> 0.1)" in other.stderr
    said = (
        f"{tmp_path}/demo/data is of a version before 0.2.0. It stays; the text is made again in {tmp_path}/demo/text."
    )
    assert other.stderr.startswith(said) and not (tmp_path / "demo/data/.keys").exists()
    done = front("demo-score", *given, "UPDATES=8", "LR=1.5e-3")
    assert done.returncode == 0 and "# average" in done.stdout, done.stdout + done.stderr
    done = front("demo-score", *given, "UPDATES=8", "BEAM=2")
    assert done.returncode == 0 and "# generate (beam 5 -> 2)" in done.stdout, done.stdout + done.stderr
    assert "# train" not in done.stdout and "# average" not in done.stdout and checkpoint.read_bytes() == weights
    assert [row["beam"] for row in read_results(tmp_path / "results.csv")] == ["2"]
    other = front("demo-prepare", *given, "MERGES=31")
    assert other.returncode == 2 and "(merges 30 -> 31), and " in other.stderr and "to begin again" in other.stderr
    more = front("demo-train", *given, "UPDATES=12")
    assert more.returncode == 0 and "update     12/12" in more.stdout and "update      8/12" not in more.stdout
    assert (run / "trained-12").exists() and (run / "trained-8").exists()


def test_a_summary_is_made_again_where_another_methods_score_is_new(tmp_path):
    """A summary of one or more methods is written again if another method has a new score, or one is rescored."""

    def key(*methods: str) -> str:
        for method in methods:
            write_lines(tmp_path / f"demo/{method.lower()}-cpu-s1/score.json", [method])
        chain = Chain(pipeline("demo", f"RUNS={tmp_path}").steps())
        return chain.key(next(step for step in chain.steps if step.name == "summary"))

    keys = [key(), key("pre-ln"), key("post-ln"), key("deepnorm"), key("Pre-LN")]
    assert len({*keys}) == 5 and key() == keys[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_runs_small(tmp_path):
    """The whole chain runs with 2+2 layers. The second time, nothing is left to do."""
    small = [f"RUNS={tmp_path}", "PAIRS=2000", "LAYERS=2", "UPDATES=200", "SAVE_EVERY=20", "LOG_EVERY=10", "AVERAGE=2"]
    small += ["INIT=reference"]
    run = tmp_path / "demo/admin-cpu-s1"
    done = front("demo", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (run / "summary.txt").read_text(encoding="utf-8")
    assert text in done.stdout and done.stdout.endswith(f"Report: {run}/report.html\n")
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "bound 0.0001" in report and "random perturbation" in report
    assert "Not measured" not in report and "no translations" not in report
    assert [row["updates"] for row in read_results(tmp_path / "results.csv")] == ["200"]

    assert "model.pt: transformer_wmt_en_de, fp32; log-probabilities of" in done.stdout
    assert names(run / "model") == {"model.pt", "codes", "text.json", "dict.de.txt", "dict.en.txt"}
    translations = read_lines(run / "translations.txt")
    assert len(set(translations)) > 20
    lines = read_lines(tmp_path / "demo/data/raw/test.de")
    write_lines(tmp_path / "some.de", lines[:20])
    command = ["translate", run / "model/model.pt", tmp_path / "some.de", "-o", tmp_path / "some.en", "--device", "cpu"]
    assert run_module("fairseq_admin.cli", *command, log=tmp_path / "log").status == 0
    assert read_lines(tmp_path / "some.en") == translations[:20]

    again = front("demo", *small)
    assert again.returncode == 0 and "#" not in again.stdout, "the second time, all is there"
    mean = front("demo", *small, "BEAM=1", "AVERAGE=1")
    assert mean.returncode == 0 and "# generate" in mean.stdout and "average of checkpoint_" in mean.stdout
    assert "# train" not in mean.stdout
    assert [(row["average"], row["beam"]) for row in read_results(tmp_path / "results.csv")] == [("1", "1")]
