"""Does a diverged run end with advice, and does every other run go on?"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import conftest
import pytest
import torch
from conftest import TRAIN, Completed, python
from fairseq.logging import metrics
from reference import build

from fairseq_admin.architectures.divergence import ExplodedLoss, SkippedUpdates
from fairseq_admin.errors import DIVERGED, DIVERGED_ADVICE, AdminError, DivergedError, outcome


def feed(counter: SkippedUpdates, updates: list[int]) -> None:
    for num_updates in updates:
        counter.before_batch(num_updates)


@pytest.mark.parametrize(
    ("limit", "batches", "seen", "stops"),
    [
        (3, 1, [0, 0, 0], 0),  # one more skipped update than allowed
        (3, 1, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], 3),  # an update resets the count
        (2, 4, [0] * 8 + [1] * 8, 1),  # with --update-freq 4, four batches are one update
        (0, 1, [7] * 10_000, None),  # no limit
    ],
)
def test_too_many_skipped_updates_in_a_row_stop(limit: int, batches: int, seen: list[int], stops: int | None) -> None:
    counter = SkippedUpdates(limit=limit, batches_per_update=batches)
    feed(counter, seen)
    with pytest.raises(DivergedError, match=f"update {stops} was skipped") if limit else contextlib.nullcontext():
        counter.before_batch(seen[-1])


def test_want_of_memory_is_not_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """If updates are skipped for lack of memory, does the error say so, and does it ignore earlier shortages?"""
    times = iter([5, 8, 8, 8])
    monkeypatch.setattr("fairseq_admin.architectures.divergence.gpu_out_of_memory", lambda: next(times))
    counter = SkippedUpdates(limit=3, batches_per_update=1)
    with pytest.raises(AdminError, match="skipped 3 times in a row; the GPU ran out of memory 3 times.") as error:
        feed(counter, [7] * 4)
    assert not isinstance(error.value, DivergedError)
    counter.restart()
    with pytest.raises(DivergedError):
        feed(counter, [7] * 4)


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("raise FloatingPointError('gradients are Nan/Inf')", DIVERGED, DIVERGED_ADVICE),
        ("try: raise FloatingPointError\nfinally: 1 / 0", DIVERGED, DIVERGED_ADVICE),
        ("raise FloatingPointError('inconsistent between workers')", 1, "Error: inconsistent between workers"),
        ("raise DivergedError('so it is')", DIVERGED, "fairseq-admin: so it is"),
        ("raise AdminError('so it is')", 2, "fairseq-admin: so it is"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_divergence_alone_has_its_exit_status(code: str, status: int, last: str) -> None:
    """Does divergence alone have its own exit status, even if another error is raised on top of it?

    The test loads only this file, as the recipes do: without torch, in hundredths of a second.
    """
    program = f"import runpy\nglobals().update(runpy.run_path('fairseq_admin/errors.py'))\ninstall_excepthook()\n{code}"
    assert python(program, status=status).stderr.splitlines()[-1].endswith(last)


def test_several_processes_say_why_they_end(tmp_path: Path) -> None:
    """torch.distributed wraps the hook, and collects everything that it prints."""
    start = f"torch.distributed.init_process_group('gloo', f'file://{tmp_path}/meet', rank=0, world_size=1)"
    program = f"import torch\nimport fairseq_admin.errors as it\nit.install_excepthook()\n{start}\n"
    assert python(f"{program}raise it.AdminError('so it is')", status=2).stderr.endswith("fairseq-admin: so it is\n")


ABSURD = ["--lr", "1e30", "--warmup-updates", 1, "--optimizer", "adam"]
OVERFLOW = "gradient overflow detected"
FP16 = "--fp16 --fp16-no-flatten-grads --threshold-loss-scale 0.03125".split()  # above --min-loss-scale, 0.0001


@pytest.mark.parametrize("when", ["at the end", "while it trains"])
def test_an_absurd_loss_stops(when: str, corpus: Path, tmp_path: Path, run: Callable[..., Completed]) -> None:
    """Does a run with a loss of millions end with divergence's status, and save nothing afterwards?"""
    options = ["--lr", "1e4", "--warmup-updates", 1, "--optimizer", "adam", "--max-update", 8]
    options += ["--disable-validation"] if when == "while it trains" else ["--log-interval", 100]
    result = run("fairseq_cli.train", corpus, *TRAIN, *options, "--save-dir", tmp_path)
    last = result.output.splitlines()[-1]
    assert result.status == DIVERGED and last.startswith("fairseq-admin: training diverged: the loss is "), last
    assert last.endswith(DIVERGED_ADVICE) and "Traceback" not in result.output
    assert [path.name for path in tmp_path.glob("*.pt")] == (["crash.pt"] if when == "while it trains" else [])


@pytest.mark.parametrize(("losses", "diverges"), [([7, 130, 5], False), ([7, 141], True), ([0.1, 19], False)])
def test_only_an_absurd_loss_is_divergence(losses: list[float], diverges: bool) -> None:
    metrics.reset()
    exploded_loss = ExplodedLoss()
    exploded_loss.check()
    with pytest.raises(DivergedError) if diverges else contextlib.nullcontext():
        for loss in losses:
            metrics.log_scalar("loss", torch.tensor(loss))
            exploded_loss.check()
    metrics.reset()


def _diverge(rank: int) -> None:
    try:
        raise RuntimeError("of fairseq's")
    except RuntimeError:
        raise DivergedError("update 7 was skipped; stop.") from None


def test_error_of_a_spawned_process() -> None:
    """Is our error recognised inside torch's error for a spawned process?"""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as failed:
        torch.multiprocessing.spawn(_diverge, nprocs=1)
    for kind, status in (("DivergedError", DIVERGED), ("AdminError", 2)):
        error = failed.type(str(failed.value).replace("DivergedError", kind), 0, 0)
        assert outcome(error) == ("update 7 was skipped; stop.", status)


def _fp16_on_cpu(arguments: list[str], log: Path) -> None:
    """Run fairseq-train with a patch for fairseq's overflow handler, which calls .cuda(), so that it runs on a CPU."""
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment,method-assign]
    conftest._child("fairseq_cli.train", arguments, log)


def fp16(corpus: Path, folder: Path, *arguments: object) -> Completed:
    """Train in float16 on the CPU."""
    command_line = [str(a) for a in (corpus, *TRAIN, *FP16, "--disable-validation", "--save-dir", folder, *arguments)]
    return conftest.run_process(_fp16_on_cpu, command_line, log=folder / "log")


def check_stop(run: Completed) -> None:
    """Check that the run ends after five overflows, with one line and no traceback."""
    assert run.output.count(OVERFLOW) == 5
    last = run.output.splitlines()[-1]
    assert run.status == DIVERGED and re.match(r"fairseq-admin: update [12] was skipped 5 times in a row", last), last
    assert DIVERGED_ADVICE in last and "--admin-max-skipped-updates" in last
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_overflows_in_fp16_stop(corpus: Path, tmp_path: Path) -> None:
    """Does a float16 run that overflows at every batch after its first update end after 5 of them?"""
    check_stop(fp16(corpus, tmp_path, *ABSURD, "--admin-max-skipped-updates", 5))


def test_loading_a_checkpoint_is_no_batch() -> None:
    """Does a healthy run with the strictest limit resume? fairseq sets the number of updates before it loads."""
    model = build("transformer_admin_tiny", admin_max_skipped_updates=1)
    model.set_num_updates(2)
    model.load_state_dict(build("transformer_admin_tiny").state_dict())
    model.set_num_updates(2)


ON_CUDA = [option for option in TRAIN if option != "--cpu"] + ["--distributed-world-size", "1"]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", [[], ["--amp"], ["--memory-efficient-fp16"]])
def test_non_finite_loss_stops_on_cuda(
    precision: list[str], corpus: Path, tmp_path: Path, run: Callable[..., Completed]
) -> None:
    """Does the run end with the advice on a GPU too? (There the loss scale falls to its minimum first.)"""
    options = [*ON_CUDA, *ABSURD, *precision, "--disable-validation", "--save-dir", tmp_path, "--max-update", 100]
    result = run("fairseq_cli.train", corpus, *options)
    assert result.status == DIVERGED and DIVERGED_ADVICE in result.output.splitlines()[-1]


@pytest.mark.cuda
def test_fp16_overflows_stop_on_cuda(corpus: Path, tmp_path: Path, run: Callable[..., Completed]) -> None:
    """Does float16 with flat gradients end in the same way on a GPU, with nothing patched?"""
    flat = [option for option in FP16 if option != "--fp16-no-flatten-grads"]
    options = [*ON_CUDA, *flat, *ABSURD, "--disable-validation", "--admin-max-skipped-updates", 5]
    check_stop(run("fairseq_cli.train", corpus, *options, "--save-dir", tmp_path))
