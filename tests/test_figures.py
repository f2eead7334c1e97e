"""The figures of the README and docs/: is what is drawn what was measured?"""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes

from recipes.figures import draw
from recipes.steps.logs import Log
from recipes.steps.summary import Run

LOSSES = {"Admin": {10: 9.0, 20: 0.17}, "Post-LN": {10: 9.5, 20: 6.3}, "Pre-LN": {10: 8.5, 20: 0.2}}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of every figure that is drawn, in place of its file."""
    found: list[Axes] = []
    monkeypatch.setattr(draw, "save", lambda figure, path: found.extend(figure.axes))
    yield found
    pyplot.close("all")


def test_loss(drawn: list[Axes]) -> None:
    """Does each method have a training line, validation dots and, in its colour and clear of others, a label?"""
    runs = []
    for name, valid in LOSSES.items():
        train = {updates: bits + 0.1 for updates, bits in valid.items()}
        runs.append(Run(name, Path(name), {"score": "99.56"}, Log(train, valid, 1, 20, 1.0, 0.1)))
    draw.draw_loss(runs, Path("loss.png"))
    (axes,) = drawn
    lines = iter(axes.get_lines())
    places = []
    for run, label in zip(runs, axes.texts):
        for curve, marker in ((run.log.train, "None"), (run.log.valid, draw.MARKERS[run.name])):
            line = next(lines)
            assert dict(zip(*line.get_data())) == curve
            assert (line.get_color(), line.get_marker()) == (draw.COLOURS[run.name], marker)
        end = LOSSES[run.name][20]
        assert label.get_text() == f"{run.name}\n{end:.2f} bits, BLEU 99.6"
        assert label.get_color() == draw.COLOURS[run.name]
        places.append(label.get_position()[1])
    assert next(lines, None) is None
    # The lowest at its value, the next one moved up, the third clear of both.
    assert places == pytest.approx([0.17, 6.3, 0.17 + 1.4])
