"""docs/examples/nn_transformer.py, short: every method trains at every rate, and Admin's fold gives the stock model."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import ROOT


def test_nn_transformer() -> None:
    command = [sys.executable, ROOT / "docs/examples/nn_transformer.py", "--layers", "2", "--updates", "20"]
    command += ["--rate", "1e-3", "1e-7"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(\S+) +(\S+) +1 +([\d.]+)", printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [(m, r) for m in ("post-ln", "pre-ln", "admin") for r in ("0.001", "1e-07")]
    bits = [float(row[2]) for row in rows]
    # Without training, near the 11 bits of 2000 words that are all as likely.
    assert all(trained < untrained - 0.5 and 10.5 < untrained < 12 for trained, untrained in zip(bits[::2], bits[1::2]))
    differences = [float(value) for value in re.findall(r"folded: outputs differ by (\S+)$", printed, re.MULTILINE)]
    # A float32 has 24 bits, and the outputs are near 1.
    assert len(differences) == 2 and all(0 < value < 1e-4 for value in differences)
