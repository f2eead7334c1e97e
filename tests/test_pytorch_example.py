"""docs/examples/nn_transformer.py, short: every method trains, and Admin's fold gives the stock model."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT


def test_nn_transformer():
    command = [sys.executable, ROOT / "docs/examples/nn_transformer.py", "--layers", "2", "--updates", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bits = dict(re.findall(r"^(\S+), seed 1: (\S+) bits a word$", printed, re.MULTILINE))
    assert list(bits) == ["post-ln", "pre-ln", "admin"]
    # Untrained, near the 11 bits of 2000 words that are all as likely.
    assert all(10 < float(value) < 12 for value in bits.values())
    # A float32 has 24 bits, and the outputs are near 1.
    assert 0 < float(re.search(r"^folded: outputs differ by (\S+) at most$", printed, re.MULTILINE)[1]) < 1e-4
