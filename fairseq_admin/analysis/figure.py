"""One look for every figure: legible when small and in print, and to the colour-blind. matplotlib is asked for last."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # also what the measures call them
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import FigureBase

# Okabe and Ito's, which the colour-blind can tell apart; each line has a marker of its own too, for print.
ALWAYS = {"admin": "#0072B2", "post-ln": "#D55E00", "pre-ln": "#009E73"}
"""The colours of schemes, in every figure: blue, vermilion and bluish green. Nothing else has them."""
COLOURS = ("#000000", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
VARIABLES = {
    "#000000": "var(--ink)", "#ffffff": "var(--paper)", "#808080": "var(--muted)", "#0072B2": "var(--blue)",
    "#D55E00": "var(--vermilion)", "#009E73": "var(--green)", "#CC79A7": "var(--pink)", "#E69F00": "var(--orange)",
    "#56B4E9": "var(--sky)",
}  # fmt: skip
"""What the colours of a figure are called in the style of a page, which has others in the dark."""
STACKS = {"encoder": {"linestyle": "-", "marker": "o"}, "decoder": {"linestyle": "--", "marker": "s"}}
"""How the lines of a stack are drawn, in the colour of its scheme."""
SHADES = "cividis"
"""Even steps in grey, and the same to the colour-blind."""
WIDTH = 7.2
"""Of a figure, in inches; a page shows it about that wide."""
DPI = 200
"""About twice what a screen shows."""

LOOK: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fairseq_admin",
}


def panels(count: int, height: float = 3.2, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of some panels next to each other, in rows. (Not pyplot's, which keeps every figure.)"""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH if count > 1 else WIDTH * 0.7, height), layout="constrained")
    return drawn, list(drawn.subplots(rows, count, squeeze=False, **options).flat)


def heat_map(axes: Axes, table: list[list[float]], low: float, **options: Any) -> Any:
    """Shares from `low` to 1 as colours on a logarithmic scale; what is lower has the lowest one's."""
    from matplotlib.colors import LogNorm

    return axes.imshow(table, cmap=SHADES, norm=LogNorm(low, 1, clip=True), **options)


def whole_numbers(*axes: Axis) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def colour(scheme: str) -> str:
    """A scheme's own, or black."""
    return ALWAYS.get(scheme, "black")


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a figure's line of that number, where lines are not schemes."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def name_as_it_is(name: str) -> str:
    """A file's name as a label: matplotlib reads $ as mathematics, and leaves out of legends what begins with _."""
    shown = name.encode("utf-8", "backslashreplace").decode("utf-8").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def plain_logarithmic(axes: Axes) -> None:
    """A logarithmic y-axis with 0.02, 0.05, 0.1 … as its numbers, also where it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def headline(drawn: FigureBase, title: str, result: dict[str, Any], with_depth: bool = True) -> None:
    """Above the panels: what is shown, of which model, and over how many tokens; without depth where that varies."""
    model = result["model"]
    depth = "-".join(f"{model[f'{side}_layers']}L" for side in ("encoder", "decoder") if model[f"{side}_layers"])
    state = f"{model['updates']} updates" if model["updates"] else "at initialisation"
    words = "random words" if result.get("data") == "random tokens" else "text"
    source = f" ({result['tokens']} tokens of {words})" if "tokens" in result else ""
    name = f"{model['title']} {depth}" if with_depth else model["title"]
    set_title(drawn, f"{title}: {name}, width {model['width']}, {state}{source}")


def set_title(drawn: FigureBase, text: str) -> None:
    """Set the title above the panels, at the left."""
    drawn.suptitle(text, fontsize=9, x=0.01, ha="left")


def save(draw: Callable[[Any], Figure], result: Any, png: Path, svg: Path) -> None:
    """Draw a result, or several, in this look: a PNG of twice a page's width, and SVG; same numbers, same bytes."""
    import matplotlib

    with matplotlib.rc_context(LOOK):
        drawn = draw(result)
        drawn.savefig(png, format="png", dpi=DPI)
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    few_colours(png)


def svg(draw: Callable[[Any], Figure], result: Any) -> str:
    """The drawing for a page, in the colours of the page's style, whose variables VARIABLES names."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({**LOOK, "svg.hashsalt": None}):  # other names in every drawing of a page
        draw(result).savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawing = text.getvalue()
    for colour, variable in VARIABLES.items():
        drawing = drawing.replace(colour.lower(), variable)
    return drawing[drawing.index("<svg") :]


def few_colours(png: Path) -> None:
    """Write a PNG again with 256 colours, which are enough for a figure, and a third of the bytes."""
    from PIL import Image

    with Image.open(png) as image:
        few = image.convert("RGB").quantize(256)
    few.save(png, format="png", optimize=True)
