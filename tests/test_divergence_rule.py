"""Is a run warned of that shows the sign of divergence, and no other?"""

from __future__ import annotations

import math

import pytest

from fairseq_admin.monitor.divergence_rule import ENOUGH, DivergenceRule


def said(shares: list[float], losses: list[float]) -> list[int]:
    """The updates at which there is a warning of the decoder, one measurement an update."""
    rule, found = DivergenceRule(), []
    for update, (share, loss) in enumerate(zip(shares, losses), 1):
        lines = rule.warnings(update, {"encoder": 0.3, "decoder": share}, loss)
        assert all(f"update {update}: " in line and "the decoder's outputs" in line for line in lines)
        found += [update] * len(lines)
    return found


RISES = [0.4] * 40 + [0.4 + 0.002 * step for step in range(60)]
FALLS = [6 * math.exp(-step / 30) for step in range(100)]


@pytest.mark.parametrize(
    ("shares", "losses", "expected"),
    [
        # By hand: n steps into a ramp of slope s, a mean of weight w is behind by s (1 - w) / w (1 - (1 - w)^n). At
        # n = 8, measurement 49, the slow one is by 0.0128 and the fast one by 0.0044: 0.4116 > 1.02 · 0.4032; at 7,
        # 0.4097 < 1.02 · 0.4025.
        (RISES, [5.0] * 100, [49]),
        (RISES, FALLS, []),
        ([0.4] * 100, [5.0] * 100, []),
        ([0.4] * 100, [5.0 + 0.01 * step for step in range(100)], []),
        (list(reversed(RISES)), [5.0] * 100, []),
    ],
    ids=["rises", "rises and learns", "steady", "loss rises alone", "falls"],
)
def test_rule(shares: list[float], losses: list[float], expected: list[int]) -> None:
    """Does a warning need both, a share that rises and a loss that does not fall?"""
    assert said(shares, losses) == expected


@pytest.mark.parametrize(("place", "number"), [(0, math.nan), (30, math.inf), (60, math.nan)])
def test_measurements_that_are_not_finite_are_ignored(place: int, number: float) -> None:
    """Are warnings the same as without it, and as many measurements later as were put in?"""
    steady, rising = [0.4] * 100, [0.4 + 0.005 * max(0, step - 60) for step in range(100)]
    for shares, expected in ((steady, []), (rising, said(rising, [5.0] * 100))):
        losses = [5.0] * 102
        losses[place] = number
        shares = [*shares[:place], 0.4, number, *shares[place:]]
        assert said(shares, losses) == [update + 2 for update in expected]
    assert len(expected) == 1


def test_the_first_measurements_are_too_few() -> None:
    """Is nothing said before the slow level is one?"""
    assert said([0.2 * 1.1**step for step in range(ENOUGH)], [5.0] * ENOUGH) == []
    assert said([0.2 * 1.1**step for step in range(ENOUGH + 1)], [5.0] * (ENOUGH + 1)) == [ENOUGH + 1]


def test_a_sign_that_stays_is_said_once() -> None:
    """Is a second sign said only after as many calm measurements as make a level?"""
    ramp = [0.4 * 1.01**step for step in range(60)]
    calm = [ramp[-1]] * 80
    shares = [0.4] * 30 + ramp + calm + [ramp[-1] * 1.01**step for step in range(60)]
    first, second = said(shares, [5.0] * len(shares))
    assert 30 < first < 60 and 170 < second < 200
