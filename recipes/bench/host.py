"""Host time: what a training step costs the CPU that starts a GPU's kernels, next to stock Post-LN.

Measured without a GPU, on one CPU thread: tensors say that they are not on a CPU, so the branches that a GPU takes
compute; dropout is the one operation that it is there (native_dropout), and attention drops nothing, since torch's
kernel for CPUs has no dropout and a GPU's does it itself. At width 16 the arithmetic hardly counts. Process CPU time,
the methods in turns; each turn gives one ratio to stock Post-LN, and the median counts.

    python -m recipes.bench.host                       # 18L-18L and 60L-12L, some minutes
    python -m recipes.bench.host --layers 6 --pairs 3 --csv host.csv
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from fairseq.modules import MultiheadAttention
from fairseq.utils import clip_grad_norm_
from torch import Tensor

from fairseq_admin.radam import FairseqRAdam, RAdamConfig
from recipes.bench.arguments import parser, size
from recipes.bench.conditions import conditions, keep
from recipes.bench.step import PADDING, Run
from recipes.bench.turns import interleaved, ratio

COMPARED = ["post-ln", "admin-plain", "admin"]


def _native_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


@contextlib.contextmanager
def faked_device() -> Iterator[None]:
    """Within this context the CPU passes for a GPU, as said above."""
    faked = property(lambda tensor: False)
    with mock.patch.object(Tensor, "is_cpu", faked), mock.patch("torch.nn.functional.dropout", _native_dropout):
        yield


class HostRun(Run):
    """A method's step, with the clipping of gradients that is its own."""

    def __init__(self, method: str, args: Namespace) -> None:
        super().__init__(method, args)
        self.src[0, :2] = self.prev[0, -2:] = PADDING
        self.lengths[0] -= 2
        for module in self.model.modules():
            if isinstance(module, MultiheadAttention):
                module.dropout_module.p = 0.0
        self.params = list(self.model.parameters())
        self.handle = FairseqRAdam(RAdamConfig(lr=[1e-5]), self.params) if self.fast else None

    def whole_step(self) -> None:
        """Forward, backward, clipping, optimizer."""
        self.forward_backward()
        if self.handle is None:
            clip_grad_norm_(self.params, 1.0)
            self.rule.step()
        else:
            self.handle.clip_grad_norm(1.0)
            self.handle.step()
        self.model.zero_grad(set_to_none=True)


def rows_of(args: Namespace) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    with faked_device():
        runs = [HostRun(method, args) for method in COMPARED]
        passes = interleaved([run.forward_backward for run in runs], args.pairs)
        steps = interleaved([run.whole_step for run in runs], args.pairs)
        rows = []
        for i, (method, run) in enumerate(zip(COMPARED, runs)):
            row = {"method": method, "layers": args.layers, "decoder_layers": args.decoder_layers, **run.counts()}
            for name, times in {"forward_backward": passes, "step": steps}.items():
                row[f"{name}_ms"] = 1000 * statistics.median(times[i])
                row[name], row[f"{name}_low"], row[f"{name}_high"] = ratio(times[i], times[0])
            rows.append(row)
    return rows


def cell(row: dict[str, Any], name: str) -> str:
    """Milliseconds, and the ratio's median, lowest and highest."""
    return "{:8.1f} {:7.3f} ({:.3f} to {:.3f})".format(*(row[name + end] for end in ("_ms", "", "_low", "_high")))


def main(arguments: list[str] | None = None) -> int:
    top = parser(__doc__)
    top.add_argument("--layers", nargs="+", default=["18", "60-12"], help="as 18 or 60-12 (default: %(default)s)")
    args = top.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    print(f"{'method':12} {'layers':>7} {'forward + backward, ms and ratio':>33} {'whole step':>33} operations waits")
    for layers in args.layers:
        for row in rows_of(Namespace(**vars(args) | size(f"{layers}:16:64"), words=100, length=8)):
            times = " ".join(cell(row, name) for name in ("forward_backward", "step"))
            print(f"{row['method']:12} {layers:>7} {times} {row['operations']:10} {row['waits']:5}", flush=True)
            rows.append(row)
    keep(args.csv, conditions(), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
