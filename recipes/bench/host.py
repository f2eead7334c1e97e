"""Host time: what a training step costs the CPU that starts a GPU's kernels, next to stock Post-LN.

Measured without a GPU, on one CPU thread: fast modules take a GPU's code; dropout is the one operation that it is
there (native_dropout), and attention drops nothing, since torch's kernel for CPUs has no dropout and a GPU's does it
itself. At width 16 the arithmetic hardly counts. Process CPU time, the methods in turns; each turn gives one ratio to
stock Post-LN, and the median counts.

    python -m recipes.bench.host                       # 18L-18L and 60L-12L, some minutes
    python -m recipes.bench.host --layers 6 --pairs 3 --csv host.csv
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from fairseq_admin.fast.plain import Fast
from recipes.bench.common import interleaved, parser, report, size, timed
from recipes.bench.step import PADDING, Run
from recipes.compare.rows import Row

COMPARED = ["post-ln", "admin-plain", "admin"]


def _native_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


@contextlib.contextmanager
def faked_device() -> Iterator[None]:
    """Within this context fast modules take a GPU's code on a CPU, as said above."""
    with mock.patch.object(Fast, "gpu_code", True), mock.patch("torch.nn.functional.dropout", _native_dropout):
        yield


class HostRun(Run):
    """A method's step on a batch with padding, with the clipping of gradients that is its own."""

    def __init__(self, method: str, args: Namespace) -> None:
        super().__init__(method, args, "--attention-dropout", "0")
        self.inputs["src_tokens"][0, :2] = self.inputs["prev_output_tokens"][0, -2:] = PADDING
        self.inputs["src_lengths"][0] -= 2

    def whole_step(self) -> None:
        """Forward, backward, clipping, optimizer."""
        self.forward_backward()
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def rows_of(args: Namespace) -> list[Row]:
    """A row for each method at one size."""
    with faked_device():
        runs = [HostRun(method, args) for method in COMPARED]
        passes = interleaved([run.forward_backward for run in runs], args.pairs)
        steps = interleaved([run.whole_step for run in runs], args.pairs)
        return [
            {"method": method, "layers": args.layers, "decoder_layers": args.decoder_layers, **run.counts()}
            | timed(forward_backward, passes[0], "forward_backward", "forward_backward")
            | timed(step, steps[0], "step", "step")
            for method, run, forward_backward, step in zip(COMPARED, runs, passes, steps)
        ]


def main(arguments: list[str] | None = None) -> None:
    top = parser(__doc__)
    top.add_argument("--layers", nargs="+", default=["18", "60-12"], help="as 18 or 60-12 (default: %(default)s)")
    args = top.parse_args(arguments)
    sizes = [Namespace(**vars(args) | size(f"{layers}:16:64"), words=100, length=8) for layers in args.layers]
    report(map(rows_of, sizes), args.csv)


if __name__ == "__main__":
    main()
