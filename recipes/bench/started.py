"""Steps of fast Admin in a process of its own, for settings that a process reads when it starts.

It prints the seconds of every step, for `timed`, which starts it:

    python recipes/bench/started.py 18:64:1024 --steps 3 --clock cpu      # layers, width, target tokens
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from recipes.bench.arguments import FORM, number, size  # noqa: E402
from recipes.bench.step import Run  # noqa: E402
from recipes.bench.turns import interleaved  # noqa: E402

SET = ("OMP_", "GOMP_", "MKL_", "MALLOC_", "GLIBC_TUNABLES")
"""How the names begin of all that a process is told of threads and memory."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def form(given: str) -> str:
    """A size, as it was given."""
    size(given)
    return given


def timed(given: str, steps: int, clock: str, setting: dict[str, str]) -> list[float]:
    """Seconds of every step, of a process that is told this and no more."""
    command = [sys.executable, __file__, given, "--steps", str(steps), "--clock", clock]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SET)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**environment, **setting})
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", type=form, help=FORM)
    parser.add_argument("--steps", type=number, required=True)
    parser.add_argument("--clock", choices=list(CLOCKS), required=True)
    parser.set_defaults(words=4000, length=32, device="cpu", dtype="float32")
    args = parser.parse_args(arguments)
    vars(args).update(size(args.size))
    logging.getLogger("fairseq_admin").setLevel(logging.WARNING)  # the first step profiles, and says so
    run = Run("admin", args)
    print(json.dumps(interleaved([run.step], args.steps, CLOCKS[args.clock], torch.device("cpu"))[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
