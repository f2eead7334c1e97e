"""The figures of docs/analysis.md: does each that is shown come from `make figures`, and with commands that parse?"""

from __future__ import annotations

import json
from pathlib import Path

from conftest import ROOT

from fairseq_admin import cli
from fairseq_admin.analysis import figure
from recipes.figures import analysis, together
from recipes.figures.draw import COLOURS


def test_every_figure_has_its_command(tmp_path: Path) -> None:
    """Of a demo that has been run, all of them; of none, those of fresh models."""
    folder = tmp_path / analysis.RUN
    fresh = analysis.figures(tmp_path)
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("average.pt", "checkpoints/checkpoint_3_900.pt", "checkpoints/checkpoint_10_1000.pt"):
        (folder / name).touch()
    found = analysis.figures(tmp_path)
    assert found["updates"][1:] == [str(folder / "checkpoints" / f"checkpoint_{n}.pt") for n in ("3_900", "10_1000")]
    assert set(found) - set(fresh) == {"dependency-trained", "omega", "updates"}
    drawn = {path.name for path in (ROOT / "docs" / "images").glob("analysis-*")}
    assert drawn == {f"analysis-{name}.png" for name in {*found, "output-change", "gradients"}}
    for arguments in (*found.values(), *analysis.gradients()):
        cli.parse(["analyze", *arguments, "--random-tokens", "-o", "x"])  # exits if it cannot


def test_output_changes_are_in_one_figure() -> None:
    """Has every scheme its points and theorem 2's, in its colour, and the law that fits, where one does?"""
    kept = [json.loads((ROOT / "docs" / f"output-change-{scheme}.json").read_text()) for scheme in analysis.KEPT]
    noise, update = together.output_changes(kept).axes
    for axes, series, laws in (
        (noise, "random perturbation", ["a + b N, R² 0.994", "a + b ln N, R² 0.987", "a + b ln N, R² 0.993"]),
        (update, "one update", ["neither law, R² at most 0.51", "a + b ln N, R² 0.998", "a + b ln N, R² 0.995"]),
    ):
        lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
        assert list(lines) == [f"{it['model']['title']}: {law}" for it, law in zip(kept, laws)]
        for it, line in zip(kept, lines.values()):
            assert line.get_ydata().tolist() == it["series"][series]["change"]
            assert line.get_color() == COLOURS[it["model"]["title"]]
        fitted = [line for line in axes.lines if len(line.get_xdata()) > 100]
        assert len(fitted) == sum(law[0] == "a" for law in laws)
    hollow = [line.get_ydata().tolist() for line in noise.lines if line.get_markerfacecolor() == "none"]
    assert hollow == [it["series"]["random perturbation"]["theorem 2"]["predicted"] for it in kept]


def test_a_schemes_colour_is_nothing_elses() -> None:
    """Is each colour that is given by place another one than the schemes', which every figure has from one table?"""
    assert figure.ALWAYS == {"admin": "#0072B2", "post-ln": "#D55E00", "pre-ln": "#009E73"}
    assert not set(figure.ALWAYS.values()) & {figure.style(number)["color"] for number in range(20)}
    assert [figure.colour(scheme) for scheme in ("pre-ln", "deepnorm", "")] == [COLOURS["Pre-LN"], "black", "black"]
