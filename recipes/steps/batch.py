"""Split an update's tokens over the machines there are: tokens a device, and how many such batches make an update.

    python -m recipes.steps.batch 32768 --a-device 8192 --nodes 1 --devices 2 --memory 16
    GPUS=2 MAX_TOKENS=8192 UPDATE_FREQ=2

An update holds the same number of tokens on any machine, so results compare. Only the standard library is used: a plan
can be printed before anything is installed.
"""

from __future__ import annotations

import argparse
import subprocess
from typing import NamedTuple

from recipes.steps.common import run

# At most so many tokens of a batch per token of the paper's, by a GPU's memory in GB. The papers' sizes are taken to
# fit cards of 16 GB and more; the rest is proportion, not measurement: MAX_TOKENS= overrides it.
MEMORY = ((75, 4.0), (44, 2.0), (15, 1.0), (10, 0.5), (0, 0.25))
# A batch holds at least one sentence, and fairseq's Transformer takes up to 1,024 tokens.
LEAST = 1024


class Plan(NamedTuple):
    max_tokens: int
    update_freq: int


def most(a_device: int, memory: float | None) -> int:
    """Tokens that a device takes at once: the paper's number, scaled by its memory in GB where that is known."""
    if memory is None:
        return a_device
    return int(a_device * next(factor for least, factor in MEMORY if memory >= least))


def fit(tokens: int, workers: int, limit: int) -> Plan | None:
    """The fewest batches an update, all alike, of at most `limit` tokens each on `workers` devices; None: none fits."""
    for update_freq in range(1, tokens // (workers * min(LEAST, limit)) + 1):
        max_tokens, rest = divmod(tokens, workers * update_freq)
        if not rest and max_tokens <= limit:
            return Plan(max_tokens, update_freq)
    return None


def plan(tokens: int, workers: int, limit: int) -> Plan:
    """As `fit`.

    Raises:
        ValueError: no such number of batches makes up the update.
    """
    if found := fit(tokens, workers, limit):
        return found
    possible = [count for count in range(1, tokens // LEAST + 1) if fit(tokens, count, limit)]
    nearest = sorted(sorted(possible, key=lambda count: abs(count - workers))[:4])
    raise ValueError(
        f"an update of {tokens} tokens does not split over {workers} devices into equal batches of {min(LEAST, limit)} "
        f"to {limit} tokens. Take another number of devices (GPUS= times NODES=: {', '.join(map(str, nearest))}), or "
        "another batch with MAX_TOKENS="
    )


def given(tokens: int, workers: int, max_tokens: int) -> Plan:
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


def gpus() -> list[float]:
    """The memory of each of this machine's NVIDIA GPUs in GB, as nvidia-smi tells; none without it."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return [int(line) * 2**20 / 1e9 for line in found.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tokens", type=int, help="tokens of an update, as the paper has it")
    parser.add_argument("--a-device", type=int, required=True, help="tokens of the paper's batch on one device")
    parser.add_argument("--max-tokens", type=int, help="tokens of a batch on one device, if it shall be just that")
    parser.add_argument("--devices", type=int, help="devices a node (default: the GPUs of this machine)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="refuse if this machine has fewer GPUs")
    parser.add_argument("--memory", type=float, help="GB of a device (default: as nvidia-smi tells)")
    args = parser.parse_args()

    found = gpus()
    devices = args.devices if args.devices is not None else max(1, len(found))
    for name, value in (("GPUS", devices), ("NODES", args.nodes)):
        if value < 1:
            raise ValueError(f"{name} is {value}; expected 1 or more.")
    if args.check and len(found) < devices:
        raise ValueError(
            f"this machine has {len(found)} GPUs, and the run needs {devices}. Give GPUS=, or train small on a CPU "
            "with PRESET=small."
        )
    memory = args.memory if args.memory is not None else min(found, default=None)
    workers = args.nodes * devices
    if args.max_tokens is None:
        chosen = plan(args.tokens, workers, most(args.a_device, memory))
    else:
        chosen = given(args.tokens, workers, args.max_tokens)
    print(f"GPUS={devices} MAX_TOKENS={chosen.max_tokens} UPDATE_FREQ={chosen.update_freq}")


if __name__ == "__main__":
    run(main)
