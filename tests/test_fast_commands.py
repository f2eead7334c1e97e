"""The fast layers on the command line. (test_modes.py trains with them in every mode, and resumes bit for bit.)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TRAIN, Run

FAST = ["--criterion", "label_smoothed_cross_entropy_fast", "--report-accuracy", "--label-smoothing", 0.1]


def losses(done: Run, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\b{name}=?\s*([\d.]+)", done.output)]


@pytest.mark.slow
def test_trains_and_generates_as_without(corpus: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """The same curve without dropout; a checkpoint of either generates the same, to the last digit, with either."""
    done = {}
    still = ["--dropout", 0, "--attention-dropout", 0, "--max-update", 60, "--lr", "2e-3"]
    for fast in ("on", "off"):
        options = [*TRAIN, *still, *(FAST if fast == "on" else [FAST[0], "label_smoothed_cross_entropy", *FAST[2:]])]
        saved = ["--save-dir", tmp_path / fast, "--admin-fast", fast]
        done[fast] = run("fairseq_cli.train", corpus, *options, *saved)
        assert done[fast].status == 0, done[fast].output[-4000:]
    curves = [losses(done[fast], "loss") for fast in ("on", "off")]
    assert len(curves[0]) == len(curves[1]) > 60 and curves[0][-1] < 0.8 * curves[0][0]
    # Rounding grows from update to update: 1e-6 a step at first, here over 60.
    assert max(abs(a - b) for a, b in zip(*curves)) < 0.02
    said = {}
    for fast in ("on", "off"):
        for model in ("on", "off"):
            given = ["--path", tmp_path / fast / "checkpoint_last.pt", "--user-dir", "fairseq_admin", "--cpu"]
            override = ["--model-overrides", str({"admin_fast": model}), "--beam", 3]
            out = run("fairseq_cli.generate", corpus, *given, *override)
            assert out.status == 0, out.output[-4000:]
            said[fast, model] = re.findall(r"^[HDP]-\d+\t.*$", out.output, re.M)
        assert len(said[fast, "on"]) > 40 and said[fast, "on"] == said[fast, "off"]
