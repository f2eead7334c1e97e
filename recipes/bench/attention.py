"""From how many keys on torch's attention kernel is ahead of batched products on a CPU, where nothing is dropped.

Self-attention with its projections, forward and backward, by either in turns, in alternating order; a pair gives one
ratio, and the median counts. `SHORT` in fairseq_admin/fast/products.py comes from it. Then the same of torch's softmax,
of rows as they are and filled up to a vector.

    python recipes/bench/attention.py                            # one thread, a minute and a half
    python recipes/bench/attention.py --heads 4:16 --keys 13     # the demo's
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import fairseq_admin  # noqa: E402, F401
from fairseq_admin.fast import attention, products  # noqa: E402
from recipes.bench.arguments import number  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.turns import paired, summary  # noqa: E402

NEVER, ALWAYS = 0, sys.maxsize
HEADS = [(4, 16), (4, 64), (8, 64)]
KEYS = [13, 25, 32, 48, 96, 512]


def sizes(given: str) -> tuple[int, int]:
    """The arguments' heads, and channels of each."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", given)
    if not found:
        raise argparse.ArgumentTypeError(f"{given!r} is no size; expected HEADS:CHANNELS, as 4:16")
    return int(found[1]), int(found[2])


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = f"(default: {' '.join(f'{heads}:{channels}' for heads, channels in HEADS)})"
    top.add_argument("--heads", nargs="+", type=sizes, default=HEADS, metavar="HEADS:CHANNELS", help=usual)
    top.add_argument("--keys", nargs="+", type=number, default=KEYS, help="words a sentence (default: %(default)s)")
    top.add_argument("--tokens", type=number, default=1024, help="of a batch (default: 1024)")
    top.add_argument("--pairs", type=number, default=15, help="(default: 15)")
    top.add_argument("--threads", type=number, default=1, help="(default: 1)")
    top.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="which time (default: cpu)")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    top.set_defaults(device="cpu")
    return top


def attending(heads: int, channels: int, keys: int, tokens: int, causal: bool, short: int) -> Callable[[], None]:
    """One forward and backward, by products up to so many keys."""
    width = heads * channels
    layer = attention.FastAttention(width, heads, self_attention=True).train()
    x = torch.randn(max(1, tokens // keys), keys, width, requires_grad=True)
    mask = attention.Causal(keys) if causal else attention.Mask()

    def action() -> None:
        with mock.patch.object(attention, "SHORT", short):
            layer(x, x, x, key_padding_mask=mask, need_weights=False)[0].sum().backward()

    return action


def softmax(rows: int, columns: int, filled: bool) -> Callable[[], None]:
    """Forward and backward of rows of scores, filled up to a vector or not."""
    scores, gradient = torch.randn(rows, columns), torch.randn(rows, columns)

    def action() -> None:
        given, of_shares = scores, gradient
        if filled:
            given, of_shares = products.filled_up(scores, -math.inf), products.filled_up(gradient, 0)
        shares = given.softmax(-1)
        torch._softmax_backward_data(of_shares, shares, -1, shares.dtype)

    return action


def report(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Print a row, and return it."""
    found = summary([ours / other for ours, other in pairs], "ratio")
    ours, other = (1000 * statistics.median(side) for side in zip(*pairs))
    spread = f"({found['low']:.2f} to {found['high']:.2f})"
    print(f"{name:44} {ours:8.3f} {other:8.3f} ms {found['ratio']:6.2f} {spread}", flush=True)
    return {"what": name, "ours_ms": ours, "other_ms": other, **found, "pairs": len(pairs)}


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    capability = torch.backends.cpu.get_cpu_capability()
    where = {"tokens": args.tokens, "capability": capability, **conditions(args)}
    rows = []
    print(
        f"{capability}, {args.threads} thread(s), {args.tokens} tokens; products are used up to {products.SHORT} keys"
    )
    print(f"{'attention, products / kernel':44} {'products':>8} {'kernel':>8}     ratio")
    for heads, channels in args.heads:
        for keys in args.keys:
            for causal in (False, True):
                ours, other = (attending(heads, channels, keys, args.tokens, causal, it) for it in (ALWAYS, NEVER))
                name = f"{heads} heads of {channels}, {keys} keys{', causal' if causal else ''}"
                rows.append(report(name, paired(ours, other, args, name)))
    print(f"{'softmax, rows filled up / as they are':44} {'filled':>8} {'as is':>8}     ratio")
    for keys in args.keys:
        lines = max(1, args.tokens // keys) * 4 * keys
        ours, other = (softmax(lines, keys, filled) for filled in (True, False))
        rows.append(report(f"{lines} rows of {keys}", paired(ours, other, args, f"softmax of {keys}")))
    keep(args.csv, where, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
