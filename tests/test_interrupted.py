"""A recipe that is stopped at any moment goes on, with the same command, to the files of one that never was."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_environment

from recipes import recipe

SIZES = " ".join(
    f"--{stack}-{size} {value}"
    for stack in ("encoder", "decoder")
    for size, value in (("embed-dim", 8), ("ffn-embed-dim", 8), ("attention-heads", 1))
)
SMALL = [
    *("LAYERS=1", "PREPARE_ARGS=--pairs 1000 --merges 100", "AVERAGE_ARGS=--last 2"),
    f"ARGS={SIZES} --max-tokens 2048 --update-freq 1 --log-interval 5 --warmup-updates 5 --max-epoch 3 "
    "--save-interval-updates 20",
    "GENERATE_ARGS=--beam 1 --max-len-b 9",
]
"""An epoch has 18 updates. The second and the third are also validated and saved in the middle."""
NEVER = "(?!)"

# Every Python process of a recipe imports this module. It counts the lines logged and what happens to files below RUNS.
# At the moment that $MOMENT names, a number or a pattern, the process waits until the test has sent its signal.
SITE = """
import logging, os, re, sys, time

folder, runs, moment = (os.environ[name] for name in ("MOMENTS", "MOMENT_RUNS", "MOMENT"))

def event(text):
    with open(folder + "/events", "ab", buffering=0) as out:
        out.write(b".")
        count = out.tell()
    if count == int(moment) if moment.isdecimal() else re.search(moment, text):
        try:
            os.close(os.open(folder + "/reached", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        end = time.monotonic() + 30
        while not os.path.exists(folder + "/sent") and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)

def audit(name, arguments):
    path = arguments[0] if name in ("open", "os.rename", "os.remove", "os.mkdir") else ""
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(runs):
        event(name + " " + os.fspath(path))

def record(*arguments, **options):
    made = logging.LogRecord(*arguments, **options)
    event(made.getMessage())
    return made

sys.addaudithook(audit)
logging.setLogRecordFactory(record)
"""


def processes(parent: int) -> list[int]:
    """A process and all that it started."""
    listed = subprocess.check_output(["ps", "-eo", "pid=,ppid="], text=True).splitlines()
    children = [int(pid) for pid, above in map(str.split, listed) if int(above) == parent]
    return [parent, *(pid for child in children for pid in processes(child))]


class Demo:
    """A small demo in RUNS, which is always the same folder, since a model names its text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.site = folder, folder / "my $runs", folder / "site"
        self.words = [f"RUNS={self.runs}", *SMALL]
        self.run = recipe.read("demo", dict(word.split("=", 1) for word in self.words)).run
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE)

    def keep(self, name: str) -> None:
        shutil.copytree(self.runs, self.folder / name)

    def begin(self, name: str = "") -> None:
        """Begin again, with nothing, or with what was kept."""
        shutil.rmtree(self.runs, ignore_errors=True)
        if name:
            shutil.copytree(self.folder / name, self.runs)

    def start(
        self, target: str, moment: object = NEVER, number: int = signal.SIGTERM, every: bool = False
    ) -> tuple[int, str]:
        """Run a target, and send a signal at a moment, to the recipe or to every process of it, as Slurm does.

        Returns:
            The exit status, and all that was printed.
        """
        moments = self.folder / "moments"
        shutil.rmtree(moments, ignore_errors=True)
        moments.mkdir()
        path = os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")]))
        more = {"MOMENTS": str(moments), "MOMENT_RUNS": str(self.runs), "MOMENT": str(moment), "PYTHONPATH": path}
        command, out = [sys.executable, "-m", "recipes", target, *self.words], self.folder / "printed"
        with out.open("w") as printed:
            process = subprocess.Popen(
                command, cwd=ROOT, env=make_environment(**more), stdout=printed, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None and not (moments / "reached").exists():
                    time.sleep(0.01)
                if process.poll() is None:
                    for pid in processes(process.pid) if every else [process.pid]:
                        with suppress(ProcessLookupError):
                            os.kill(pid, number)
                    (moments / "sent").touch()
                status = process.wait(300)
            finally:
                process.kill()  # and, through its pipe, all that it started
        return status, out.read_text()

    def reached(self) -> bool:
        """Whether the last start came to its moment."""
        return (self.folder / "moments/reached").exists()

    def facts(self) -> dict[str, object]:
        """All files by name: the bytes of those without times; of a checkpoint, the state to go on from."""
        files = {str(path.relative_to(self.runs)): path for path in sorted(self.runs.rglob("*")) if path.is_file()}
        return {name: content(path) for name, path in files.items() if not LOGS.search(name)}


LOGS = re.compile(r"\.log$|guard\d*$|tfevents")
TIMED = re.compile(r"generate\.txt$|report\.html$|/\.keys/")
HOURS = re.compile(rb"\b0\.0[0-9]\b")
"""The hours of a training, in summary.txt, score.json and results.csv; losses and scores are larger."""


def content(path: Path) -> object:
    if not re.fullmatch(r"(average|checkpoint\w*)\.pt", path.name):
        return None if TIMED.search(str(path)) else HOURS.sub(b"hours", path.read_bytes())
    state = torch.load(path, weights_only=False)
    extra = state["extra_state"]
    return flat([state["model"], state.get("last_optimizer_state"), extra["train_iterator"], extra["best"]])


def flat(value: object) -> object:
    """A nested state as text: tensors as their bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes().hex()
    if isinstance(value, dict):
        return {str(key): flat(inner) for key, inner in value.items()}
    return [flat(inner) for inner in value] if isinstance(value, (list, tuple)) else str(value)


def done(demo: Demo, target: str) -> str:
    status, printed = demo.start(target)
    assert status == 0, printed
    return printed


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    """A demo that was trained, kept as "trained", and as "text" without the training."""
    made = Demo(tmp_path_factory.mktemp("demo"))
    done(made, "demo-train")
    made.keep("trained")
    shutil.rmtree(made.run)
    made.keep("text")
    return made


@pytest.fixture(scope="module")
def scored(demo) -> dict[str, object]:
    """What a whole demo leaves. It is kept as "scored"."""
    demo.begin("trained")
    done(demo, "demo")
    demo.keep("scored")
    return demo.facts()


TRAINING = [
    ("begin validation", signal.SIGTERM, False),  # at the end of the first epoch
    ("begin validation", signal.SIGINT, False),  # in the middle of the second
    (r"^open .*checkpoint2\.pt\.tmp", signal.SIGTERM, True),
    (r"^open .*checkpoint_3_40\.pt\.tmp", signal.SIGHUP, False),
    ('^{"epoch": 3, "update": 2.5', signal.SIGUSR2, True),
    (r"^open .*checkpoint3\.pt\.tmp", signal.SIGTERM, False),
]
"""Moments of a training, each with a signal, and whether every process gets it."""


@pytest.mark.slow
def test_a_training_that_is_stopped_while_it_validates_or_saves_goes_on(demo):
    demo.begin("trained")
    whole = demo.facts()
    demo.begin("text")
    for moment in TRAINING[:2]:
        status, printed = demo.start("demo-train", *moment)
        assert (status, demo.reached()) == (130, True) and "The same command goes on from here." in printed, printed
    done(demo, "demo-train")
    assert demo.facts() == whole


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(demo):
    """Here, the older one is of version 0.3.0, which stored a request to stop as training time, and never got on."""
    demo.begin("trained")
    whole, last = demo.facts(), demo.run / "checkpoints/checkpoint3.pt"
    os.truncate(last, 0)
    status, printed = demo.start("demo-average")
    assert status == 2 and f"{last} is not a checkpoint" in printed and "Traceback" not in printed
    assert "The same command trains the damaged checkpoint again." in printed
    middle = demo.run / "checkpoints/checkpoint_3_40.pt"
    with middle.open("r+b") as file:
        file.seek(middle.stat().st_size // 2)
        file.write(bytes(2000))
    state = torch.load(older := demo.run / "checkpoints/checkpoint2.pt", weights_only=False)
    state["extra_state"]["previous_training_time"] = 1e12 + 7
    torch.save(state, older)
    printed = done(demo, "demo-train")
    assert f"{last} is damaged (File is not a zip file). Training goes on from checkpoint2.pt." in printed
    assert re.search(rf"{re.escape(str(middle))} is damaged \(.+\)\. Training goes on from checkpoint2\.pt\.", printed)
    assert demo.facts() == whole
    assert 7 < torch.load(last, weights_only=False)["extra_state"]["previous_training_time"] < 9999


STEPS = [
    (r"^os\.rename .*average\.pt", signal.SIGINT, False),
    (r"^os\.mkdir .*model/model\.pt", signal.SIGTERM, True),
    ("^loading model", signal.SIGTERM, False),
    (r"^open .*generate\.txt$", signal.SIGHUP, False),
    (r"^os\.mkdir .*dependency\.json", signal.SIGUSR2, False),
    (r"^os\.rename .*report\.html", signal.SIGTERM, True),
]


@pytest.mark.nightly
def test_a_recipe_that_is_stopped_in_every_step_goes_on(demo, scored):
    demo.begin("text")
    for moment in TRAINING + STEPS:
        status, printed = demo.start("demo", *moment)
        assert (status, demo.reached()) == (130, True) and "Traceback" not in printed, (moment, printed)
    done(demo, "demo")
    assert demo.facts() == scored


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_recipe_goes_on_from_wherever_it_was_stopped(demo, scored):
    """24 signals at drawn moments, from the text to the report."""
    generator, stops, status = random.Random(1), 0, None
    ways = [("SIGTERM", False), ("SIGINT", False), ("SIGTERM", True), ("SIGUSR2", True), ("SIGHUP", False)]
    demo.begin()
    while stops < 24 or status:
        moment = generator.randint(1, 900) if stops < 24 else NEVER
        name, every = ways[stops % len(ways)]
        status, printed = demo.start("demo", moment, signal.Signals[name], every)
        stops += demo.reached()
        assert status in ((0, 130) if demo.reached() else (0,)), (moment, name, printed)
        if not status:
            assert demo.facts() == scored, (moment, name)
            demo.begin()


@pytest.mark.slow
def test_a_training_that_fails_says_why_in_its_last_line(demo):
    demo.begin("text")
    demo.words.append("SEED=2")
    (place,) = (place for place, word in enumerate(demo.words) if word.startswith("ARGS="))
    demo.words[place] += " --max-source-positions 1"
    run = recipe.read("demo", dict(word.split("=", 1) for word in demo.words)).run
    status, printed = demo.start("demo-train")
    demo.words[place] = demo.words[place].removesuffix(" --max-source-positions 1")
    del demo.words[-1]
    reason, log = "Exception: The dataset is empty. This could indicate", f"Its whole output: {run}/train.log.\n"
    assert status == 2 and reason in printed.splitlines()[-1] and printed.endswith(log)


def nodes(demo: Demo) -> list[subprocess.Popen]:
    """Start a training over two nodes, both here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        words = [*demo.words, f"MASTER=127.0.0.1:{free.getsockname()[1]}"]
    command = [sys.executable, "-m", "recipes", "demo-train", *words]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return [
        subprocess.Popen([*command, f"NODES={rank}/2"], cwd=ROOT, env=make_environment(), **silent) for rank in (0, 1)
    ]


@pytest.mark.nightly
def test_both_nodes_stop_when_one_is_asked_to(demo):
    demo.begin("text")
    assert [node.wait(300) for node in nodes(demo)] == [0, 0]
    whole, log = demo.facts(), demo.run / "train.log"
    demo.begin("text")
    running = nodes(demo)
    while not (log.exists() and '"num_updates": "10"' in log.read_text()):
        assert running[0].poll() is None
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)
    assert [node.wait(300) for node in running] == [130, 130]
    assert [node.wait(300) for node in nodes(demo)] == [0, 0]
    assert demo.facts() == whole


@pytest.mark.nightly
def test_the_commands_of_a_summary_work_when_pasted(demo, scored):
    demo.begin("scored")
    makefile = demo.folder / "Makefile"
    makefile.write_text(f"demo:\n\t+@{sys.executable} -m recipes $@\n")

    def paste(command: str) -> str:
        shell = ["bash", "-c", command]
        return subprocess.run(shell, cwd=ROOT, env=make_environment(), stdout=subprocess.PIPE, text=True).stdout

    *_, make, translate = next(demo.run.glob("at-*/summary.txt")).read_text(encoding="utf-8").splitlines()
    assert paste(translate).count("\n") == 1
    assert "pre-ln" in paste(f"{make} -n -f {shlex.quote(str(makefile))}")
