"""The front: checked settings and options, names of folders, what makes a folder, and a small demo."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, front, make_environment, names, run_module

from fairseq_admin.method.schemes import SCHEMES
from recipes import options as opts
from recipes import recipe as recipes
from recipes.__main__ import STEPS, grids
from recipes.settings import Settings, collect, old_names
from recipes.steps import checkpoints
from recipes.steps.common import read_lines, write_lines
from recipes.steps.results import read as read_results
from recipes.training import Run, check_unchanged


def read(target: str, *words: str) -> recipes.Recipe:
    return recipes.read(target, dict(word.split("=", 1) for word in words))


def run_of(target: str, *words: str) -> Run:
    return Run(read(target, *words))


def train(target: str, *words: str) -> dict[str, str]:
    """fairseq-train's options of a run."""
    return opts.parse(shlex.join(run_of(target, *words).train_words()[5:]))


# -- settings and options ------------------------------------------------------------------------------------------

WRONG = [
    ("demo", "METHOD=admin pre-ln", "METHOD=admin pre-ln is invalid: input should be '', 'admin', 'post-ln', "),
    ("demo", "ARGS=--admin-scheme typo", "--admin-scheme typo is unknown; expected one of admin"),
    ("multi30k", "PRESET=tpu", "PRESET=tpu is unknown; expected gpu or cpu"),
    ("multi30k", "PAIR=de-es", "PAIR=de-es is not of multi30k; expected de-en, en-de"),
    ("own", "PAIR=en-en", "PAIR=en-en is invalid: expected two codes, since each names the file of a side"),
    ("own", "PAIR=../x", "PAIR=../x is invalid: expected two codes, as in de-en"),
    ("own", "DATA=README.md", "DATA=README.md is invalid: expected a folder that is there"),
    ("demo", "UPDATES=1e3", "UPDATES=1e3 is invalid: input should be a valid integer"),
    ("demo", "ARGS=--max-update 1e3", "--max-update 1e3: expected a whole number above 0."),
    ("demo", "ARGS=--save-interval-updates 30", "700 updates, with a checkpoint every 30: expected a multiple"),
    ("demo", "UPDATES=2|AVERAGE_ARGS=--last 3", "and at least the 3 checkpoints that AVERAGE_ARGS='--last 3' averages"),
    (
        "iwslt14",
        "AVERAGE_ARGS=--last 91",
        "90 epochs, with a checkpoint every 1: expected a multiple, and at least the 91",
    ),
    ("iwslt14", "UPDATES=1000", "UPDATES=1000: iwslt14 trains by epochs; give ARGS='--max-epoch ...'."),
    (
        "demo",
        "PREPARE_ARGS=--pairs 99",
        "pairs=99 is invalid: input should be greater than or equal to 100 (sentence pairs",
    ),
    ("demo", "ARGS=--encoder-embed-dim 30", "--encoder-embed-dim 30 is not a multiple of --encoder-attention-heads 4"),
    ("demo", "PREPARE_ARGS=--tokeniser normalise truecase", "is invalid: input should be 'lowercase', 'normalise',"),
    ("demo", "PREPARE_ARGS=--typo 1", "typo is unknown; expected one of table, sums, "),
    ("demo", "RUNS=a:b", "RUNS=a:b is invalid: expected a path without a colon or a comma"),
    ("demo", "DATA=docs", "DATA=docs is not a setting of demo"),
    ("demo", "NODES=2", "NODES=2 needs MASTER=HOST:PORT, where the first node is reached; found MASTER=."),
    (
        "demo",
        "NODES=2/2|MASTER=h:1",
        "NODES=2/2 is invalid: expected a number, or as 1/2 on the second of two machines",
    ),
    ("demo", "LAYERS=6-6-6", "LAYERS=6-6-6 is invalid: expected a number, or two as in 60-12."),
    ("demo", "ARGS=--save-dir x", "ARGS: the recipe sets --save-dir itself. Leave it out."),
    ("demo", "ARGS=lr 3", "ARGS: lr: expected an option, as in --dropout 0.2."),
    ("demo", "GENERATE_ARGS=--beam '3", "GENERATE_ARGS: No closing quotation"),
]


@pytest.mark.parametrize(("target", "words", "message"), WRONG)
def test_what_cannot_be_is_named(target, words, message):
    more = ["DATA=docs", "PAIR=de-en"] if target == "own" else []
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        run_of(target, *more, *words.split("|"))
    assert "\n" not in str(error.value)


def test_a_missing_setting_is_named():
    with pytest.raises(ValueError, match="DATA= is missing; expected folder with your text"):
        read("own", "PAIR=de-en")


COMMAND_LINES = [
    ("", 0, "Targets: demo iwslt14"),
    ("--help", 0, "-n, --dry-run"),
    ("demo --help", 0, "make demo NAME=VALUE"),
    ("demo PRESET=tpu --help", 2, "PRESET=tpu is unknown; expected none."),
    ("demo LAYERS=2 --lr 3", 2, "unrecognized arguments: --lr 3"),
    ("wmt15-preflight", 2, "wmt15-preflight is unknown; expected one of demo"),
    ("demo typo", 2, "typo: expected NAME=VALUE, a setting of demo."),
    ("demo -- 0.2", 2, "0.2 after --: expected an option of fairseq-train"),
    ("demo SEEED=2", 2, "SEEED=2 is not a setting of demo. SEED is one. See make help TARGET=demo."),
    ("demo LR=5e-4", 2, "LR=5e-4 is now written ARGS='--lr 5e-4'."),
    ("compare BEAM=9", 2, "BEAM=9 is now written GENERATE_ARGS='--beam 9'."),
]


@pytest.mark.parametrize(("words", "status", "message"), COMMAND_LINES)
def test_the_command_line_is_read_before_anything_starts(words, status, message, tmp_path):
    done = front(*words.split(), RUNS=str(tmp_path / "runs"))
    assert done.returncode == status and message in " ".join((done.stdout + done.stderr).split()), done.stderr
    assert not (tmp_path / "runs").exists()


def test_there_are_few_settings_and_an_old_one_says_how_to_write_it_now():
    """At most 15 capitals, and the ARGS of the other commands. No old name is a setting, and no advice names one."""
    current = Settings.model_fields.keys()
    assert len({name for name in current if not name.endswith("_ARGS")}) <= 15 and not current & old_names().keys()
    for name, advice in old_names().items():
        assert {*re.findall(r"\b([A-Z_]{3,})=", advice)} <= {*current, "PATIENCE", "ENCODER_LR_FACTOR"}, name
        with pytest.raises(ValueError, match=re.escape(f"{name}=7 is now written {advice.format(7)}.")):
            collect("demo", [f"{name}=7"], current)


def test_a_users_option_replaces_the_recipes_and_an_empty_one_takes_it_away():
    given = collect(
        "demo", ["ARGS=--seed 7 --fp16", "RUNS=x"], Settings.model_fields, "--dropout 0.2 --lr=5e-4".split()
    )
    options = train("demo", *(f"{name}={value}" for name, value in given.items()), "GENERATE_ARGS=--beam 9 --lenpen=")
    assert {name: options[name] for name in ("--seed", "--dropout", "--lr")} == {
        "--seed": "7", "--dropout": "0.2", "--lr": "5e-4"
    }  # fmt: skip
    assert "--fp16" not in options, "not on a CPU"
    assert "--clip-norm" in train("demo") and "--clip-norm" not in train("demo", "ARGS=--clip-norm=")
    generate = run_of("demo", "GENERATE_ARGS=--beam 9 --lenpen=").generate_words()
    assert (
        generate.count("--beam") == 1 and generate[generate.index("--beam") + 1] == "9" and "--lenpen" not in generate
    )


def test_help_shows_first_what_people_change_and_the_recipes_options():
    lines = list(recipes.help_lines("iwslt14", {}))
    assert lines[0] == "make iwslt14 PRESET=paper|small NAME=VALUE ..." and lines[2].startswith("METHOD: ")
    assert any(line.startswith("\ntrain: ") and " --warmup-updates 6000 " in line for line in lines)
    assert not any(line.startswith("PAIR") for line in lines)


def test_a_recipe_by_updates_trains_by_epochs_if_it_is_asked_to():
    run, options = run_of("demo", "ARGS=--max-epoch 3"), train("demo", "ARGS=--max-epoch 3")
    assert not options.keys() & {"--max-update", "--save-interval", "--validate-interval"}
    assert options["--keep-last-epochs"] == "3" and run.recipe.model.name == "at-3-epochs" and run.unit == "epochs"


def test_the_length_decides_the_checkpoints_unless_the_user_does():
    """A length that the recipe's interval does not fit has another one, and fewer checkpoints to average."""
    run = run_of("demo", "UPDATES=2")
    assert (
        run.recipe.options["average"] == {"--last": "2"}
        and train("demo", "UPDATES=2")["--save-interval-updates"] == "1"
    )
    options = train("demo", "UPDATES=1010")
    assert (options["--save-interval-updates"], options["--validate-interval-updates"]) == ("10", "10")
    assert options["--keep-interval-updates"] == "3" and run_of("demo", "UPDATES=1010").folder.name == "admin-s1"
    assert train("iwslt14", "ARGS=--max-epoch 4")["--keep-last-epochs"] == "4"


# -- names -----------------------------------------------------------------------------------------------------------

NAMES = [
    ("demo", "", "demo/admin-s1/at-700"),
    ("demo", "METHOD=pre-ln|SEED=2", "demo/pre-ln-s2/at-700"),
    ("demo", "INIT=reference|UPDATES=1000", "demo/admin-reference-s1/at-1000"),
    ("demo", "INIT=constant|ARGS=--lr 0.0015 --dropout 0.0", "demo/admin-s1/at-700"),
    ("demo", "METHOD=pre-ln|INIT=reference", "demo/pre-ln-s1/at-700"),
    ("demo", "ARGS=--lr 5e-4 --adam-betas '(0.9, 0.99)'", "demo/admin-adam-betas0.9_0.99-lr5e-4-s1/at-700"),
    ("demo", "LAYERS=6|ARGS=--clip-norm=", "demo/admin-6l-no-clip-norm-s1/at-700"),
    ("demo", "LAYERS=60-12|PREPARE_ARGS=--merges 300", "demo/admin-60-12l-merges300-s1/at-700"),
    ("demo", "ARGS=--encoder-embed-dim 16 --decoder-embed-dim 16", "demo/admin-embed-dim16-s1/at-700"),
    ("demo", "GENERATE_ARGS=--beam 9", "demo/admin-s1/at-700-beam9"),
    ("demo", "AVERAGE_ARGS=--last 5|GENERATE_ARGS=--beam 9 --cpu=", "demo/admin-s1/at-700-last5-beam9"),
    ("demo", "ARGS=--save-interval-updates 10", "demo/admin-save-interval-updates10-s1/at-700"),
    ("demo", "ARGS=--max-tokens 512 --log-interval 1 --num-workers 1", "demo/admin-s1/at-700"),
    ("demo", "ARGS=--update-freq 4", "demo/admin-tokens4096-s1/at-700"),
    ("iwslt14", "GPUS=2", "iwslt14/admin-s1/at-90-epochs"),
    ("iwslt14", "PRESET=small", "iwslt14/admin-small-s1/at-3-epochs"),
    ("iwslt14", "PRECISION=fp16", "iwslt14/admin-s1/at-90-epochs"),
    ("iwslt14", "PRECISION=bf16", "iwslt14/admin-bf16-s1/at-90-epochs"),
    ("wmt14-ende-18l", "", "wmt14/en-de/18l/admin-s1/at-100-epochs"),
    ("own", "DATA=docs/..|PAIR=de-en|PRESET=cpu", f"own/{ROOT.name}/de-en/admin-cpu-s1/at-4000"),
]


@pytest.mark.parametrize(("target", "words", "folder"), NAMES)
def test_a_run_is_named_by_what_the_user_changed(target, words, folder):
    """The scheme, what was changed, and the seed. What does not change the result in kind is in no name."""
    given = read(target, "RUNS=R", *filter(None, words.split("|")))
    assert str(given.result) == f"R/{folder}" and given.model.parent == given.run


def test_a_name_that_would_be_too_long_ends_in_a_hash():
    one, other = (read("demo", f"ARGS=--arch {'x' * 150}{end}").run.name for end in "ab")
    assert one != other and len(one) < 130


def test_a_rule_is_in_the_options_of_a_scheme_that_has_one():
    assert train("demo")["--admin-init"] == "constant" and "--admin-init" not in train("demo", "METHOD=pre-ln")
    for target in ("iwslt14", "wmt14-ende-6l", "wmt14-enfr-60l"):
        assert read(target, "GPUS=1").rule == "reference"


def test_a_text_is_named_by_its_sources_options_and_programs(tmp_path, monkeypatch):
    """A text's folder changes with its sources' content, options and programs' versions, and with nothing else."""

    def name(*words: str, data: str = "mine") -> str:
        return run_of(
            "own", f"DATA={tmp_path / data}", "PAIR=de-en", f"RUNS={tmp_path / 'runs'}", *words
        ).text.folder.name

    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            write_lines(tmp_path / f"mine/{split}.{language}", [f"{split} {language}"])
    first = name()
    assert re.fullmatch("text-[0-9a-f]{8}", first) and first == name("SEED=2", "PREPARE_ARGS=--too-long skip")
    assert len({first, name("PREPARE_ARGS=--merges 9"), name("PREPARE_ARGS=--clean="), name("PAIR=en-de")}) == 4
    os.rename(tmp_path / "mine", tmp_path / "moved")
    assert name(data="moved") == first, "the same content in another folder"
    path = tmp_path / "moved/train.de"
    written = path.stat()
    write_lines(path, ["train xx"])
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    changed = name(data="moved")
    assert changed != first, "although its size and time of modification are the same"
    path.unlink()
    assert name(data="moved") == changed, "a source may be deleted once it was read"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty/train.de: is not there"):
        name(data="empty")
    monkeypatch.setattr("recipes.steps.bpe.VERSION", 7)
    assert name(data="moved") != changed


# -- the environment -------------------------------------------------------------------------------------------------


def test_values_reach_the_front_through_make_as_they_are(tmp_path):
    """make passes values unchanged, from its command line and the environment. An unknown setting is refused."""
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"demo:\n\t+@{sys.executable} -m recipes $@\n")

    def make(*words: str, **more: str) -> subprocess.CompletedProcess:
        command = ["make", "-f", str(makefile), "-n", "demo", *words]
        return subprocess.run(command, cwd=ROOT, env=make_environment(**more), capture_output=True, text=True)

    done = make("RUNS=a b$$c'd\"", ARGS="--adam-eps '1e-6'", SEED="7")
    folder = shlex.quote("a b$c'd\"/demo/admin-adam-eps1e-6-s7/checkpoints")
    assert done.returncode == 0 and folder in done.stdout, done.stderr
    done = make("SEDE=2")
    assert done.returncode == 2 and "SEDE=2 is not a setting of demo. SEED is one." in done.stderr
    assert "From the environment: SEED=7" in make("RUNS=x", SEED="7").stderr


def test_make_has_every_target_of_the_recipes():
    targets = [*recipes.files(), *grids()]
    targets += [f"{name}-{step}" for name in recipes.files() for step in STEPS]
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


def test_nothing_imports_research():
    """The recipes do not need what made the rows of docs/."""
    files = [path for path in ROOT.glob("recipes/**/*.py") if "research" not in path.parts]
    importing = [
        str(path) for path in files if re.search(r"^\s*(from|import) recipes.research", path.read_text(), re.M)
    ]
    assert len(files) > 20 and not importing


# -- what made a folder ----------------------------------------------------------------------------------------------


def test_a_folder_keeps_to_the_options_that_made_it(tmp_path):
    """Other options are refused once there is a model; before that, they replace the stored ones. 1e-3 equals 0.001."""
    folder = tmp_path / "run"
    check_unchanged(folder, {"--lr": "1e-3"})
    check_unchanged(folder, {"--lr": "2e-3"})
    assert json.loads((folder / "recipe.json").read_text()) == {"--lr": "2e-3"}
    write_lines(folder / "checkpoints/checkpoint_1_50.pt", [])
    check_unchanged(folder, {"--lr": "0.002"})
    for changed, message in (({"--lr": "1"}, "--lr 2e-3 -> 1"), ({"--lr": "2e-3", "--fp16": ""}, "--fp16 unset -> on")):
        with pytest.raises(ValueError, match=rf"run was made by another recipe \({message}\).*remove the folder to"):
            check_unchanged(folder, changed)
    write_lines(folder / "settings.json", ["{}"])
    with pytest.raises(ValueError, match="made by version 0.3.0 or earlier"):
        check_unchanged(folder, {"--lr": "2e-3"})


def test_a_recipe_that_changed_under_its_run_is_noticed(tmp_path, monkeypatch):
    """After a pull or an edit, the difference is said. Other machines, batches, lengths and logs are none."""
    words = [f"RUNS={tmp_path}", "UPDATES=20"]
    run_of("demo", *words).check()
    write_lines(tmp_path / "demo/admin-s1/checkpoints/checkpoint_1_20.pt", [])
    run_of("demo", *words, "ARGS=--max-tokens 512 --log-interval 1").check()
    run_of("demo", f"RUNS={tmp_path}", "UPDATES=30").check()
    _, file, _ = recipes.files()["demo"]
    changed = file.model_copy(update={"train": [*file.train, "--lr 9e-4"]})
    monkeypatch.setattr(recipes, "files", lambda: {"demo": ("demo", changed, "")})
    with pytest.raises(ValueError, match="was made by another recipe .--lr 1.5e-3 -> 9e-4."):
        run_of("demo", *words).check()


def test_a_training_is_not_taken_back(tmp_path):
    def check(*words: str) -> None:
        run_of("demo", f"RUNS={tmp_path}", *words).check()

    run = tmp_path / "demo/admin-s1"
    check("UPDATES=90")
    for name in (
        "at-60/train.log",
        "at-2-epochs/train.log",
        "checkpoints/checkpoint_7_80.pt",
        "checkpoints/checkpoint_best.pt",
    ):
        write_lines(run / name, [])
    assert [checkpoints.furthest(run, unit) for unit in ("updates", "epochs")] == [80, 7]
    check("UPDATES=80")
    with pytest.raises(ValueError, match="79 updates are less than .* was trained for, 80. Give UPDATES=80 or more"):
        check("UPDATES=79")
    write_lines(run / "at-79/average.pt", [])
    check("UPDATES=79")


def test_the_last_steps_that_are_not_done_are_planned(tmp_path):
    """What only a finished step needs is not made again. Another method's new score makes the summary again."""
    words = [f"RUNS={tmp_path}"]

    def planned(goal: str = "all") -> list[str]:
        return [step.name for step in run_of("demo", *words).plan(goal)]

    every = ["text", "preprocess", "train", "average", "model", "generate", "score", "summary", "report"]
    assert planned() == every and planned("train") == every[:3] and planned("prepare") == every[:2]
    at = run_of("demo", *words).recipe.model
    write_lines(at / "train.log", [])
    assert planned() == every[3:] and planned("train") == []
    for name in ("generate.txt", "score.json", "summary.txt", "report.html"):
        write_lines(at / name, [json.dumps(run_of("demo", *words).key())])
        os.utime(at / name, (0, 0))
    assert planned() == []
    other = run_of("demo", *words, "METHOD=pre-ln")
    write_lines(other.score, [json.dumps(other.key())])
    assert planned() == ["summary", "report"]


# -- what is trained -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "folds"), [("admin", True), ("b2t", False)])
def test_every_scheme_is_trained_in_one_way(method, folds):
    """Every scheme trains with the plugin and its option. Schemes that fold are then used without the plugin."""
    run, options = run_of("demo", f"METHOD={method}"), train("demo", f"METHOD={method}")
    assert (options["--user-dir"], options["--arch"]) == ("fairseq_admin", "transformer_admin_18l")
    assert options["--admin-scheme"] == method and run.folded == folds == SCHEMES[method].folds
    assert ("--user-dir" in run.generate_words()) == (not folds)


def test_what_to_run_next_repeats_every_setting(tmp_path):
    (tmp_path / "my text").mkdir()
    given = read(
        "own", f"DATA={tmp_path}/my text", "PAIR=de-en", "METHOD=pre-ln", "SEED=3", "UPDATES=2000", "ARGS=--a $b"
    )
    assert given.command == f"make own 'ARGS=--a $$b' 'DATA={tmp_path}/my text' PAIR=de-en UPDATES=2000"


SMALL = "LAYERS=1|ARGS=--encoder-embed-dim 16 --decoder-embed-dim 16 --warmup-updates 5|UPDATES=6|INIT=reference"


@pytest.mark.slow
def test_what_is_printed_and_pasted_gives_the_recipes_bytes(tmp_path):
    """The commands of -n, in a shell, make the same text, weights and translations. Then the recipe only scores."""
    given = [*SMALL.split("|"), "PREPARE_ARGS=--pairs 300 --merges 100"]
    runs = [tmp_path / name for name in ("recipe", "pasted")]
    assert (done := front("demo-generate", *given, f"RUNS={runs[0]}")).returncode == 0, done.stdout + done.stderr
    printed = front("demo-generate", "-n", *given, f"RUNS={runs[1]}").stdout
    assert not runs[1].exists()
    shell = subprocess.run(["bash", "-euc", printed], cwd=ROOT, env=make_environment(), capture_output=True, text=True)
    assert shell.returncode == 0, shell.stdout[-2000:] + shell.stderr[-2000:]
    (text,) = (path.relative_to(runs[0]) for path in runs[0].glob("demo/text-*"))
    files = [path.relative_to(runs[0]) for path in (runs[0] / text).rglob("*") if path.is_file()]
    files = [path for path in files if path.name[0] != "." and path.suffix != ".log"]
    assert len(files) > 20 and all((runs[0] / path).read_bytes() == (runs[1] / path).read_bytes() for path in files)
    at = read("demo", *given, f"RUNS={runs[0]}").model.relative_to(runs[0])
    for name in ("average.pt", "model/model.pt"):
        one, other = (torch.load(run / at / name, weights_only=False)["model"] for run in runs)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    translations = [re.findall(r"^H-.*", (run / at / "generate.txt").read_text(), re.M) for run in runs]
    assert translations[0] == translations[1] != []
    done = front("demo-score", *given, f"RUNS={runs[1]}")
    assert done.returncode == 0 and re.findall("^# .*", done.stdout, re.M) == ["# score"], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_runs_small(tmp_path):
    """The whole chain runs with 2+2 layers. The second time, nothing is left to do."""
    small = [f"RUNS={tmp_path}", "PREPARE_ARGS=--pairs 2000", "LAYERS=2", "UPDATES=200", "INIT=reference"]
    small += ["ARGS=--save-interval-updates 20", "AVERAGE_ARGS=--last 2"]
    run = read("demo", *small).result
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
    lines = read_lines(run_of("demo", *small).text.folder / "raw/test.de")
    write_lines(tmp_path / "some.de", lines[:20])
    command = ["translate", run / "model/model.pt", tmp_path / "some.de", "-o", tmp_path / "some.en", "--device", "cpu"]
    assert run_module("fairseq_admin.cli", *command, log=tmp_path / "log").status == 0
    assert read_lines(tmp_path / "some.en") == translations[:20]

    again = front("demo", *small)
    assert again.returncode == 0 and "#" not in again.stdout, "the second time, all is there"
    mean = front("demo", *small, "GENERATE_ARGS=--beam 1", "AVERAGE_ARGS=--last 1")
    assert mean.returncode == 0 and "# generate" in mean.stdout and "average of checkpoint_" in mean.stdout
    assert "# train" not in mean.stdout
    rows = read_results(tmp_path / "results.csv")
    assert [row["average"] for row in rows] == ["--last 2", "--last 1"] and rows[1]["generate"].startswith("--beam 1 ")
