"""The report's charts, as Vega-Lite specifications.

Colours are variables of the page's style, so that one drawing is right in light, dark and print. A run keeps its
colour, dash and shape in every chart; the parameter `shown` holds the names of the runs that are switched on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..analysis.curves import perplexity
from .runs import CHANGE, Run

Spec = dict[str, Any]
POINTS = 400
"""So many points of a curve are drawn at most; more are averaged."""
CELLS = 72
"""A heat map has so many rows at most; more are averaged."""
COLOURS = 7
DASHES = ([1, 0], [7, 3], [2, 2], [7, 2, 2, 2])
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-right")
TITLES = {"self_attn": "self-attention", "encoder_attn": "encoder attention", "ffn": "feed-forward"}


def colour(number: int) -> str:
    """A run's, by its place."""
    return f"var(--run-{number % COLOURS + 1})"


def rounded(value: float) -> float | None:
    """Five digits of a number; None of one that JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def thinned(curve: dict[int, float]) -> Iterable[tuple[int, float]]:
    """The curve, or means of as many neighbours as it takes to have at most POINTS, at the last one's update."""
    step = -(-len(curve) // POINTS) or 1
    points = list(curve.items())
    for start in range(0, len(points), step):
        some = points[start : start + step]
        yield some[-1][0], sum(bits for _, bits in some) / len(some)


def ticks(values: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten between the smallest and the largest value; powers of ten alone if far apart."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    steps = (1, 2, 5) if high < 1e4 * low else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**exponent for exponent in exponents for step in steps if low <= step * 10.0**exponent <= high]


def curves(runs: list[Run], tag: str) -> Spec | None:
    """Perplexity against updates, of training ("train") or validation ("valid"); None without a curve."""
    rows: list[dict[str, Any]] = [
        {"run": run.name, "update": update, "perplexity": rounded(perplexity(bits))}
        for run in runs
        if run.log
        for update, bits in thinned(getattr(run.log, tag))
    ]
    if not rows:
        return None
    values = [row["perplexity"] for row in rows if row["perplexity"] is not None]
    y = {
        "field": "perplexity", "type": "quantitative", "scale": {"type": "log", "nice": False},
        "axis": {"title": "perplexity", "format": "~s", "values": ticks(values), "labelOverlap": True},
    }  # fmt: skip
    x = {"field": "update", "type": "quantitative", "axis": {"title": "updates", "format": "~s", "tickCount": 5}}
    return _lines(runs, rows, x, y, points=tag == "valid")


def omega(runs: list[Run], stack: str) -> Spec | None:
    """ω by sub-layer of a stack: mean, range over the channels, and dashed the mean before training."""
    rows = [
        {"run": run.name, "sub-layer": number, "layer": it["layer"], "kind": TITLES.get(it["kind"], it["kind"])}
        | {("ω" if name == "mean" else name): rounded(it[name]) for name in ("min", "mean", "max", "profiled")}
        for run in runs
        for number, it in enumerate(run.omega.get(stack, []), 1)
    ]
    if not rows:
        return None
    x = {
        "field": "sub-layer", "type": "quantitative", "scale": {"zero": False, "nice": False, "padding": 4},
        "axis": {"title": f"sub-layer of the {stack}", "tickMinStep": 1},
    }  # fmt: skip
    y = {"field": "ω", "type": "quantitative", "axis": {"title": "ω"}, "scale": {"zero": True}}
    spec = _lines(runs, rows, x, y, points=False)
    low, high = {**y, "field": "min"}, {"field": "max"}
    band = {"mark": {"type": "area", "opacity": 0.2}, "encoding": {"y": low, "y2": high}}
    before = {
        "mark": {"type": "line", "strokeDash": [3, 3], "strokeWidth": 1.2},
        "encoding": {"y": {**y, "field": "profiled"}},
    }
    spec["layer"] = [band, before, *spec["layer"]]
    return spec


def change(runs: list[Run], series: str) -> Spec:
    """The change of the output against depth, a line a run that has this series."""
    rows = [
        {"run": run.name, "of": title_of(record), "layers": depth, "change": value}
        for run in runs
        for record in run.analyses.get(CHANGE, [])
        for depth, value in points(record, series)
    ]
    x = {"field": "layers", "type": "quantitative", "axis": {"title": "layers N", "tickMinStep": 1}}
    x["scale"] = {"zero": False, "nice": False, "padding": 6}
    y = {"field": "change", "type": "quantitative", "axis": {"title": "|F(x, W) − F(x, W*)|²", "format": "~g"}}
    spec = _lines(runs, rows, x, y, points=True)
    spec["encoding"]["detail"] = {"field": "of", "type": "nominal"}
    return spec


def points(record: dict[str, Any], series: str) -> list[tuple[int, float | None]]:
    """Depths and changes of a series of an analysis; none if it has no such series."""
    found = record["series"].get(series, {})
    return [(int(depth), rounded(value)) for depth, value in zip(found.get("depths", []), found.get("change", []))]


def title_of(record: dict[str, Any]) -> str:
    """What an analysis is of: its scheme, and how far that was trained."""
    model = record.get("model") or {}
    name = str(model.get("title") or model.get("scheme") or model.get("name") or "model")
    updates = model.get("updates")
    return name if updates is None else f"{name}, {f'{updates:,} updates' if updates else 'at the start'}"


def dependency(beta: list[list[float]], stack: str) -> Spec:
    """β²_{i,j} as a heat map, rows i downwards; of a deep stack the means of square blocks.

    Args:
        beta: row i holds β_{i,0} to β_{i,i}.
    """
    size = -(-len(beta) // CELLS) or 1
    blocks: dict[tuple[int, int], list[float]] = {}
    for i, row in enumerate(beta):
        for j, value in enumerate(row):
            if math.isfinite(value):
                blocks.setdefault((i // size, j // size), []).append(value**2)
    rows = [
        {"i": i * size, "j": j * size, "i2": (i + 1) * size, "j2": (j + 1) * size, "share": rounded(sum(it) / len(it))}
        for (i, j), it in blocks.items()
    ]
    scale = {"domain": [0, len(beta)], "nice": False, "zero": False}
    axis = {"grid": False, "tickMinStep": 1}
    x_axis, y_axis = {**axis, "title": "branch j (0: the input)"}, {**axis, "title": f"sub-layer i of the {stack}"}
    return {
        **_frame(rows, height=400),
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "j", "type": "quantitative", "scale": scale, "axis": x_axis},
            "x2": {"field": "j2"},
            "y": {"field": "i", "type": "quantitative", "scale": {**scale, "reverse": True}, "axis": y_axis},
            "y2": {"field": "i2"},
            "color": {
                "field": "share", "type": "quantitative",
                "scale": {"type": "log", "domain": [1e-3, 1], "clamp": True, "scheme": "cividis"},
                "legend": {"orient": "top", "title": "β²", "gradientLength": 180, "values": [0.001, 0.01, 0.1, 1]},
            },
            "tooltip": [{"field": "i"}, {"field": "j"}, {"field": "share", "title": "β²", "format": ".3g"}],
        },
    }  # fmt: skip


def _frame(rows: list[dict[str, Any]], height: int = 280) -> Spec:
    return {
        "data": {"values": rows},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": None,
    }


def _lines(runs: list[Run], rows: list[dict], x: Spec, y: Spec, points: bool) -> Spec:
    """A line a run, and the nearest point under the pointer marked and told."""
    names = [run.name for run in runs]

    def by_run(values: list) -> Spec:
        return {"field": "run", "type": "nominal", "legend": None, "scale": {"domain": names, "range": values}}

    near = {"name": "near", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
    marked = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 1 if points else 0}
    return {
        **_frame(rows),
        "params": [{"name": "shown", "value": names}],
        "transform": [{"filter": "indexof(shown, datum.run) >= 0"}],
        "encoding": {"x": x, "color": by_run([colour(number) for number in range(len(runs))])},
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {
                    "y": y,
                    "strokeDash": by_run([DASHES[place // COLOURS % len(DASHES)] for place in range(len(runs))]),
                },
            },
            {
                # A tooltip of the encoding's fields would miss those that are no numbers, under "nearest".
                "mark": {"type": "point", "filled": True, "size": 55, "tooltip": {"content": "data"}},
                "params": [near],
                "encoding": {
                    "y": y,
                    "opacity": marked,
                    "shape": by_run([SHAPES[place % len(SHAPES)] for place in range(len(runs))]),
                },
            },
        ],
    }
