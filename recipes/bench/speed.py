"""One table of what a step costs: stock Post-LN and Pre-LN, Admin plain, Admin fast (`--admin-fast`).

Steps (forward, loss, backward, optimizer) of the four run in turns; a turn gives one ratio to stock Post-LN, and the
median counts. Stock has fairseq's loss and Adam, Admin plain fairseq's loss and torch's RAdam, and Admin fast has its
own of both. Next to the time: what torch dispatches in forward, loss and backward (views and empty tensors not
counted), how often the host would wait for a GPU, and the bytes that autograd keeps.

    python recipes/bench/speed.py                              # 18L-18L at widths 16, 256 and 512
    QUICK=1 python recipes/bench/speed.py                      # two minutes
    python recipes/bench/speed.py --csv speed.csv --json speed.json
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import step  # noqa: E402
import torch  # noqa: E402
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss  # noqa: E402
from fairseq.optim.adam import Adam  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fairseq_admin.fast.loss import smoothed_loss  # noqa: E402
from fairseq_admin.radam import RAdam  # noqa: E402

METHODS = ("post-ln", "pre-ln", "admin-plain", "admin")
"""As step.py names them; the first is what the others are compared with."""
PADDING = 1
UNCOUNTED = set(
    "view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze squeeze as_strided "
    "detach alias split split_with_sizes unbind chunk narrow empty empty_like empty_strided new_empty "
    "new_empty_strided lift_fresh _local_scalar_dense".split()
)


class Operations(TorchDispatchMode):
    """Counts what computes, and the questions to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        self.number += name not in UNCOUNTED
        # Of bool: fairseq asks positions for integers, of tensors that are on the CPU always.
        self.waits += name == "_local_scalar_dense" and args[0].dtype == torch.bool
        return function(*args, **(kwargs or {}))


class Run(step.Bench):
    """One model with the loss and the optimizer that are its own, and a fixed batch."""

    def __init__(self, method: str, args: Namespace) -> None:
        super().__init__(method, args)
        params = list(self.model.parameters())
        if method.startswith("admin"):
            self.rule: Any = RAdam(params, lr=1e-5, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
            self.rule.fused = method == "admin"
        else:
            self.rule = Adam(params, lr=1e-5, betas=(0.9, 0.98))
        self.fast = method == "admin"

    def loss(self, logits: Tensor) -> Tensor:
        logits, target = logits.flatten(0, 1), self.target.flatten()
        if self.fast:
            return smoothed_loss(logits, target, 0.1, PADDING)[0]
        lprobs = torch.nn.functional.log_softmax(logits, 1, dtype=torch.float32)
        return label_smoothed_nll_loss(lprobs, target, 0.1, ignore_index=PADDING)[0]

    def forward_backward(self) -> None:
        self.loss(self.forward()).backward()

    def step(self) -> None:
        self.forward_backward()
        self.rule.step()
        self.model.zero_grad(set_to_none=True)

    def loss_alone(self) -> None:
        """The projection to words, the loss, and both backwards."""
        features = torch.ones(*self.target.shape, self.model.decoder.output_embed_dim, requires_grad=True)
        self.loss(self.model.decoder.output_layer(features.to(self.device))).backward()
        self.model.zero_grad(set_to_none=True)

    def counts(self) -> dict[str, float]:
        """Operations, waits and MiB kept, of one forward, loss and backward."""
        kept: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with Operations() as operations:
            self.forward_backward()
        self.model.zero_grad(set_to_none=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss(self.forward())
        return {"operations": operations.number, "waits": operations.waits, "kept_mib": sum(kept.values()) / 2**20}


def interleaved(actions: list[Callable[[], object]], rounds: int, clock: Callable, device: torch.device) -> list[list]:
    """Seconds of every action in every round, the order turned round from one to the next; the first is warm-up."""
    times: list[list[float]] = [[] for _ in actions]
    for turn in range(rounds + 1):
        order = range(len(actions)) if turn % 2 else reversed(range(len(actions)))
        for i in order:
            seconds = step.seconds(actions[i], device, clock)
            if turn:
                times[i].append(seconds)
    return times


def peak_of(method: str, args: Namespace) -> float:
    """MiB at most, in a process of its own that makes three steps."""
    names = ("layers", "width", "ffn", "heads", "words", "tokens", "length", "device", "dtype")
    sizes = [f"--{name}={getattr(args, name)}" for name in names]
    command = [sys.executable, __file__, *sizes, "--memory-of", method]
    own = {**os.environ, **step.BLOCKS_OF_THEIR_OWN}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own).stdout
    return json.loads(out.splitlines()[-1])["peak"]


def rows_of(args: Namespace) -> list[dict[str, Any]]:
    """A row for each method at one size."""
    runs = [Run(method, args) for method in METHODS]
    device, clock = torch.device(args.device), time.process_time if args.clock == "cpu" else time.perf_counter
    steps = interleaved([run.step for run in runs], args.pairs, clock, device)
    for run in runs:
        run.forward_backward()  # gradients for the optimizer
    rules = interleaved([run.rule.step for run in runs], args.pairs, clock, device)
    losses = interleaved([run.loss_alone for run in runs], args.pairs, clock, device)
    result = []
    for method, run, times, rule, loss in zip(METHODS, runs, steps, rules, losses):
        ratios = sorted(ours / stock for ours, stock in zip(times, steps[0]))
        result.append(
            {
                "method": method,
                "layers": args.layers,
                "width": args.width,
                "tokens": args.tokens,
                "dtype": args.dtype,
                "step_ms": 1000 * statistics.median(times),
                "ratio": statistics.median(ratios),
                "ratio_low": ratios[0],
                "ratio_high": ratios[-1],
                "tokens_per_s": args.tokens / statistics.median(times),
                "optimizer_ms": 1000 * statistics.median(rule),
                "loss_ms": 1000 * statistics.median(loss),
                **run.counts(),
                "peak_mib": peak_of(method, args),
            }
        )
    return result


def conditions(args: Namespace) -> dict[str, Any]:
    """Where and with what: hardware, versions, commit."""
    root = Path(__file__).resolve().parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, stdout=subprocess.PIPE, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = [line.split(": ")[1] for line in lines if "model name" in line]
    return {
        "commit": commit,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else (cpu or [platform.machine()])[0],
        "threads": torch.get_num_threads(),
        "clock": args.clock,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


COLUMNS = {
    "width": (6, "d"),
    "method": (12, "s"),
    "step_ms": (9, ".1f"),
    "ratio": (6, ".3f"),
    "ratio_low": (9, ".3f"),
    "ratio_high": (10, ".3f"),
    "tokens_per_s": (12, ".0f"),
    "operations": (10, "d"),
    "waits": (5, "d"),
    "kept_mib": (8, ".1f"),
    "peak_mib": (8, ".0f"),
    "optimizer_ms": (12, ".1f"),
    "loss_ms": (7, ".1f"),
}
"""What is printed, its width and form; --csv and --json have more."""


def main(arguments: list[str] | None = None) -> int:
    top = argparse.ArgumentParser(parents=[step.parser()], add_help=False, conflict_handler="resolve")
    top.add_argument("--widths", type=int, nargs="+", default=[16, 256, 512])
    top.add_argument("--csv", type=Path)
    top.add_argument("--json", type=Path)
    args = top.parse_args(arguments)
    quick = os.environ.get("QUICK", "0") not in ("", "0")
    if quick:
        args.widths, args.layers, args.pairs = [16, 256], 6, 3
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.memory_of:
        run = Run(args.memory_of, args)
        for _ in range(3):
            run.step()
        print(json.dumps({"peak": step.peak_memory(run)}))
        return 0
    rows = []
    for width in args.widths:
        # Heads of 64 channels; at width 16, where only dispatch counts, of 8.
        tokens = min(args.tokens, 512) if width < 64 else args.tokens
        sizes = {"width": width, "ffn": 4 * width, "heads": max(2, width // 64), "tokens": tokens}
        rows += rows_of(Namespace(**{**vars(args), **sizes}))
    where = conditions(args)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(" ".join(f"{name:>{size}}" for name, (size, _) in COLUMNS.items()))
    for row in rows:
        print(" ".join(f"{row[name]:>{size}{form}}" for name, (size, form) in COLUMNS.items()))
    if args.csv:
        with open(args.csv, "w", newline="") as out:
            writer = csv.DictWriter(out, [*rows[0], *where])
            writer.writeheader()
            writer.writerows({**row, **where} for row in rows)
    if args.json:
        args.json.write_text(json.dumps({"conditions": where, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
