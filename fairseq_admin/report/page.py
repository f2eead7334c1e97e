"""The page: one file with its script, its style and its data in it, which asks the network for nothing.

The scripts are let run by their checksums alone, so no text that a run holds can be one; the charts' expressions are
interpreted, as the page may compile none.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import AdminError
from ..errors import line as first_line
from ..version import __version__
from . import charts, runs, tables
from .runs import Run

HERE = Path(__file__).parent


def _libraries() -> tuple[ModuleType, ModuleType]:
    """Jinja2, and the package that Vega-Lite comes in.

    Raises:
        AdminError: one is not installed.
    """
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise AdminError(
            f"{error.name}, which the report is made with, is not installed. Run pip install jinja2 vl-convert-python."
        ) from None
    return jinja2, vl_convert


def render(found: list[Run]) -> str:
    """The page of these runs, as HTML.

    Raises:
        AdminError: a package is missing, or an analysis is not what `fairseq-admin analyze` writes.
    """
    jinja2, vl_convert = _libraries()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    scripts = [vl_convert.javascript_bundle(), (HERE / "page.js").read_text(encoding="utf-8")]
    assert not any("</script" in text or "<!--" in text for text in scripts)
    specs: dict[str, charts.Spec] = {}
    return environment.get_template("page.html.jinja").render(
        runs=found,
        colours=[charts.colour(number) for number in range(len(found))],
        parts={name: value for name, value in vars(runs).items() if isinstance(value, str) and name.isupper()},
        sections=_sections(found, specs),
        specs=specs,
        tables=tables,
        scripts=[jinja2.utils.markupsafe.Markup(text) for text in scripts],
        hashes=[base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts],
        style=jinja2.utils.markupsafe.Markup((HERE / "page.css").read_text(encoding="utf-8")),
        made=date.today().isoformat(),
        version=__version__,
    )


def _sections(found: list[Run], specs: dict[str, charts.Spec]) -> dict[str, list[dict[str, Any]]]:
    """The figures by part, each {id, title, caption}; their specifications go into `specs`."""
    sections: dict[str, list[dict[str, Any]]] = {part: [] for part in ("curves", "omega", "dependency", "change")}

    def add(part: str, spec: charts.Spec | None, title: str, caption: str, run: int | None = None) -> None:
        if spec is not None:
            name = f"chart-{len(specs) + 1}"
            specs[name] = spec
            sections[part].append({"id": name, "title": title, "caption": caption, "run": run})

    add(
        *("curves", charts.curves(found, "train"), "Training"),
        "Perplexity of the training batches, without label smoothing; a point is the mean of an interval of the log. "
        "Lower is better; the scale is logarithmic.",
    )
    add(
        *("curves", charts.curves(found, "valid"), "Validation"),
        "Perplexity of the validation set, each time it was computed. Lower is better; the scale is logarithmic.",
    )
    for stack, title in (("encoder", "Encoder"), ("more", "New layers"), ("decoder", "Decoder")):
        add(
            *("omega", charts.omega(found, stack), title),
            "Line: mean of ω over the channels. Band: smallest to largest. Dashed: the mean before training.",
        )
    for number, run in enumerate(found):
        for record in run.analyses.get(runs.DEPENDENCY, []):
            for stack, it in _part(run, record, "stacks").items():
                with _as_written(run, record):
                    error = f" Largest |Σβ² − 1| of a row: {it['error']:.2g}." if "error" in it else ""
                    caption = f"{run.name}. {_measured(record)}{error}"
                    spec = charts.dependency(it["beta"], stack)
                    add("dependency", spec, f"{charts.title_of(record)}: {stack}", caption, number)
    fits: dict[str, list[str]] = {}
    for run in found:
        for record in run.analyses.get(runs.CHANGE, []):
            for series, it in _part(run, record, "series").items():
                with _as_written(run, record):
                    charts.points(record, series)  # refused here, where it is known whose they are
                    said = ", ".join(f"{fit} {values['r2']:.4f}" for fit, values in it.get("fits", {}).items())
                    where = f"the {record['stack']}, " if record.get("stack") else ""
                    line = f"{run.name}: {where}{_measured(record)} R² of the fits: {said}."
                    fits.setdefault(series, []).append(line)
    for series, lines in fits.items():
        add("change", charts.change(found, series), series.capitalize(), " ".join(lines))
    return sections


@contextlib.contextmanager
def _as_written(run: Run, record: dict[str, Any]) -> Iterator[None]:
    """A block that shows an analysis, whose file somebody may have edited.

    Raises:
        AdminError: it is not what `fairseq-admin analyze` writes.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = record.get("what")
        raise AdminError(
            f"{run.folder}/analysis holds {what} that cannot be shown ({type(error).__name__}: {first_line(error)}); "
            f"expected what fairseq-admin analyze {what} writes. Make it again, or move it away."
        ) from None


def _part(run: Run, record: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(record.get(key), dict):
        what = record.get("what")
        raise AdminError(
            f"{run.folder}/analysis holds {what} without {key}; expected what fairseq-admin analyze {what} writes. "
            "Make it again, or move it away."
        )
    return record[key]


def _measured(record: dict[str, Any]) -> str:
    tokens = record.get("tokens")
    return f"{tokens:,} tokens, seed {record.get('seed')}." if isinstance(tokens, int) else ""
