"""The variance of Adam's and RAdam's steps: against an integral, against draws, and as the figure shows it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from fairseq_admin import cli
from fairseq_admin.analysis import variance
from fairseq_admin.analysis.variance import FIRST, drawn, measure, variance_of_rate


@pytest.mark.parametrize("degrees", [4.5, 7.0, 30.0])
def test_closed_form_is_the_integral_over_chi_squared(degrees: float) -> None:
    """E[ρ/x] - E[sqrt(ρ/x)]² over the density of χ² with ρ degrees of freedom, by the trapezium rule on a log axis."""
    x = torch.logspace(-12, 3, 400_001, base=10, dtype=torch.float64)
    log_density = (degrees / 2 - 1) * x.log() - x / 2 - degrees / 2 * math.log(2) - math.lgamma(degrees / 2)
    weights = log_density.exp() * x  # dx = x d(ln x)
    first, second = (torch.trapezoid(weights * (degrees / x) ** power, x.log()).item() for power in (0.5, 1.0))
    assert variance_of_rate(degrees) == pytest.approx(second - first**2, rel=1e-6)


def test_draws_agree_where_the_closed_form_is_exact() -> None:
    """With β2 next to 1 the mean is even and ρ_t = t: are draws within 4 standard errors, where tails are light?"""
    found, errors = drawn(1 - 1e-9, 30, 20_000, seed=3)
    for update in (12, 20, 30):
        assert abs(found[update - FIRST] - variance_of_rate(update)) < 4 * errors[update - FIRST] < 0.01


def test_radam_holds_the_variance_that_adam_begins_with_none_of() -> None:
    """Is Adam's infinite at first, then over ten times as large as RAdam's, which stays near the late one?"""
    found = measure(betas=(0.98,), updates=300, draws=200)["beta2"]["0.98"]
    assert found["adam"][:2] == [None, None] and found["radam"][:5] == [None] * 5 and found["radam"][5] is not None
    assert found["adam"][5] > 10 * found["radam"][5]
    late = [it / found["late"] for it in found["radam"][20:]]
    assert 0.85 < min(late) and max(late) < 1.1
    assert found["adam"][-1] == pytest.approx(found["late"], rel=0.1)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Does it need no model, refuse one, and draw lines of the numbers in the JSON file?"""
    monkeypatch.setattr(variance.measure, "__defaults__", (None, None, (0.98,), 20, 100, 1))
    assert cli.main(["analyze", "variance", "-o", str(tmp_path / "variance")]) == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".png", ".svg"]
    result = json.loads((tmp_path / "variance.json").read_text())
    (axes,) = variance.draw(result).axes
    lines = {line.get_label(): dict(zip(*line.get_data())) for line in axes.lines}
    found = result["beta2"]["0.98"]
    assert lines["Adam"][6] == found["adam"][5] and lines["RAdam, drawn"][20] == found["radam, drawn"][19]
    assert cli.main(["analyze", "variance", "model.pt", "-o", str(tmp_path / "other")]) == 2
    assert "variance measures no model, but CHECKPOINT, --arch or --data was given" in capsys.readouterr().err
