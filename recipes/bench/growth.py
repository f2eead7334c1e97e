"""How fast a step's time grows with depth and with tokens: the exponent a of time = c · size^a, by least squares."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any


def exponent(sizes: list[float], times: list[float]) -> float:
    """The slope of log time over log size; there are at least two sizes that differ."""
    xs, ys = [math.log(it) for it in sizes], [math.log(it) for it in times]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys)) / sum((a - x) ** 2 for a in xs)


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every method, in depth (the layers of both stacks) and in tokens, where all else is equal."""
    found = []
    for along, fixed in (("depth", "tokens"), ("tokens", "depth")):
        series = defaultdict(list)
        for row in rows:
            whole = {**row, "depth": row["layers"] + row["decoder_layers"]}
            series[row["method"], row["width"], whole[fixed]].append((whole[along], row["step_ms"]))
        for (method, width, value), points in series.items():
            sizes, times = zip(*sorted(points))
            if len(set(sizes)) > 1:
                found.append(
                    {
                        "method": method,
                        "width": width,
                        fixed: value,
                        "along": along,
                        "from": sizes[0],
                        "to": sizes[-1],
                        "exponent": exponent(list(sizes), list(times)),
                    }
                )
    return found
