"""Does the GPU trial continue where it was killed, and would its commands be accepted? (Nothing is trained here.)"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.gpu_trial import run, steps
from recipes.gpu_trial.comparison import check_corpus, corpus_steps
from recipes.gpu_trial.steps import ON_CPU, ON_GPU, STOCK, Step

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
    assert lines[:3] == ["# GPU trial", "", "- hardware: none"] and "- steps: 3 of 3 finished" in lines
    assert [line for line in lines if line.startswith("## ")] == ["## Title a", "## Title c", "## Steps that failed"]
    assert "| b | out of memory / on this card |" in lines
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["steps"]["c"]["rows"] == [{"other": 2}] and found["machine"] == {"hardware": "none"}
    assert trial(a=killed, b=lambda: [{"number": 3}], c=killed) == [*performed, "b"], "one that failed is tried again"
    assert trial(a=killed, b=killed, c=killed) == [*performed, "b"]
    assert "failed" not in (tmp_path / "report.md").read_text()


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


def test_the_steps_are_in_the_order_of_what_is_learnt_first(tmp_path):
    names = [step.name for step in [*steps.all_steps(ON_GPU), *corpus_steps(ON_GPU, tmp_path, "de-en", 9)]]
    assert names[0] == "tests" and names[1:16:5] == ["6l-6l-fp16", "18l-18l-fp16", "60l-12l-fp16"]
    assert names[16:20] == ["bench-float16", "bench-bfloat16", "resume", f"prepare-{tmp_path.name}-de-en"]
    assert len(set(names)) == len(names)
    # Six minutes of each method before any trains on.
    corpus, methods = f"{tmp_path.name}-de-en", ("admin", "pre-ln", "post-ln")
    shares = [f"train-{corpus}-{method}-{until}" for until in (6, 9) for method in methods]
    assert names[20:] == [*shares, *(f"bleu-{corpus}-{method}-9" for method in methods)]
    assert len(steps.all_steps(ON_CPU)) == 1 + 2 * 2 + 2


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
        check_corpus(tmp_path, pair)


def test_a_try_on_a_cpu_is_not_the_gpus():
    plans = [make("-n", f"DEVICE={device}").stdout for device in ("cuda", "cpu")]
    assert ["runs/gpu-trial --device cuda" in plans[0], "runs/gpu-trial-cpu --device cpu" in plans[1]] == [True, True]


def test_without_a_gpu_it_says_so(tmp_path):
    done = make(f"RUNS={tmp_path}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and len(said) == 1 and said[0].startswith("this machine has 0 GPUs")
    assert not list(tmp_path.iterdir())
