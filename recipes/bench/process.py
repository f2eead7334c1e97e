"""What a training process takes on a CPU, next to what the formula says it does.

`fairseq-train`, started as a recipe starts it, on made-up sentences of 25 units on average and at most 100, with three
dropouts, in fp32, one thread. Measured is how far the process grows from its imports to its peak; predicted is
`most` (recipes/steps/memory.py) with the batches of those updates. As malloc's holes come by chance, a peak differs
from run to run. It reads /proc, so it needs Linux.

    python recipes/bench/process.py                               # eleven sizes, twenty minutes
    python recipes/bench/process.py --sizes 6:128:2000:1024:fast:10 --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_admin.fast import linear  # noqa: E402
from recipes.bench.arguments import number  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.pages import HUGE  # noqa: E402
from recipes.preflight.batches import batches  # noqa: E402
from recipes.preflight.sample import write_sample  # noqa: E402
from recipes.steps.activations import Sizes  # noqa: E402
from recipes.steps.common import run  # noqa: E402
from recipes.steps.memory import ONEDNN, SMALLEST, most  # noqa: E402

FORM = "LAYERS:WIDTH:WORDS:TOKENS:CODE:UPDATES"
SIZES = [
    "3:32:10000:2048:fast:60",
    "3:32:10000:2048:fast:400",
    "3:32:10000:2048:plain:60",
    "3:32:2000:2048:fast:60",
    "6:64:1000:2048:fast:20",
    "6:64:5000:2048:fast:25",
    "6:128:10000:2048:fast:25",
    "6:128:30000:1024:fast:15",
    "18:64:10000:2048:fast:10",
    "18:64:10000:2048:plain:8",
    "6:256:5000:4096:fast:10",
]
"""Layers of both stacks, width, words, target tokens, our layers and loss (fast) or fairseq's (plain), updates."""

LANGUAGES, LENGTH, LONGEST = ("a", "b"), 25, 100
DROPOUTS = 0.3, 0.1, 0.1
"""Of the branches, of attention's weights, and after the feed-forward's activation."""


class Size(NamedTuple):
    layers: int
    width: int
    words: int
    tokens: int
    code: str
    updates: int

    @property
    def ffn(self) -> int:
        """Twice the width; four times from 256 on, as in the papers' models."""
        return self.width * (4 if self.width >= 256 else 2)

    @property
    def heads(self) -> int:
        return 2 if self.width < 64 else 4


def size(given: str) -> Size:
    """One of the arguments, as SIZES writes it."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*):([1-9]\d*):([1-9]\d*):(fast|plain):([1-9]\d*)", given)
    if not found or int(found[2]) % 4:
        raise argparse.ArgumentTypeError(
            f"{given!r} is no size; expected {FORM} with a width that is a multiple of 4 and CODE fast or plain, as "
            "6:128:2000:1024:fast:10"
        )
    layers, width, words, tokens, code, updates = found.groups()
    return Size(int(layers), int(width), int(words), int(tokens), code, int(updates))


def options(folder: Path, asked: Size) -> list[str]:
    """Of fairseq-train."""
    fast, suffix = ("on", "_fast") if asked.code == "fast" else ("off", "")
    told = f"{folder} --user-dir fairseq_admin --arch transformer_admin --share-all-embeddings"
    told += f" --optimizer radam --lr 1e-4 --criterion label_smoothed_cross_entropy{suffix} --label-smoothing 0.1"
    told += f" --max-tokens {asked.tokens} --cpu --max-update {asked.updates} --num-workers 0 --admin-fast {fast}"
    told += f" --no-save --disable-validation --save-dir {folder} --required-batch-size-multiple 1"
    told += " --dropout {} --attention-dropout {} --activation-dropout {}".format(*DROPOUTS)
    for side in ("encoder", "decoder"):
        told += f" --{side}-layers {asked.layers} --{side}-embed-dim {asked.width}"
        told += f" --{side}-ffn-embed-dim {asked.ffn} --{side}-attention-heads {asked.heads}"
    return told.split()


def growth(folder: Path, asked: Size) -> float:
    """Bytes by which such a process grows, from its imports to its peak.

    Raises:
        ValueError: it ended early, or there is no /proc to read its memory from.
    """
    command = [sys.executable, "-m", "recipes.preflight.weigh", str(folder / "weight.json"), *options(folder, asked)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **HUGE}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"fairseq-train ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    found = json.loads((folder / "weight.json").read_text())["growth"]
    if found <= 0:
        raise ValueError("/proc/self/status cannot be read; expected Linux, which tells a process's memory there.")
    return found


def predicted(folder: Path, asked: Size) -> float:
    """Bytes by the formula, which counts oneDNN's share on every CPU; without it where our layers do not use it."""
    sizes = Sizes(
        asked.layers,
        asked.layers,
        asked.width,
        asked.ffn,
        asked.heads,
        asked.words,
        *DROPOUTS,
        precision="fp32",
        layers=asked.code,
        loss=asked.code,
        gpu=False,
    )
    found = most(sizes, batches(folder, LANGUAGES, asked.tokens, LONGEST)).peak
    unused = asked.code == "fast" and asked.width * asked.ffn >= SMALLEST and linear.ahead() < linear.FASTER
    return found - ONEDNN if unused else found


def row(asked: Size, runs: int) -> dict[str, Any]:
    """What it takes in so many runs, in MB, and what the formula says."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sample(folder, LANGUAGES, (LENGTH, LENGTH), LONGEST, asked.words, asked.tokens * asked.updates)
        formula = predicted(folder, asked) / 1e6
        found = [growth(folder, asked) / 1e6 for _ in range(runs)]
    return {
        **asked._asdict(),
        "ffn": asked.ffn,
        "runs": runs,
        "smallest_mb": min(found),
        "largest_mb": max(found),
        "predicted_mb": formula,
    }


def bench(args: argparse.Namespace) -> None:
    where = {**conditions(args), "threads": 1}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print("MB: smallest to largest run")
    rows = []
    for asked in args.sizes:
        rows.append(row(asked, args.runs))
        smallest, largest, formula = (rows[-1][f"{name}_mb"] for name in ("smallest", "largest", "predicted"))
        print(f"{':'.join(map(str, asked)):<28} {smallest:.0f} to {largest:.0f}, predicted {formula:.0f}", flush=True)
    keep(args.csv, where, rows)


def main(arguments: list[str] | None = None) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument(
        "--sizes", nargs="+", type=size, default=list(map(size, SIZES)), metavar=FORM, help="(default: eleven)"
    )
    top.add_argument("--runs", type=number, default=1, help="processes of each size (default: 1)")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    top.set_defaults(device="cpu", clock="wall")
    args = top.parse_args(arguments)
    run(lambda: bench(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
