"""What pages of 2 MB save on a CPU: CPU time of a step of fast Admin, over that with pages of 4 kB.

An update takes and gives back hundreds of MB. glibc's malloc asks Linux for huge pages where a process is started with
glibc.malloc.hugetlb=1, which the recipes do (recipes/common.mk); processes of either kind run in turns.

    python recipes/bench/pages.py                                    # 18L-18L, widths 64, 256 and 512
    python recipes/bench/pages.py --sizes 6:512:4096 --pairs 3       # layers, width, target tokens
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.bench import started  # noqa: E402
from recipes.bench.arguments import FORM, number  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.turns import spread, summary  # noqa: E402

SIZES = ["18:64:1024", "18:256:1024", "18:512:1024"]
THREAD = {"OMP_NUM_THREADS": "1"}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def pair(given: str, steps: int) -> tuple[float, float]:
    """Median seconds of a step with small pages, and with huge ones."""
    small, huge = (started.timed(given, steps, "cpu", setting) for setting in (THREAD, {**THREAD, **HUGE}))
    return statistics.median(small), statistics.median(huge)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = f"{FORM} (default: {' '.join(SIZES)})"
    parser.add_argument("--sizes", nargs="+", type=started.form, default=SIZES, help=sizes)
    parser.add_argument("--pairs", type=number, default=5, help="processes of each kind (default: 5)")
    parser.add_argument("--steps", type=number, default=9, help="timed in a process (default: 9)")
    parser.add_argument("--csv", type=Path, help="file to write the rows to")
    parser.set_defaults(device="cpu", clock="cpu")
    args = parser.parse_args(arguments)
    where = {**conditions(args), "threads": 1}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print("seconds a step with small pages, and huge over small: median (lowest to highest)")
    rows = []
    for given in args.sizes:
        pairs = [pair(given, args.steps) for _ in range(args.pairs)]
        seconds = statistics.median(small for small, _ in pairs)
        ratios = [huge / small for small, huge in pairs]
        print(f"{given:<14} {seconds:.3f} {spread(ratios)}", flush=True)
        rows.append({"size": given, "seconds": seconds, **summary(ratios, "ratio"), "pairs": args.pairs})
    keep(args.csv, where, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
