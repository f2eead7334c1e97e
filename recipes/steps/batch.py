"""Split an update's tokens over the available machines: tokens per device, and how many such batches make an update.

    python -m recipes.steps.batch 32768 --a-device 8192 --by 16:8192 32:16384 --nodes 1 --devices 2 --memory 16
    GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=2 LESS=4096

An update holds the same number of tokens on any machine, so results compare. LESS is the batch to give where this one
runs out of memory. Only the standard library is used: a plan can be printed before anything is installed.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from recipes.steps import gpus
from recipes.steps.common import run

# The smallest sensible batch: it holds at least one sentence, and fairseq's Transformer takes up to 1,024 tokens.
LEAST = 1024
GB = 1e9


class Plan(NamedTuple):
    max_tokens: int
    update_freq: int


def split(tokens: int, workers: int, limit: int) -> Plan | None:
    """The fewest equal batches of at most `limit` tokens that make up an update; None if there are none."""
    for update_freq in range(1, tokens // (workers * min(LEAST, limit)) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return Plan(max_tokens, update_freq)
    return None


def largest(table: dict[int, int], memory: float) -> int:
    """The tokens that a table, {GB of a card: tokens of a batch}, has for a card of so many GB.

    Raises:
        ValueError: the card is smaller than the table's smallest.
    """
    rows = [gb for gb in table if gb <= memory]
    if not rows:
        smallest = min(table)
        raise ValueError(
            f"a GPU has {memory:.1f} GB, and this model was planned for {smallest} GB or more. To try it, give "
            f"MAX_TOKENS={table[smallest] // 2}"
        )
    return table[max(rows)]


def plan(tokens: int, workers: int, limit: int) -> Plan:
    """The largest batches of at most `limit` tokens.

    Raises:
        ValueError: no number of such batches makes up the update.
    """
    if found := split(tokens, workers, limit):
        return found
    possible = [count for count in range(1, tokens // LEAST + 1) if split(tokens, count, limit)]
    nearest = sorted(sorted(possible, key=lambda count: abs(count - workers))[:4])
    raise ValueError(
        f"an update of {tokens} tokens does not split over {workers} devices into equal batches of "
        f"{min(LEAST, limit)} tokens or more that fit. Take another number of devices (GPUS= times NODES=: "
        f"{', '.join(map(str, nearest))}), or another batch with MAX_TOKENS="
    )


def chosen(tokens: int, workers: int, max_tokens: int) -> Plan:
    """The plan for a batch that the user chose.

    Raises:
        ValueError: such batches do not make up the update.
    """
    if max_tokens < 1 or tokens % (workers * max_tokens):
        fitting = [size for size in range(LEAST, tokens // workers + 1) if tokens % (workers * size) == 0]
        nearest = sorted(sorted(fitting, key=lambda size: abs(size - max_tokens))[:4])
        raise ValueError(
            f"MAX_TOKENS={max_tokens} on {workers} devices does not make up an update of {tokens} tokens. Take "
            f"{' or '.join(map(str, nearest)) or 'fewer devices'}, or leave MAX_TOKENS out"
        )
    return Plan(max_tokens, tokens // (workers * max_tokens))


def check(devices: int, precision: str, found: list[gpus.Gpu]) -> None:
    """Refuse to train where this machine's GPUs, or this environment's torch, cannot.

    Raises:
        ValueError: they cannot.
    """
    if len(found) < devices:
        raise ValueError(
            f"this machine has {len(found)} GPUs{gpus.restricted()}, and the run needs {devices}. Give GPUS=, or train "
            "small on a CPU with PRESET=small (or cpu)."
        )
    if fault := gpus.torch_fault(devices, precision, found, sys.version_info[:2]):
        raise ValueError(fault)


def row(text: str) -> tuple[int, int]:
    """16:8192, GB of a card and tokens of a batch."""
    memory, _, tokens = text.partition(":")
    return int(memory), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("tokens", type=int, help="tokens of an update, as in the paper")
    parser.add_argument("--a-device", type=int, required=True, help="tokens of the paper's batch on one device")
    parser.add_argument("--by", type=row, nargs="+", default=[], help="GB of a card:tokens of a batch on it")
    parser.add_argument("--max-tokens", type=int, help="tokens of a batch on one device, to set it yourself")
    parser.add_argument("--devices", type=int, help="devices per node (default: the GPUs of this machine)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--memory", type=float, help="GB of a device (default: as nvidia-smi reports)")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--cpu", action="store_true", help="train on a CPU")
    parser.add_argument("--check", action="store_true", help="refuse if this machine, or its torch, cannot train it")
    args = parser.parse_args()

    found = [] if args.cpu else gpus.visible()
    devices = args.devices if args.devices is not None else max(1, len(found))
    for name, value in (("GPUS", devices), ("NODES", args.nodes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more.")
    if args.nodes > 1 and devices < len(found):
        raise ValueError(
            f"GPUS={devices} of {len(found)} with NODES={args.nodes}: fairseq trains on each GPU it sees. Let it see "
            f"only those: CUDA_VISIBLE_DEVICES={','.join(gpu.index for gpu in found[:devices])}"
        )
    if args.check:
        check(devices, args.precision, found)
    workers = args.nodes * devices
    memory = args.memory or min((gpu.memory / GB for gpu in found if gpu.memory), default=None)
    if args.max_tokens is not None:
        batch = chosen(args.tokens, workers, args.max_tokens)
    else:
        # Where the memory is not known, the paper's batch is taken to fit.
        limit = largest(dict(args.by), memory) if memory is not None and args.by else args.a_device
        batch = plan(args.tokens, workers, limit)
    less = split(args.tokens, workers, batch.max_tokens // 2) or batch
    print(f"GPUS={devices} MAX_TOKENS={batch.max_tokens} UPDATE_FREQ={batch.update_freq} LESS={less.max_tokens}")


if __name__ == "__main__":
    run(main)
