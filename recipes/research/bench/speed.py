"""The cost of a training step on a CPU thread: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast on`).

Stock has fairseq's loss and Adam, Admin plain fairseq's loss and torch's RAdam, Admin fast our loss and RAdam. The four
train in turns, by fairseq's trainer, in process CPU time; each turn gives one ratio to stock Post-LN, and the median
counts. A row also has the counts of counting.py.

With --host the step is that of the CPU thread that starts a GPU's kernels: fast modules run their code for a GPU.
Dropout is one operation, as on a GPU (native_dropout). Attention has no dropout: torch's kernel for CPUs cannot drop,
and the kernel for GPUs drops by itself. At width 16 the arithmetic hardly counts.

    python -m recipes.research.bench.speed                                      # 18L-18L at widths 16, 256 and 512
    python -m recipes.research.bench.speed --sizes 6:512:1024 60-12:512:1024    # layers, width, target tokens
    python -m recipes.research.bench.speed --host                               # 18L-18L and 60L-12L at width 16
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor

from fairseq_admin.fast.plain import Fast
from recipes.research.bench.common import interleaved, machine, timed
from recipes.research.bench.counting import counts
from recipes.research.bench.step import batches, trainer
from recipes.research.rows import Row
from recipes.steps.results import write_runs

COMPARED = ("stock", "pre-ln", "plain", "fast")
"""Keys of step.METHODS; the first is what the others are compared with."""
SIZES = {False: ["18:16:512", "18:256:1024", "18:512:1024"], True: ["18:16:64", "60-12:16:64"]}
"""Default sizes: False without --host, True with --host."""
FORM = "LAYERS[-DECODER_LAYERS]:WIDTH:TOKENS"


def size(text: str) -> Row:
    """A model's size and tokens in the form FORM."""
    layers, width, tokens = text.split(":")
    encoder, _, decoder = layers.partition("-")
    numbers = map(int, (encoder, decoder or encoder, width, tokens))
    return dict(zip(("layers", "decoder_layers", "width", "tokens"), numbers))


def _native_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


@contextlib.contextmanager
def faked_device() -> Iterator[None]:
    """Inside this context, fast modules on a CPU run the code that they would run on a GPU."""
    with mock.patch.object(Fast, "gpu_code", True), mock.patch("torch.nn.functional.dropout", _native_dropout):
        yield


class Timed:
    """A method's trainer and a fixed batch."""

    def __init__(self, method: str, sizes: Row, host: bool) -> None:
        words, length = (100, 8) if host else (4000, 32)
        layers, further = (sizes["layers"], sizes["decoder_layers"]), ["--attention-dropout=0"] if host else []
        self.trainer = trainer(method, words, layers, sizes["width"], "--cpu", *further)
        self.trainer.optimizer.optimizer.fused = method == "fast"
        self.sample = next(batches(max(sizes["tokens"], length), words, [length]))

    def loss(self) -> Tensor:
        return self.trainer.criterion(self.trainer.model, self.sample)[0]

    def forward_backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.trainer.train_step([self.sample])


def rows_of(sizes: Row, host: bool, pairs: int) -> list[Row]:
    """A row for each method at one size."""
    with faked_device() if host else contextlib.nullcontext():
        runs = [Timed(method, sizes, host) for method in COMPARED]
        passes = interleaved([run.forward_backward for run in runs], pairs)
        steps = interleaved([run.step for run in runs], pairs)
        return [
            {"method": method, **sizes, **counts(run.trainer.model, run.loss)}
            | timed(of_passes, passes[0], "forward_backward")
            | timed(of_steps, steps[0], "step")
            for method, run, of_passes, of_steps in zip(COMPARED, runs, passes, steps)
        ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size, metavar=FORM, help=f"default: {', '.join(SIZES[False])}")
    parser.add_argument("--host", action="store_true", help=f"the host of a GPU; --sizes {' '.join(SIZES[True])}")
    parser.add_argument("--pairs", type=int, default=15, help="turns (default: %(default)s)")
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fairseq and its libraries, about one another
    logging.disable(logging.INFO)
    here = {**machine(), "load": round(os.getloadavg()[0], 1)}  # processes that run, over the last minute
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    rows: list[Row] = []
    for sizes in args.sizes or map(size, SIZES[args.host]):
        measured = rows_of(sizes, args.host, args.pairs)
        print(tabulate(measured, headers="keys", floatfmt=".3f"), flush=True)
        rows += [{**row, **here} for row in measured]
        if args.csv:
            write_runs(args.csv, rows)


if __name__ == "__main__":
    main()
