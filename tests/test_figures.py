"""The figures of the README and docs/: do they show the measurements?"""

from __future__ import annotations

import json

from conftest import ROOT

from fairseq_admin.analysis import figure
from recipes.figures import docs
from recipes.figures.drawing import ALWAYS
from recipes.steps.results import as_cell


def test_loss() -> None:
    """Does each run have its validation losses, its method's colour, and a legend entry?"""
    curves = {"admin": {10: 9.0, 20: 0.17}, "post-ln": {10: 9.5, 20: 6.3}, "pre-ln": {10: 8.5, 20: 0.2}}
    rules = {"admin": "constant"}
    rows = [
        {"method": name, "rule": rules.get(name, ""), "valid": as_cell(curve), "score": "99.56"}
        for name, curve in curves.items()
    ]
    (axes,) = docs.draw_losses(rows).axes
    assert [(line.get_label(), line.get_linestyle()) for line in axes.lines] == [
        ("Post-LN: 6.30 bits, BLEU 99.6", "-"),
        ("Pre-LN: 0.20 bits, BLEU 99.6", "-"),
        ("Admin, constant: 0.17 bits, BLEU 99.6", "--"),
    ]
    lines = {line.get_color(): dict(zip(*line.get_data())) for line in axes.lines}
    assert lines == {ALWAYS[name]: curve for name, curve in curves.items()}


def test_output_changes_are_in_one_figure() -> None:
    """Does every scheme have its points and theorem 2's, in its colour, with the law that fits better?"""
    kept = [json.loads((ROOT / f"docs/rows/output-change-{scheme}.json").read_text()) for scheme in ALWAYS]
    noise, update = docs.draw_output_changes(kept).axes
    for axes, series, laws in (
        (noise, "random perturbation", ["a + b ln N, R² 0.993", "a + b N, R² 0.994", "a + b ln N, R² 0.987"]),
        (update, "one update", ["a + b ln N, R² 0.995", "a + b ln N, R² 0.507", "a + b ln N, R² 0.998"]),
    ):
        lines = {line.get_label(): line for line in axes.lines if line.get_label()[0] != "_"}
        assert list(lines) == [f"{it['model']['title']}: {law}" for it, law in zip(kept, laws)]
        for it, line in zip(kept, lines.values()):
            assert line.get_ydata().tolist() == it["series"][series]["change"]
            assert line.get_color() == ALWAYS[it["model"]["scheme"]]
    hollow = [line.get_ydata().tolist() for line in noise.lines if line.get_markerfacecolor() == "none"]
    assert hollow == [it["series"]["random perturbation"]["theorem 2"]["predicted"] for it in kept]


def test_a_schemes_colour_is_nothing_elses() -> None:
    """Do colours assigned by position differ from the schemes' colours, which come from one table?"""
    assert figure.ALWAYS == {"admin": "#0072B2", "post-ln": "#D55E00", "pre-ln": "#009E73"}
    assert not set(figure.ALWAYS.values()) & {figure.style(number)["color"] for number in range(20)}
