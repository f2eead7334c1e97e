"""Does the GPU trial continue where it was killed, are its commands accepted, and its rows of what they say?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_guard import gone

from recipes.gpu_trial import comparison, run, steps
from recipes.gpu_trial.comparison import corpus_steps
from recipes.gpu_trial.steps import ON_CPU, ON_GPU, STOCK, Step
from recipes.steps.checkpoints import newest

ROOT = Path(__file__).parents[1]


def make(*given: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-f", "recipes/gpu_trial/Makefile", f"PYTHON={sys.executable}", *given]
    mine = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(command, cwd=ROOT, env={**mine, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """trial(a=..., b=...) performs such steps, as the command would; the names performed so far, in order."""
    performed: list[str] = []

    def start(**does) -> list[str]:
        def step(name: str) -> Step:
            def do(folder: Path) -> list[dict]:
                performed.append(name)
                return does[name]()

            return Step(name, f"Title {name}", do)

        monkeypatch.setattr(run, "all_steps", lambda scale: [step(name) for name in does])
        monkeypatch.setattr(run, "machine", lambda: {"hardware": "none"})
        monkeypatch.setattr(sys, "argv", ["run", str(tmp_path), "--device", "cpu"])
        run.main()
        return performed

    return start


def killed() -> list[dict]:
    raise KeyboardInterrupt


def impossible() -> list[dict]:
    raise ValueError("out of memory | on this card")


def test_a_finished_step_is_not_run_again(trial, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trial(a=lambda: [{"number": 1}], b=killed, c=lambda: [])
    # What was finished is reported already, and the step that was cut short has left nothing.
    assert "| 1 |" in (tmp_path / "report.md").read_text() and not (tmp_path / "steps/b.json").exists()
    performed = list(trial(a=lambda: [{"number": 1}], b=impossible, c=lambda: [{"other": 2}]))
    assert performed == ["a", "b", "b", "c"]
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[:3] == ["# GPU trial", "", "- hardware: none"] and "- steps: 2 of 3 finished, 1 failed" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## Title a", "## Title c", "## Steps that failed"]
    assert "| b | out of memory / on this card |" in lines
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["steps"]["c"]["rows"] == [{"other": 2}] and found["machine"] == {"hardware": "none"}
    assert trial(a=killed, b=lambda: [{"number": 3}], c=killed) == [*performed, "b"], "one that failed is tried again"
    assert trial(a=killed, b=killed, c=killed) == [*performed, "b"]
    assert "Steps that failed" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("precision", list(steps.PRECISIONS))
@pytest.mark.parametrize("method", ["admin", "pre-ln", "post-ln", STOCK])
def test_fairseq_takes_the_options(method, precision):
    from fairseq import options

    given = steps.model_options(ON_GPU, method, replace(ON_GPU.base, precision=precision, encoder_layers=60))
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *given])
    assert (args.encoder_layers, args.decoder_layers, args.encoder_embed_dim) == (60, 6, 512)
    assert getattr(args, "admin_scheme", STOCK) == method and args.distributed_world_size == 1
    halves = ("fp16", "bf16", "amp", "memory_efficient_fp16")
    wanted = {"me-fp16": ["fp16", "memory_efficient_fp16"], "fp32": []}.get(precision, [precision])
    assert [name for name in halves if getattr(args, name)] == wanted


@pytest.mark.parametrize("precision", [name for name in steps.PRECISIONS if name != "fp32"])
def test_a_precision_is_the_recipes(precision):
    done = make("-f", "recipes/precision.mk", f"--eval=show:;@echo $(PRECISION_{precision})", "show")
    assert done.stdout.strip() == steps.PRECISIONS[precision], done.stderr


def texts(folder: Path, pair: str, text: str = "a\n") -> Path:
    """The folder, with a corpus in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"{split}.{language}" for split in ("train", "valid", "test") for language in pair.split("-")):
        (folder / name).write_text(text)
    return folder


def test_the_steps_are_in_the_order_of_what_is_learnt_first(tmp_path):
    names = [
        step.name for step in [*steps.all_steps(ON_GPU), *corpus_steps(ON_GPU, texts(tmp_path, "de-en"), "de-en", 9)]
    ]
    assert names[0] == "tests" and names[1:16:5] == ["6l-6l-fp16", "18l-18l-fp16", "60l-12l-fp16"]
    assert names[16:22] == [f"bench-{it}-{n}" for it in ("float16", "bfloat16") for n in (4096, 8192, 16384)]
    corpus = names[23].removeprefix("prepare-")
    assert names[22] == "resume" and re.fullmatch(re.escape(tmp_path.name) + "-de-en-[0-9a-f]{8}", corpus)
    assert len(set(names)) == len(names)
    # Six minutes of each method before any trains on.
    methods = ("admin", "pre-ln", "post-ln")
    shares = [f"train-{corpus}-{method}-{until}of9" for until in (6, 9) for method in methods]
    assert names[24:] == [*shares, *(f"bleu-{corpus}-{method}-9" for method in methods)]
    assert len(steps.all_steps(ON_CPU)) == 1 + 2 * 2 + 2 + 1


def test_another_text_is_another_corpus(tmp_path):
    """A folder of the same name elsewhere, or other text in the same one, was given the first one's results."""

    def names(folder: Path) -> set[str]:
        return {step.name for step in corpus_steps(ON_CPU, folder, "de-en", 1)}

    first = names(texts(tmp_path / "iwslt/data", "de-en"))
    assert first.isdisjoint(names(texts(tmp_path / "wmt/data", "de-en", "b\n")))
    assert first == names(texts(tmp_path / "copied/data", "de-en"))
    (tmp_path / "iwslt/data/valid.en").write_text("b\n")  # of the same size
    assert first.isdisjoint(names(tmp_path / "iwslt/data"))


def test_a_little_more_than_a_share_is_another_step(tmp_path):
    names = [step.name for step in corpus_steps(ON_CPU, texts(tmp_path, "de-en"), "de-en", 6.01)]
    assert len(set(names)) == len(names) == 1 + 2 * 3 + 3
    assert [name.rpartition("-")[2] for name in names[1:7:3]] == ["6of6.01", "6.01of6.01"]


class Training:
    """fairseq without any training: a checkpoint holds the minutes it was trained, which is BLEU, and updates / 100.

    `failing` are the minutes at which training fails; `trained` is what was trained: method, from and until minute.
    """

    def __init__(self) -> None:
        self.failing: set[float] = set()
        self.trained: list[tuple[str, float, float]] = []

    def __call__(self, command: list[str], log: Path, limit: float = 0) -> None:
        if "fairseq_cli.generate" in command:
            log.write_text(Path(command[command.index("--path") + 1]).read_text())
        if "recipes.steps.train" not in command:
            return
        save = Path(command[command.index("--save-dir") + 1])
        start = newest(save)
        if "--restore-file" in command:
            start = Path(command[command.index("--restore-file") + 1])
        begin = float(start.read_text()) if start else 0.0
        until = round(60 * float(command[command.index("--stop-time-hours") + 1]), 3)
        self.trained.append((command[command.index("--admin-scheme") + 1], begin, until))
        if until in self.failing:
            raise ValueError("out of memory")
        updates = round(100 * max(begin, until))
        save.mkdir(parents=True, exist_ok=True)
        if "--save-interval-updates" in command:
            (save / f"checkpoint_1_{updates}.pt").write_text(str(max(begin, until)))
        if "--no-last-checkpoints" not in command:
            (save / "checkpoint_last.pt").write_text(str(max(begin, until)))
        with log.open("a") as out:
            told = {"epoch": 1, "valid_nll_loss": 3, "valid_num_updates": updates}
            print("num. shared model params: 100 (num. trained: 100)", json.dumps(told), sep="\n", file=out)


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    """start(MINUTES) makes a trial of only a corpus, or goes on with it; updates and BLEU of Admin in its report."""
    training, data = Training(), texts(tmp_path / "text", "de-en")
    monkeypatch.setattr(comparison, "call", training)
    monkeypatch.setattr(comparison, "METHODS", ("admin",))
    monkeypatch.setattr(comparison, "bleu", lambda lines: (float(lines[0]), "none"))
    monkeypatch.setattr(run, "all_steps", lambda scale: [])
    monkeypatch.setattr(run, "machine", lambda: {"hardware": "none"})

    def start(minutes: float | str) -> tuple[list[int], list[float]]:
        given = ["--device", "cpu", "--data", str(data), "--minutes", str(minutes)]
        monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "out"), *given])
        run.main()
        found = json.loads((tmp_path / "out/report.json").read_text())["steps"].values()
        rows = [row for step in found for row in step["rows"]]
        return [row["updates"] for row in rows if "updates" in row], [row["BLEU"] for row in rows if "BLEU" in row]

    return SimpleNamespace(start=start, training=training, out=tmp_path / "out")


def test_every_row_is_of_the_weights_of_its_minutes(comparing):
    """The first share that failed is trained again, and all that goes on from it: not on from later weights."""
    comparing.training.failing = {6}
    assert comparing.start(15) == ([], [])
    assert comparing.training.trained == [("admin", 0, 6)], "nothing goes on from a share that failed"
    report = (comparing.out / "report.md").read_text()
    assert "- steps: 1 of 5 finished, 4 failed" in report and "it goes on from train-" in report
    comparing.training.failing = set()
    assert comparing.start(15) == ([600, 1200, 1500], [15])
    assert comparing.training.trained[1:] == [("admin", 0, 6), ("admin", 6, 12), ("admin", 12, 15)]
    assert comparing.start(9) == ([600, 900], [9]), "fewer minutes are not the weights of more"
    assert comparing.start(15) == ([600, 1200, 1500], [15]) and len(comparing.training.trained) == 6


def test_bleu_is_of_the_last_share(comparing):
    """BLEU was of whatever checkpoint was the newest, and stayed when the last share was trained later."""
    comparing.training.failing = {9}
    assert comparing.start(9) == ([600], [])
    comparing.training.failing = set()
    assert comparing.start(9) == ([600, 900], [9])
    (last,), (translated,) = comparing.out.glob("steps/train-*-9of9.json"), comparing.out.glob("steps/bleu-*.json")
    last.unlink()
    before = translated.read_text()
    comparing.training.failing = {9}
    assert comparing.start(9) == ([600], []), "not of what an earlier try left"
    comparing.training.failing = set()
    assert comparing.start(9) == ([600, 900], [9]) and comparing.training.trained[-1] == ("admin", 6, 9)
    assert translated.read_text() != before, "made again, as the share was"


def test_what_diverged_has_no_later_share_and_no_bleu(comparing, monkeypatch):
    def diverges(command: list[str], log: Path, limit: float = 0) -> None:
        if "recipes.steps.train" in command:
            comparing.training.trained.append(("admin", 0, 6))
            raise comparison.DivergedError("recipes.steps.train ended with status 3: training stopped.")

    monkeypatch.setattr(comparison, "call", diverges)
    assert comparing.start(9) == ([], ["diverged"]) and comparing.training.trained == [("admin", 0, 6)]
    assert "4 of 4 finished, 0 failed" in (comparing.out / "report.md").read_text()


def test_only_the_exit_status_says_diverged(tmp_path):
    """A word in the last line did: a crash in a folder called "diverged" was taken for divergence."""
    said = "print('diverged'); raise SystemExit({})"
    with pytest.raises(comparison.DivergedError, match="ended with status 3: diverged All it said: "):
        comparison.call([sys.executable, "-c", said.format(3)], tmp_path / "log")
    for status, told in (("1", "1"), ("2", "2"), ("os.kill(os.getpid(), 9)", "137")):
        with pytest.raises(ValueError, match=f"ended with status {told}: ") as found:
            comparison.call([sys.executable, "-uc", "import os; " + said.format(status)], tmp_path / "log")
        assert not isinstance(found.value, comparison.DivergedError)


def test_a_command_whose_time_is_up_leaves_nothing(tmp_path):
    """The bench measures memory in processes of its own; one that was left kept the GPU's from the next step."""
    source = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    log = tmp_path / "log"
    for limit in (2, 10, 50):  # until it is long enough for the process to have started
        with pytest.raises(subprocess.TimeoutExpired):
            comparison.call([sys.executable, "-c", source], log, limit)
        if log.read_text():
            break
    assert gone(int(log.read_text()))


def test_nothing_is_trained_on_a_corpus_that_could_not_be_prepared(comparing, monkeypatch):
    def fails(command: list[str], log: Path, limit: float = 0) -> None:
        assert command[0] == "make"
        raise ValueError("no space left")

    monkeypatch.setattr(comparison, "call", fails)
    assert comparing.start(6) == ([], [])
    assert "3 failed" in (comparing.out / "report.md").read_text()
    monkeypatch.setattr(comparison, "call", comparing.training)
    assert comparing.start(6) == ([600], [6])


@pytest.mark.parametrize("minutes", ["0", "-1", "inf", "nan", "1e9"])
def test_refuses_what_is_not_a_time(minutes, comparing):
    with pytest.raises(ValueError, match="^MINUTES=.* is not a time to train; expected more than 0, at most 10000.$"):
        comparing.start(minutes)
    assert not comparing.training.trained and not comparing.out.exists()


@pytest.mark.slow
def test_a_short_share_is_not_lost(corpus, tmp_path, monkeypatch):
    """A quarter of a second each, which is far from the hundredth update: real training, then real translations."""
    monkeypatch.setattr(comparison, "CHUNK", 0.004)
    shares = corpus_steps(ON_CPU, corpus.parent, "a-b", 0.008)
    first, second, translate = (step for step in shares if "-admin-" in step.name)
    place = tmp_path / shares[0].name.removeprefix("prepare-")
    (place / "own/trial/a-b/data").mkdir(parents=True)
    (place / "own/trial/a-b/data/bin").symlink_to(corpus)
    (early,), (late,), (row,) = first.do(tmp_path), second.do(tmp_path), translate.do(tmp_path)
    assert 0 < early["updates"] < late["updates"] < 100
    assert f"@ {early['updates']} updates" in (place / "admin-0.008/train.log").read_text()
    saved = torch.load(place / "admin-0.008/0.008.pt", weights_only=False)
    assert saved["optimizer_history"][-1]["num_updates"] == late["updates"]
    assert row["BLEU"] >= 0 and row["bits by update, valid"].endswith(f" {late['updates']}:{late['bits, valid']:.2f}")


def test_a_size_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    """One size out of memory took with it what the others had measured."""

    def speed(command: list[str], **given) -> subprocess.CompletedProcess[str]:
        sizes = [word for word in command if re.fullmatch(r"2-1:16:\d+", word)]
        assert sizes, command
        if any(size.endswith(":512") for size in sizes):
            return subprocess.CompletedProcess(command, 1, "", "out of memory")
        row = {name: 1.0 for name in steps.TOLD}
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"rows": [row]}))
        return subprocess.CompletedProcess(command, 0, "", "")

    bench = [step for step in steps.all_steps(ON_CPU) if step.name.startswith("bench-")]
    (tmp_path / "steps").mkdir()
    monkeypatch.setattr(run, "commit", lambda: "none")
    monkeypatch.setattr(steps.subprocess, "run", speed)
    for step in bench:
        run.perform(step, tmp_path, {})
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "steps").iterdir()}
    assert sum(len(it["rows"]) for it in found.values()) == 1
    assert "out of memory" in found["bench-float32-512"]["failed"]


@pytest.mark.slow
def test_a_kill_that_comes_too_late_is_said(tmp_path, monkeypatch):
    """It ended the whole trial with an IndexError."""
    monkeypatch.setattr(steps, "signal", SimpleNamespace(SIGKILL=0))  # which kills nothing
    with pytest.raises(ValueError, match="the kill came after the last update"):
        steps.resume(ON_CPU, tmp_path)


def test_the_tests_ends_are_counted(tmp_path):
    suite = tmp_path / "test_some.py"
    suite.write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert False\n\n"
        "def test_none(): pytest.skip('one GPU')\n\n@pytest.fixture\ndef broken(): raise OSError\n\n"
        "def test_broken(broken): pass\n"
    )
    (row,) = steps.run_tests(replace(ON_CPU, tests=(str(suite), "-c", os.devnull)), tmp_path)
    assert [row[name] for name in ("tests", "failed", "broken", "skipped")] == [4, 1, 1, 1]
    assert row["which"] == "test_some.test_bad, test_some.test_broken" and row["skipped because"] == "one GPU"


@pytest.mark.parametrize(
    ("pair", "said"), [("de-en", "found no valid.en or valid.en.gz; DATA= is"), ("de", "PAIR=de is not a pair")]
)
def test_a_corpus_that_is_not_there_is_said_first(pair, said, tmp_path):
    for name in ("train.de", "train.en.gz", "valid.de"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=said):
        corpus_steps(ON_CPU, tmp_path, pair, 1)


def test_a_try_on_a_cpu_is_not_the_gpus():
    plans = [make("-n", f"DEVICE={device}").stdout for device in ("cuda", "cpu")]
    assert ["runs/gpu-trial --device cuda" in plans[0], "runs/gpu-trial-cpu --device cpu" in plans[1]] == [True, True]


def test_without_a_gpu_it_says_so(tmp_path):
    done = make(f"RUNS={tmp_path}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and len(said) == 1 and said[0].startswith("this machine has 0 GPUs")
    assert not list(tmp_path.iterdir())
