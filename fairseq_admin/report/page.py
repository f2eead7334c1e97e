"""The page: one file with its style and figures, without scripts or requests to the network."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from ..analysis import dependency, figure, omega, output_change
from ..errors import AdminError, line
from ..packages import need
from ..version import __version__
from . import curves, tables
from .run import Run

HERE = Path(__file__).parent


Picture = tuple[str, str, int | None]
"""A figure as SVG, its caption, and the index of its run. None: the figure shows all runs."""


def render(runs: list[Run]) -> str:
    """Render the page.

    Args:
        runs: the runs to show.

    Returns:
        HTML.

    Raises:
        AdminError: a package is missing, or a file in analysis/ is not from `fairseq-admin analyze`.
    """
    jinja2, _ = need("jinja2"), need("matplotlib")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = _colours(runs)
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        colours=[figure.VARIABLES[colour] for colour in colours],
        pictures=_pictures(runs, colours),
        tables=tables,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        made=date.today().isoformat(),
        version=__version__,
    )


def _colours(runs: list[Run]) -> list[str]:
    """A colour for each run.

    The first run of a scheme gets the scheme's own colour, if it has one. Every other run gets one of COLOURS.
    """
    colours: list[str] = []
    for number, run in enumerate(runs):
        colour = figure.ALWAYS.get(run.model.get("scheme", ""))
        colours.append(colour if colour and colour not in colours else figure.COLOURS[number % len(figure.COLOURS)])
    return colours


def _pictures(runs: list[Run], colours: list[str]) -> dict[str, list[Picture]]:
    """The figures, by part of the page."""
    logs = {run.name: run.log for run in runs if run.log}
    looks = {
        run.name: {"color": colour, "marker": figure.MARKERS[number % len(figure.MARKERS)], "gid": f"run-{number}"}
        for number, (run, colour) in enumerate(zip(runs, colours))
    }
    pictures: dict[str, list[Picture]] = {"curves": [], "omega": [], "dependency": [], "output-change": []}
    if logs:
        svg = figure.svg(lambda result: curves.draw(result, looks), logs)
        pictures["curves"].append((svg, "", None))
    for number, run in enumerate(runs):
        if run.omega:
            svg = figure.svg(omega.draw, {"model": run.model, "stacks": run.omega})
            pictures["omega"].append((svg, run.name, number))
        for what, measure in (("dependency", dependency), ("output-change", output_change)):
            for result in run.analyses.get(what, []):
                try:
                    svg = figure.svg(measure.draw, result)
                    pictures[what].append((svg, f"{run.name}; seed {result.get('seed')}.", number))
                except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                    raise AdminError(
                        f"{run.folder}/analysis holds {what} that cannot be shown ({type(error).__name__}: "
                        f"{line(error)}). Make it again with fairseq-admin analyze {what}, or move it away."
                    ) from None
    return pictures
