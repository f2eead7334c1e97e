"""docs/examples, shortened: every method trains at every rate, and Admin folds to the stock model."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
from conftest import ROOT

EXAMPLES = {
    "nn_transformer.py": (["post-ln", "pre-ln", "admin"], 20, 2000, []),
    "bert_from_scratch.py": (["post-ln", "admin"], 40, 96, ["--text", ROOT / "docs/results.md"]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    methods, updates, tokens, options = EXAMPLES[name]
    command = [sys.executable, ROOT / "docs/examples" / name, "--layers", "2", "--updates", str(updates)]
    command += ["--rate", "1e-3", "1e-7", *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.partition("    folded")[0].split() for line in printed.splitlines()]
    rows = [line for line in lines if line[0] in methods]
    assert [row[:2] for row in rows] == [[m, r] for m in methods for r in ("0.001", "1e-07")]
    bits = [float(row[-1]) for row in rows]
    # Without training, the loss is near that of equally likely words or characters.
    bounds = (math.log2(tokens) - 0.5, math.log2(tokens) + 1.5)
    for trained, untrained in zip(bits[::2], bits[1::2]):
        assert trained < untrained - 0.5 and bounds[0] < untrained < bounds[1]
    differences = [float(value) for value in re.findall(r"folded: outputs differ by (\S+)$", printed, re.MULTILINE)]
    # float32 has 24 bits, and the outputs are near 1.
    assert len(differences) == 2 and all(0 <= value < 1e-4 for value in differences)
