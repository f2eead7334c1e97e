"""Shared fixtures: a small corpus, training options for tiny models, and fairseq's commands in their own processes."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# If a shell starts the tests in the background, they and their child processes ignore Ctrl-C.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per process: the tests run several processes on few cores, where OpenMP's waiting costs more than it saves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

import fairseq_admin.plugin  # noqa: E402, F401  (registers the models)
from fairseq_admin import cli  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {"checkpoints", "outputs", "multirun"}  # the default output folders of fairseq and hydra
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
torch.set_num_threads(1)
settings.register_profile(
    "law", max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("law")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the GPUs from every process that a test or its fixtures start, unless the test is marked cuda.

    fairseq's --cpu is not enough: it still starts one process per GPU, and moves the gradients' norm to a GPU.
    """
    if not item.get_closest_marker("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif GPUS is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = GPUS


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs in the test itself too: torch may have counted them already."""
    if not request.node.get_closest_marker("cuda"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture(autouse=True, scope="session")
def tidy() -> Iterator[None]:
    """Check that no test writes into the checkout: each must tell fairseq where to write."""
    before = set(os.listdir(ROOT))
    yield
    assert not DEFAULTS & set(os.listdir(ROOT)) - before


class Completed(NamedTuple):
    """How a command ended: its exit status and everything it printed."""

    status: int
    output: str


def _child(module: str, arguments: list[str], log: Path) -> None:
    """Run `python -m module arguments` inside a forked process that has already imported torch and fairseq."""
    import runpy

    sys.argv = [module, *arguments]
    sys.path.insert(0, str(ROOT))
    status = 0
    with open(log, "w", buffering=1) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        # The server created fairseq's log handlers, on its own stdout, so we redirect the file descriptors too.
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            try:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                status = 1
            except SystemExit as end:
                status = end.code  # type: ignore[assignment]
            except BaseException:
                traceback.print_exc(file=out)
                status = 1
    os._exit(status)


_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["fairseq_cli.train", "fairseq_cli.generate", "fairseq_cli.preprocess", "torch._dynamo"])


def process(target: Callable[..., None], *arguments: object) -> multiprocessing.process.BaseProcess:
    """A process, not yet started, that sees the same GPUs as the test.

    If the test sees no GPU, the process is forked from a server that has imported fairseq. Otherwise it starts from
    scratch, because fairseq counts the GPUs on import.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    context = _forked if hidden else multiprocessing.get_context("spawn")
    return context.Process(target=target, args=arguments)


def run_process(target: Callable[..., None], *arguments: object, log: Path, timeout: float = 600) -> Completed:
    """Run target(*arguments, log) in its own process, and wait until it ends."""
    running = process(target, *arguments, log)
    running.start()
    running.join(timeout)
    if running.is_alive():
        running.kill()
        running.join()
        raise TimeoutError(f"{arguments} ran for more than {timeout} s:\n{log.read_text()[-4000:]}")
    return Completed(running.exitcode or 0, log.read_text())


def run_module(module: str, *arguments: object, log: Path, timeout: float = 600) -> Completed:
    """Run a module as `python -m` does, and wait until it ends."""
    return run_process(_child, module, [str(a) for a in arguments], log=log, timeout=timeout)


def python(code: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess:
    """Run code in a new Python process, in the repository's root, and check its exit status."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == status, process.stderr
    return process


def names(folder: Path) -> set[str]:
    """The names in a folder, without hidden files and locks. Empty if there is no folder."""
    every = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in every if not name.startswith(".") and not name.endswith(".guard")}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Completed]:
    """run(module, *arguments) -> Completed: runs `python -m module arguments` from the repository's root."""
    counter = iter(range(1000))

    def go(module: str, *arguments: object, timeout: float = 600) -> Completed:
        return run_module(module, *arguments, log=tmp_path / f"run{next(counter)}.log", timeout=timeout)

    return go


def front(*words: object, timeout: float = 600, **more: str) -> subprocess.CompletedProcess:
    """Run `python -m recipes` and wait until it ends. `more` is added to its environment."""
    command = [sys.executable, "-m", "recipes", *map(str, words)]
    environment = make_environment(**more)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


def make_environment(**more: str) -> dict[str, str]:
    """This process's environment, without the variables that `make test` passes to nested makes."""
    return {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    } | more


def one_line_error(capsys: pytest.CaptureFixture, *arguments: object, status: int = 2) -> str:
    """Run a command of fairseq-admin that must fail. Returns the one line that it prints."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fairseq-admin: ") and err.count("\n") == 1, err
    return err


def preprocess(folder: Path, *options: object) -> Path:
    """Binarise the texts train, valid and test of a folder. Returns its folder `bin`."""
    arguments = [*options, *(f"--{split}pref={folder / split}" for split in ("train", "valid", "test"))]
    arguments += ["--destdir", folder / "bin"]
    result = run_module("fairseq_cli.preprocess", *arguments, log=folder / "preprocess.log")
    assert result.status == 0, result.output
    return folder / "bin"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A binarised corpus a -> b: the source reversed and re-mapped, 40 words, 400 pairs, one dictionary."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    for split, size in (("train", 400), ("valid", 40), ("test", 20)):
        source, target = io.StringIO(), io.StringIO()
        for _ in range(size):
            words = [generator.randrange(40) for _ in range(generator.randint(3, 14))]
            print(*[f"w{w}" for w in words], file=source)
            print(*[f"w{(7 * w + 3) % 40}" for w in reversed(words)], file=target)
        (folder / f"{split}.a").write_text(source.getvalue())
        (folder / f"{split}.b").write_text(target.getvalue())
    return preprocess(folder, "-s", "a", "-t", "b", "--joined-dictionary")


TRAIN = (
    "--user-dir fairseq_admin --arch transformer_admin_tiny --optimizer radam --lr 1e-3 --lr-scheduler inverse_sqrt "
    "--warmup-updates 10 --criterion label_smoothed_cross_entropy --max-tokens 300 --cpu --no-epoch-checkpoints "
    "--share-all-embeddings --log-format simple --log-interval 1 --num-workers 0"
).split()
"""Options that train the tiny model on `corpus` within seconds; later options override them."""


def train(data: Path, folder: Path, *arguments: object, options: list[str] = TRAIN, status: int = 0) -> Completed:
    """Train in a folder, or resume there, and check the exit status. Logs are log0, log1 and so on."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    module = "recipes.steps.train" if "--bf16" in arguments else "fairseq_cli.train"  # fairseq_cli wants a TPU
    result = run_module(module, data, *options, "--save-dir", folder, *arguments, log=log)
    assert result.status == status, result.output[-4000:]
    return result


def resume(data: Path, saved: Path, folder: Path, *arguments: object, **more: Any) -> Completed:
    """Resume from a checkpoint in a new folder, as if the run that wrote it had been stopped there."""
    folder.mkdir()
    shutil.copy(saved, folder / "checkpoint_last.pt")
    return train(data, folder, *arguments, **more)


SEARCH = "--cpu --beam 2 --max-len-b 20 --required-batch-size-multiple 1 --num-workers 0".split()
"""Options of fairseq's search. fairseq's main branch skips the last sentences if they do not fill a batch of 8, and a
data-loading worker would outlive a process that exits without cleanup."""


def hypotheses(output: str) -> dict[int, tuple[str, float]]:
    """Parse the output of fairseq-generate or fairseq-interactive: number -> (hypothesis, score)."""
    parsed = {int(m[1]): (m[3], float(m[2])) for m in re.finditer(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)}
    assert parsed, output[-4000:]
    return dict(sorted(parsed.items()))


def generate(data: Path, path: object, *arguments: object, log: Path) -> dict[int, tuple[str, float]]:
    """The hypotheses of fairseq-generate, with our plugin, for the test set."""
    options = ["--user-dir", "fairseq_admin", "--path", path, "--gen-subset", "test", *SEARCH, *arguments]
    return hypotheses(run_module("fairseq_cli.generate", data, *options, log=log).output)


HYDRA = """# @package _group_
common: {{cpu: true, user_dir: {root}/fairseq_admin, log_format: simple, log_interval: 1, {common}}}
task: {{_name: translation, data: {data}}}
criterion: label_smoothed_cross_entropy
dataset: {{max_tokens: 300, num_workers: 0, disable_validation: true}}
optimization: {{max_update: 10, lr: [0.001]}}
optimizer: {{_name: radam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 10}}
checkpoint: {{save_dir: {folder}, no_epoch_checkpoints: true, save_interval_updates: 7}}
model: {{{model}}}
hydra: {{run: {{dir: {folder}}}}}
"""


def hydra_train(
    data: Path, folder: Path, model: str, common: str = "seed: 1", override: str | None = None
) -> Completed:
    """Run fairseq-hydra-train with a configuration file: ten updates with the options of TRAIN.

    If `model` has no colon, it is a name in hydra's `model` group, followed by overrides.
    """
    folder.mkdir(exist_ok=True)
    config, choices = HYDRA.format(root=ROOT, data=data, folder=folder, model=model, common=common), []
    if ":" not in model:
        config, choices = (
            config.replace(f"model: {{{model}}}\n", ""),
            ["+model=" + model.split()[0], *model.split()[1:]],
        )
    (folder / "run.yaml").write_text(config)
    at = ("--config-dir", folder, "--config-name", "run")
    choices += [override] if override else []
    return run_module("fairseq_cli.hydra_train", *at, *choices, log=folder / "log")


def needs(engine: str) -> Any:
    """The package of an engine of `export`. Without it, the test is skipped."""
    package = {"huggingface": "transformers"}.get(engine, engine)
    return pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(scope="session")
def without_plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing fairseq_admin fails, wherever it is installed."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "fairseq_admin").mkdir()
    (folder / "fairseq_admin/__init__.py").write_text("raise ImportError('the plugin was asked for')\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """nvidia_smi(MiB, ...) puts a program on PATH that lists GPUs of such memory, as NVIDIA's does."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*gpus: int, status: int = 0) -> None:
        rows = "".join(f"echo '{index}, GPU-{chr(97 + index) * 8}-0000, {mib}'\n" for index, mib in enumerate(gpus))
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{rows}exit {status}\n")
        program.chmod(0o755)

    return install
