"""What `fairseq-admin average` costs next to a plain average of the same checkpoints: peak memory and wall time.

Checkpoints of one architecture are written to a temporary folder, then each side averages them in its own process,
imports included. The plain average works as fairseq's scripts/average_checkpoints.py does: each file loaded whole, the
sum in float32. Both find the files in the system's cache if they fit.

    python recipes/bench/average.py                      # 10 of 60L-12L: 11 GB of disk, 2 minutes on two CPU cores
    python recipes/bench/average.py --optimizer-state    # as training saves them, three times as large
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TARGETS = {"memory": 2.5, "time": 1.0}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--arch", default="transformer_admin_60l_12l")
    top.add_argument("--words", type=int, default=32000, help="size of the vocabulary; all embeddings are tied")
    top.add_argument("--number", type=int, default=10, help="checkpoints to average (default: 10)")
    top.add_argument("--optimizer-state", action="store_true", help="two more tensors per parameter in each file")
    top.add_argument("--folder", type=Path, help="where to put the temporary folder (default: the system's)")
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    top.add_argument("--as-child", choices=["make", "plain"], help=argparse.SUPPRESS)
    return top


def make(args: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoints; print how large one model is."""
    import torch
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

    import fairseq_admin  # noqa: F401  (registers transformer_admin)
    from recipes.bench.conditions import conditions

    options = argparse.Namespace(share_all_embeddings=True, update_freq=[1])
    options.admin_init, options.admin_profile_tokens, options.admin_max_skipped_updates = "log", 8192, 100
    ARCH_CONFIG_REGISTRY[args.arch](options)
    words = Dictionary()
    for word in range(args.words):
        words.add_symbol(f"w{word}")
    torch.manual_seed(1)
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(options, task)
    moments = {}
    if args.optimizer_state:
        for number, parameter in enumerate(model.parameters()):
            moments[number] = {"step": 1, "exp_avg": parameter.detach() * 0, "exp_avg_sq": parameter.detach() * 0}
    for number in range(1, args.number + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.001
        state = {"model": model.state_dict(), "optimizer_history": [{"num_updates": number}]}
        torch.save({**state, "last_optimizer_state": {"state": moments}}, folder / f"checkpoint{number}.pt")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    storages = {tensor.untyped_storage() for tensor in model.state_dict().values()}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    where = conditions(argparse.Namespace(device="cpu", clock="wall"))
    print(json.dumps({"bytes": sum(sizes.values()), "parameters": parameters, "where": where}))


def plain(folder: Path, output: Path) -> None:
    """The average as fairseq's script computes it."""
    import torch

    paths = sorted(folder.glob("checkpoint*.pt"), key=lambda path: int(path.stem[len("checkpoint") :]))
    total: dict[str, Any] = {}
    result = None
    for path in paths[::-1]:
        state = torch.load(path, map_location="cpu", weights_only=True)
        result = result or state
        for key, tensor in state["model"].items():
            tensor = tensor.float() if tensor.dtype == torch.float16 else tensor
            if key in total:
                total[key] += tensor
            else:
                total[key] = tensor.clone()
    for tensor in total.values():
        tensor.div_(len(paths))
    assert result is not None
    result["model"] = total
    torch.save(result, output)


def measured(*command: object) -> tuple[float, float]:
    """Peak memory in MiB and wall time in seconds of a process.

    Linux passes the maximum on from parent to child, so this process imports nothing large itself.
    """
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise SystemExit(f"{' '.join(map(str, command))}: ended with wait status {status}")
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parser().parse_args(arguments)
    if args.as_child == "make":
        make(args, args.folder)
        return 0
    if args.as_child == "plain":
        plain(args.folder, args.folder / "plain.pt")
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        print(f"\rwriting {args.number} checkpoints ", end="", file=sys.stderr, flush=True)
        child = [sys.executable, __file__, *arguments, "--folder", name, "--as-child"]
        out = subprocess.run([*child, "make"], check=True, stdout=subprocess.PIPE, text=True).stdout
        model = json.loads(out.splitlines()[-1])
        print("\raveraging plainly          ", end="", file=sys.stderr, flush=True)
        other = measured(*child[1:], "plain")
        print("\raveraging                  ", end="", file=sys.stderr, flush=True)
        ours = measured("-m", "fairseq_admin.cli", "average", folder, "--last", args.number, "-o", folder / "ours.pt")
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
        files = [(folder / f"{side}.pt").stat().st_size / 2**20 for side in ("ours", "plain")]

    one = model["bytes"] / 2**20
    state = "with" if args.optimizer_state else "without"
    print(f"{args.number} x {args.arch}, {model['parameters']} parameters, {state} optimizer state")
    print(f"{'':38} {'first':>9} {'second':>9}      {'ratio':>6}  target")
    rows: list[tuple[str, float, float, str, float | None]] = [
        ("peak memory, average / one model", ours[0], one, "MiB", TARGETS["memory"]),
        ("peak memory, average / plain average", ours[0], other[0], "MiB", None),
        ("wall time, average / plain average", ours[1], other[1], "s", TARGETS["time"]),
        ("size of the file, average / plain", files[0], files[1], "MiB", None),
    ]
    for name, first, second, unit, target in rows:
        verdict = "" if target is None else f"{target:.2f} {'met' if first / second <= target else 'missed'}"
        print(f"{name:38} {first:9.1f} {second:9.1f} {unit:4} {first / second:6.3f}  {verdict}".rstrip())
    if args.csv:
        from recipes.bench.conditions import keep

        sizes = {"arch": args.arch, "parameters": model["parameters"], "number": args.number, "optimizer_state": state}
        told = [dict(zip(("what", "first", "second", "unit"), row), ratio=row[1] / row[2]) for row in rows]
        keep(args.csv, {**sizes, **model["where"]}, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
