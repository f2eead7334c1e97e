"""The figures of the README and docs/: do they show the measurements?"""

from __future__ import annotations

from fairseq_admin.analysis import figure
from recipes.research import figures
from recipes.research.drawing import ALWAYS
from recipes.steps.results import as_cell


def test_loss() -> None:
    """Does each run have its method's colour and a legend entry, and another rule of ω a dashed line?"""
    curves = {"admin": {10: 9.0, 20: 0.17}, "post-ln": {10: 9.5, 20: 6.3}, "pre-ln": {10: 8.5, 20: 0.2}}
    rules = {"admin": "constant"}
    rows = [
        {"method": name, "rule": rules.get(name, ""), "valid": as_cell(curve), "score": "99.56"}
        for name, curve in curves.items()
    ]
    (axes,) = figures.draw_results(rows, 6.0).axes
    drawn = [line for line in axes.lines if line.get_linewidth() == 1.6]
    assert [(line.get_label(), line.get_linestyle()) for line in drawn] == [
        ("Post-LN: 6.30 bits, BLEU 99.6", "-"),
        ("Pre-LN: 0.20 bits, BLEU 99.6", "-"),
        ("Admin, constant: 0.17 bits, BLEU 99.6", "--"),
    ]
    assert [line.get_color() for line in drawn] == [ALWAYS[name] for name in ("post-ln", "pre-ln", "admin")]


def test_a_schemes_colour_is_nothing_elses() -> None:
    """Do colours assigned by position differ from the schemes' colours, which come from one table?"""
    assert not set(figure.ALWAYS.values()) & {figure.style(number)["color"] for number in range(20)}
