"""The look of every figure. It stays legible when small, when printed, and for colour-blind readers.

matplotlib is imported only when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the measures write their annotations with these names too
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import FigureBase

# Okabe and Ito's colours, which the colour-blind can tell apart; for print, each line also has its own marker.
ALWAYS = {"admin": "#0072B2", "post-ln": "#D55E00", "pre-ln": "#009E73"}
"""The colours of schemes in every figure: blue, vermilion and bluish green. Nothing else uses them."""
COLOURS = ("#000000", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
VARIABLES = {
    "#000000": "var(--ink)", "#ffffff": "var(--paper)", "#808080": "var(--muted)", "#0072B2": "var(--blue)",
    "#D55E00": "var(--vermilion)", "#009E73": "var(--green)", "#CC79A7": "var(--pink)", "#E69F00": "var(--orange)",
    "#56B4E9": "var(--sky)",
}  # fmt: skip
"""The CSS variables that replace the colours in a page, which has other colours in its dark style."""
STACKS = {"encoder": {"linestyle": "-", "marker": "o"}, "decoder": {"linestyle": "--", "marker": "s"}}
"""Line styles of the stacks, in the colour of the scheme."""
SHADES = "cividis"
"""A colour map with even steps in grey and to the colour-blind."""
WIDTH = 7.2
"""The width of a figure in inches, about that on a page."""
DPI = 200
"""About twice a screen's."""

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
    """Make a figure and its panels. (pyplot would keep every figure in memory, so it is not used.)

    Args:
        count: number of panels in a row.
        height: height of the figure, in inches.
        rows: number of rows of panels.
        options: options of matplotlib's `subplots`.

    Returns:
        The figure, and its panels row by row.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH if count > 1 else WIDTH * 0.7, height), layout="constrained")
    return drawn, list(drawn.subplots(rows, count, squeeze=False, **options).flat)


def heat_map(axes: Axes, table: list[list[float]], low: float, **options: Any) -> Any:
    """Draw shares as colours on a logarithmic scale.

    Args:
        axes: the panel.
        table: the shares, row by row.
        low: lower end of the colour scale; smaller shares get the same colour as this one.
        options: options of matplotlib's `imshow`.

    Returns:
        The image, for a colour bar.
    """
    from matplotlib.colors import LogNorm

    return axes.imshow(table, cmap=SHADES, norm=LogNorm(low, 1, clip=True), **options)


def whole_numbers(*axes: Axis) -> None:
    """Put ticks at whole numbers only.

    Args:
        axes: the axes to change.
    """
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def colour(scheme: str) -> str:
    """The colour of a scheme.

    Args:
        scheme: the scheme's name.

    Returns:
        The scheme's colour, or black if it has none.
    """
    return ALWAYS.get(scheme, "black")


def style(number: int) -> dict[str, Any]:
    """Matplotlib's options for a line that does not stand for a scheme.

    Args:
        number: the line's index, from 0.

    Returns:
        The line's colour and marker.
    """
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def name_as_it_is(name: str) -> str:
    """Escape a name for a label: matplotlib reads $ as mathematics, and hides labels that begin with _.

    Args:
        name: the name of a file or folder.

    Returns:
        The label.
    """
    shown = name.encode("utf-8", "backslashreplace").decode("utf-8").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def plain_logarithmic(axes: Axes) -> None:
    """Make the y-axis logarithmic, with ticks 0.02, 0.05, 0.1 … even if it spans less than a power of ten.

    Args:
        axes: the panel.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def headline(drawn: FigureBase, title: str, result: dict[str, Any], with_depth: bool = True) -> None:
    """Set a title: the measure, the model and the number of tokens.

    Args:
        drawn: the figure.
        title: the measure.
        result: the measure's result.
        with_depth: whether the title names the depth. False for a figure that varies the depth.
    """
    model = result["model"]
    depth = "-".join(f"{model[f'{side}_layers']}L" for side in ("encoder", "decoder") if model[f"{side}_layers"])
    state = f"{model['updates']} updates" if model["updates"] else "at initialisation"
    words = "random words" if result.get("data") == "random tokens" else "text"
    source = f" ({result['tokens']} tokens of {words})" if "tokens" in result else ""
    name = f"{model['title']} {depth}" if with_depth else model["title"]
    set_title(drawn, f"{title}: {name}, width {model['width']}, {state}{source}")


def set_title(drawn: FigureBase, text: str) -> None:
    """Set the title above the panels, at the left.

    Args:
        drawn: the figure.
        text: the title.
    """
    drawn.suptitle(text, fontsize=9, x=0.01, ha="left")


def save(draw: Callable[[Any], Figure], result: Any, png: Path, svg: Path) -> None:
    """Draw a result as PNG, twice a page's width, and as SVG. The same numbers give the same bytes.

    Args:
        draw: makes the figure from the result.
        result: the result of a measure.
        png, svg: the files to write.
    """
    import matplotlib

    with matplotlib.rc_context(LOOK):
        drawn = draw(result)
        drawn.savefig(png, format="png", dpi=DPI)
        drawn.savefig(svg, format="svg", metadata={"Date": None})
    few_colours(png)


def svg(draw: Callable[[Any], Figure], result: Any) -> str:
    """Draw a result for a page. The CSS variables of VARIABLES replace its colours.

    Args:
        draw: makes the figure from the result.
        result: the result of a measure.

    Returns:
        The SVG.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({**LOOK, "svg.hashsalt": None}):  # drawings on one page need different ids
        draw(result).savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawing = text.getvalue()
    for colour, variable in VARIABLES.items():
        drawing = drawing.replace(colour.lower(), variable)
    return drawing[drawing.index("<svg") :]


def few_colours(png: Path) -> None:
    """Reduce a PNG to 256 colours: enough for a figure, and a third of the bytes.

    Args:
        png: the file, which is replaced.
    """
    from PIL import Image

    with Image.open(png) as image:
        few = image.convert("RGB").quantize(256)
    few.save(png, format="png", optimize=True)
