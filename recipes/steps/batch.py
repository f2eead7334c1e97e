"""Split an update's tokens over the available machines: tokens per device, and how many such batches make an update.

    python -m recipes.steps.batch 32768 --a-device 8192 --nodes 1 --devices 2 --memory 16 --encoder-layers 18 ...
    GPUS=2 MAX_TOKENS=4096 UPDATE_FREQ=4 CHECKPOINT=no
    10.9 GB (weights, gradients, moments 2.4, ...) of 16.0 GB

An update holds the same number of tokens on any machine, so results compare. Only the standard library is used: a plan
can be printed before anything is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import NamedTuple

from recipes.steps import gpus
from recipes.steps.activations import LAYERS, PRECISIONS, Batch, Sizes
from recipes.steps.common import run
from recipes.steps.memory import GB, LOSSES, Need, need
from recipes.steps.plugin import SCHEMES

# The smallest sensible batch: it holds at least one sentence, and fairseq's Transformer takes up to 1,024 units.
LEAST = 1024


class Plan(NamedTuple):
    max_tokens: int
    update_freq: int


@dataclasses.dataclass(frozen=True)
class Device:
    """What trains: the model, how many devices hold it, a device's bytes (None: not known), its longest sentences."""

    sizes: Sizes
    workers: int = 1
    memory: float | None = None
    length: int = 256

    def need(self, tokens: int, *, accumulate: bool) -> Need:
        return need(self.sizes, Batch.full(tokens, self.length), accumulate=accumulate, devices=self.workers)

    def fits(self, tokens: int, *, accumulate: bool) -> bool:
        return self.memory is None or self.need(tokens, accumulate=accumulate).peak <= self.memory

    def checkpointed(self) -> Device:
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, checkpoint=True))


def fit(tokens: int, device: Device, limit: int) -> Plan | None:
    """The fewest equal batches per update, of at most `limit` tokens each, that fit; None: none does."""
    for update_freq in range(1, tokens // (device.workers * min(LEAST, limit)) + 1):
        max_tokens, rest = divmod(tokens, device.workers * update_freq)
        if not rest and max_tokens <= limit and device.fits(max_tokens, accumulate=update_freq > 1):
            return Plan(max_tokens, update_freq)
    return None


def least(tokens: int, workers: int) -> int:
    """Tokens of the smallest sensible batch of an update."""
    return min(LEAST, max(1, tokens // workers))


def too_large(device: Device, tokens: int) -> ValueError:
    """The error for a model that does not fit even with its activations computed twice."""
    assert device.memory is not None
    wanted = device.need(tokens, accumulate=True)
    smaller = dataclasses.replace(device, sizes=dataclasses.replace(device.sizes, precision="me-fp16")).checkpointed()
    other = device.sizes.precision != "me-fp16" and device.sizes.gpu and smaller.fits(tokens, accumulate=True)
    return ValueError(
        f"a batch of {tokens} tokens needs {wanted}, and a device has {device.memory / GB:.1f} GB, even with "
        f"--checkpoint-activations. Take {'PRECISION=me-fp16, ' if other else ''}a GPU with more memory (MEMORY= in GB "
        "overrides what nvidia-smi reports) or a smaller model."
    )


def plan(tokens: int, device: Device, limit: int | None = None) -> tuple[Plan, Device]:
    """The largest batches that fit, and the device, its activations computed twice where nothing fits otherwise.

    Args:
        limit: at most this many tokens per batch, even if more fit.

    Raises:
        ValueError: no number of such batches makes up the update, or the model does not fit.
    """
    smallest = least(tokens, device.workers)
    if not device.fits(smallest, accumulate=tokens > smallest * device.workers):
        device = device.checkpointed()
        if not device.fits(smallest, accumulate=tokens > smallest * device.workers):
            raise too_large(device, smallest)
    limit = limit or tokens
    if found := fit(tokens, device, limit):
        return found, device
    possible = [n for n in range(1, tokens // LEAST + 1) if fit(tokens, dataclasses.replace(device, workers=n), limit)]
    nearest = sorted(sorted(possible, key=lambda count: abs(count - device.workers))[:4])
    raise ValueError(
        f"an update of {tokens} tokens does not split over {device.workers} devices into equal batches of "
        f"{min(LEAST, limit)} tokens or more that fit. Take another number of devices (GPUS= times NODES=: "
        f"{', '.join(map(str, nearest))}), or another batch with MAX_TOKENS="
    )


def given(tokens: int, device: Device, max_tokens: int) -> tuple[Plan, Device]:
    """The plan for a batch that the user chose.

    Raises:
        ValueError: such batches do not make up the update, or do not fit.
    """
    workers = device.workers
    if max_tokens < 1 or tokens % (workers * max_tokens):
        fitting = [size for size in range(LEAST, tokens // workers + 1) if tokens % (workers * size) == 0]
        nearest = sorted(sorted(fitting, key=lambda size: abs(size - max_tokens))[:4])
        raise ValueError(
            f"MAX_TOKENS={max_tokens} on {workers} devices does not make up an update of {tokens} tokens. Take "
            f"{' or '.join(map(str, nearest)) or 'fewer devices'}, or leave MAX_TOKENS out"
        )
    chosen = Plan(max_tokens, tokens // (workers * max_tokens))
    if not device.fits(max_tokens, accumulate=chosen.update_freq > 1):
        device = device.checkpointed()
        if not device.fits(max_tokens, accumulate=chosen.update_freq > 1):
            raise too_large(device, max_tokens)
    return chosen, device


def explained(chosen: Plan, device: Device, asked: bool) -> str:
    """The plan's memory in a line.

    Args:
        asked: whether the user wanted the activations computed twice.
    """
    wanted = device.need(chosen.max_tokens, accumulate=chosen.update_freq > 1)
    there = "memory not known here" if device.memory is None else f"of {device.memory / GB:.1f} GB"
    why = ""
    if device.sizes.checkpoint and not asked:
        why = "; with --checkpoint-activations, as no sensible batch fits without: an update takes about a third longer"
    return f"{wanted} {there}{why}"


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options for the sizes of a recipe's model, and how it trains."""
    default = Sizes()
    for name in ("encoder-layers", "decoder-layers", "width", "ffn", "heads", "words"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name.replace("-", "_")))
    for name in ("dropout", "attention-dropout", "activation-dropout"):
        parser.add_argument(f"--{name}", type=float, default=getattr(default, name.replace("-", "_")))
    parser.add_argument("--precision", choices=list(PRECISIONS), default=default.precision)
    for name, choices in (("scheme", SCHEMES), ("layers", LAYERS), ("loss", LOSSES)):
        parser.add_argument(f"--{name}", choices=list(choices), default=getattr(default, name))
    parser.add_argument("--length", type=int, default=256, help="units of the longest sentences of a batch")
    parser.add_argument("--checkpoint", action="store_true", help="with --checkpoint-activations")
    parser.add_argument("--cpu", action="store_true", help="train on a CPU")


def sizes_of(args: argparse.Namespace) -> Sizes:
    names = {field.name for field in dataclasses.fields(Sizes)} - {"gpu"}
    return Sizes(**{name: getattr(args, name) for name in names}, gpu=not args.cpu)


def memory_of(args: argparse.Namespace, found: list[gpus.Gpu]) -> float | None:
    """Bytes of the smallest device that will train, as given or as nvidia-smi reports."""
    if args.memory is not None:
        return args.memory * GB
    known = [gpu.memory for gpu in found if gpu.memory is not None]
    return min(known) if known and len(known) == len(found) and not args.cpu else None


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("tokens", type=int, help="tokens of an update, as in the paper")
    parser.add_argument("--a-device", type=int, required=True, help="tokens of the paper's batch on one device")
    parser.add_argument("--max-tokens", type=int, help="tokens of a batch on one device, to set it yourself")
    parser.add_argument("--devices", type=int, help="devices per node (default: the GPUs of this machine)")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="refuse if this machine, or its torch, cannot train it")
    parser.add_argument("--memory", type=float, help="GB of a device (default: as nvidia-smi reports)")
    add_sizes(parser)
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
    device = Device(sizes_of(args), args.nodes * devices, memory_of(args, found), args.length)
    if args.max_tokens is None:
        # Where the memory is not known, the paper's batch is taken to fit.
        chosen, planned = plan(args.tokens, device, args.a_device if device.memory is None else None)
    else:
        chosen, planned = given(args.tokens, device, args.max_tokens)
    twice = f"CHECKPOINT={'yes' if planned.sizes.checkpoint else 'no'}"
    print(f"GPUS={devices} MAX_TOKENS={chosen.max_tokens} UPDATE_FREQ={chosen.update_freq} {twice}")
    print(explained(chosen, planned, args.checkpoint))


if __name__ == "__main__":
    run(main)
