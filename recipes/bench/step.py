"""What Admin costs next to fairseq's own Post-LN Transformer of equal sizes: `make bench`.

Training steps (forward, backward, optimizer) of both models take turns, in alternating order, so that whatever else the
machine does affects both; a pair gives one ratio, and the median counts. The profiling pass is compared with forwards
of the Admin model in training mode, and each model's peak memory is measured in its own process.

    python recipes/bench/step.py                 # 18L-18L, sized for two CPU cores, about three minutes
    python recipes/bench/step.py --device cuda --dtype float16 --width 512 --ffn 2048 --heads 8 --tokens 4096
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from fairseq.data import Dictionary  # noqa: E402
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY  # noqa: E402

import fairseq_admin  # noqa: E402, F401  (registers transformer_admin)
from fairseq_admin.method.profiling import measure  # noqa: E402
from fairseq_admin.radam import RAdam  # noqa: E402

COMPARED = ("admin", "post-ln")
VARIANTS: dict[str, tuple[str, dict]] = {
    "admin": ("transformer_admin", {"admin_fast": "on"}),
    "admin-plain": ("transformer_admin", {"admin_fast": "off"}),
    "post-ln": ("transformer", {}),
    "pre-ln": ("transformer", {"encoder_normalize_before": True, "decoder_normalize_before": True}),
}
"""Architecture and options of each model that can be measured."""
# Given back at once: what malloc keeps for later is no one's memory.
BLOCKS_OF_THEIR_OWN = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
TARGETS = {"step": 1.05, "profile": 1.0, "memory": 1.02}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--layers", type=int, default=18, help="layers of the encoder and of the decoder (default: 18)")
    top.add_argument("--decoder-layers", type=int, help="of the decoder, if it has another number")
    top.add_argument("--width", type=int, default=256)
    top.add_argument("--ffn", type=int, default=1024)
    top.add_argument("--heads", type=int, default=4)
    top.add_argument("--words", type=int, default=4000, help="size of the vocabulary")
    top.add_argument("--tokens", type=int, default=1024, help="target tokens of a batch; sources hold as many")
    top.add_argument("--length", type=int, default=32, help="tokens of a sentence")
    top.add_argument("--optimizer", choices=["radam", "none"], default="radam", help="none: forward and backward only")
    top.add_argument("--device", default="cpu")
    top.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="else with autocast"
    )
    top.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    top.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, for a busy machine; use one thread",
    )
    top.add_argument("--pairs", type=int, default=15)
    top.add_argument("--memory-of", choices=list(VARIANTS), help=argparse.SUPPRESS)
    return top


class Bench:
    """One model with its optimizer and a fixed batch."""

    def __init__(self, method: str, args: Namespace) -> None:
        options = Namespace(share_all_embeddings=True, dropout=0.1, attention_dropout=0.1, update_freq=[1])
        options.admin_init, options.admin_profile_tokens, options.admin_max_skipped_updates = "reference", 8192, 100
        for side in ("encoder", "decoder"):
            sizes = {
                "layers": (args.decoder_layers if side == "decoder" else None) or args.layers,
                "embed_dim": args.width,
                "ffn_embed_dim": args.ffn,
                "attention_heads": args.heads,
            }
            for name, value in sizes.items():
                setattr(options, f"{side}_{name}", value)
        arch, given = VARIANTS[method]
        vars(options).update(given)
        ARCH_CONFIG_REGISTRY[arch](options)
        words = Dictionary()
        for word in range(args.words):
            words.add_symbol(f"w{word}")
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        torch.manual_seed(1)
        self.device = torch.device(args.device)
        self.model = ARCH_MODEL_REGISTRY[arch].build_model(options, task).to(self.device).train()
        size = (max(1, args.tokens // args.length), args.length)
        self.src, self.target = (torch.randint(4, args.words + 4, size, device=self.device) for _ in range(2))
        self.lengths = torch.full(size[:1], args.length, device=self.device)
        self.prev = self.target.roll(1, 1)
        self.optimizer: RAdam | None = None
        if args.optimizer == "radam":
            self.optimizer = RAdam(self.model.parameters(), lr=1e-5, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
        self.dtype = getattr(torch, args.dtype)

    def precision(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def forward(self) -> torch.Tensor:
        with self.precision():
            return self.model(self.src, self.lengths, self.prev)[0]

    def step(self) -> None:
        logits = self.forward()
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), self.target.flatten()).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def profile(self) -> None:
        with self.precision():
            measure(self.model, self.src, self.prev, "reference")


def seconds(action: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Time of one call, until whatever it started on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def paired(ours: Callable, other: Callable, args: Namespace, tell: str) -> list[tuple[float, float]]:
    """Times of both actions in turns, the order swapped from pair to pair; the first two pairs are warm-up."""
    times = []
    pairs, device = args.pairs, torch.device(args.device)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    for pair in range(pairs + 2):
        print(f"\r{tell}: pair {max(0, pair - 1)} of {pairs} ", end="", file=sys.stderr, flush=True)
        if pair % 2:
            second, first = seconds(other, device, clock), seconds(ours, device, clock)
        else:
            first, second = seconds(ours, device, clock), seconds(other, device, clock)
        times.append((first, second))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    return times[2:]


def peak_memory(bench: Bench) -> float:
    """This process's peak so far, in MiB: of the device's memory on a GPU, else of its own."""
    if bench.device.type == "cuda":
        return torch.cuda.max_memory_allocated(bench.device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        # Linux passes getrusage's maximum on to a child across exec, so a small child would report its parent's peak.
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def resident_memory() -> float:
    """What this process has now, in MiB; where that is not known, its peak so far."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read_text())[1]) / 2**10  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        bench = Bench(args.memory_of, args)
        for _ in range(3):
            bench.step()
        print(json.dumps({"peak": peak_memory(bench)}))
        return 0
    admin, stock = Bench("admin", args), Bench("post-ln", args)
    admin.forward()  # the first forward profiles
    rows = []
    steps = paired(admin.step, stock.step, args, "training step")
    rows.append(("step", "ms", [tuple(1000 * t for t in pair) for pair in steps]))
    passes = paired(admin.profile, admin.forward, args, "profiling pass")
    rows.append(("profile", "ms", [tuple(1000 * t for t in pair) for pair in passes]))
    del admin, stock
    peaks = []
    for method in COMPARED:
        print(f"\rpeak memory of {method} ", end="", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, *arguments, "--memory-of", method]
        own = {**os.environ, **BLOCKS_OF_THEIR_OWN}
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own).stdout
        peaks.append(json.loads(out.splitlines()[-1])["peak"])
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    rows.append(("memory", "MiB", [tuple(peaks)]))

    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    layers = f"{args.layers}L-{args.layers}L"
    print(f"{layers}, width {args.width}, FFN {args.ffn}, {args.tokens} tokens, {args.dtype}, {where}")
    names = {
        "step": "training step, Admin / stock Post-LN",
        "profile": "profiling pass / training forward",
        "memory": "peak memory, Admin / stock Post-LN",
    }
    print(f"{'':38} {'first':>9} {'second':>9}      {'ratio':>6}  {'(pairs from - to)':18} target")
    for name, unit, pairs in rows:
        ratios = sorted(first / second for first, second in pairs)
        first, second = (statistics.median(side) for side in zip(*pairs))
        spread = f"({ratios[0]:.3f} - {ratios[-1]:.3f})" if len(ratios) > 1 else ""
        ratio, target = statistics.median(ratios), TARGETS[name]
        verdict = "met" if ratio <= target else "missed"
        print(f"{names[name]:38} {first:9.1f} {second:9.1f} {unit:4} {ratio:6.3f}  {spread:18} {target:.2f} {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
