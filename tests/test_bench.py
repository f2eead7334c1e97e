"""recipes/bench/step.py: does it measure and report? (Not how fast: a timed test would fail on a busy machine.)"""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_reports_three_ratios() -> None:
    """Does a tiny run print a finite ratio of steps, of the profiling pass and of peak memory?"""
    sizes = "--layers 1 --width 16 --ffn 16 --heads 2 --words 50 --tokens 64 --length 8 --pairs 2 --threads 1".split()
    command = [sys.executable, str(ROOT / "recipes/bench/step.py"), *sizes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    rows = [line for line in done.stdout.splitlines() if re.search(r"\b(met|missed)$", line)]
    assert [re.match(r"(training step|profiling pass|peak memory)", row)[0] for row in rows] == [
        "training step",
        "profiling pass",
        "peak memory",
    ]
    assert all(float(re.search(r"(ms|MiB) +([\d.]+)", row)[2]) > 0 for row in rows), done.stdout
