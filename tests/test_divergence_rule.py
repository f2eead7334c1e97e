"""The divergence rule: does it warn about every run that shows the sign of divergence, and about no other run?"""

from __future__ import annotations

import math

import pytest

from fairseq_admin.monitor.divergence_rule import ENOUGH, DivergenceRule


def warned_updates(shares: list[float], losses: list[float]) -> list[int]:
    """Updates with a warning for the decoder, with one measurement per update."""
    rule, updates = DivergenceRule(), []
    for update, (share, loss) in enumerate(zip(shares, losses), 1):
        lines = rule.warnings(update, {"encoder": 0.3, "decoder": share}, loss)
        assert all(f"update {update}: " in line and "the decoder's outputs" in line for line in lines)
        updates += [update] * len(lines)
    return updates


RISES = [0.4] * 40 + [0.4 + 0.002 * step for step in range(60)]
FALLS = [6 * math.exp(-step / 30) for step in range(100)]


@pytest.mark.parametrize(
    ("shares", "losses", "expected"),
    [
        # By hand: n steps into a ramp of slope s, a mean of weight w lags by s (1 - w) / w (1 - (1 - w)^n). At n = 8,
        # measurement 49, the slow mean lags by 0.0128 and the fast mean by 0.0044: 0.4116 > 1.02 · 0.4032. At n = 7,
        # 0.4097 < 1.02 · 0.4025.
        (RISES, [5.0] * 100, [49]),
        (RISES, FALLS, []),
        ([0.4] * 100, [5.0] * 100, []),
        ([0.4] * 100, [5.0 + 0.01 * step for step in range(100)], []),
        (list(reversed(RISES)), [5.0] * 100, []),
    ],
    ids=["rises", "rises and learns", "steady", "loss rises alone", "falls"],
)
def test_a_warning_needs_a_rising_share_and_a_loss_that_does_not_fall(
    shares: list[float], losses: list[float], expected: list[int]
) -> None:
    """Does a warning need both a rising share and a loss that does not fall?"""
    assert warned_updates(shares, losses) == expected


@pytest.mark.parametrize(("place", "number"), [(0, math.nan), (30, math.inf), (60, math.nan)])
def test_measurements_that_are_not_finite_are_ignored(place: int, number: float) -> None:
    """Are non-finite measurements ignored? Two of them only delay a warning by two updates."""
    steady, rising = [0.4] * 100, [0.4 + 0.005 * max(0, step - 60) for step in range(100)]
    for shares, expected in ((steady, []), (rising, warned_updates(rising, [5.0] * 100))):
        losses = [5.0] * 102
        losses[place] = number
        shares = [*shares[:place], 0.4, number, *shares[place:]]
        assert warned_updates(shares, losses) == [update + 2 for update in expected]
    assert len(expected) == 1


def test_the_first_measurements_are_too_few() -> None:
    """Are there no warnings before the slow mean has enough measurements?"""
    assert warned_updates([0.2 * 1.1**step for step in range(ENOUGH)], [5.0] * ENOUGH) == []
    assert warned_updates([0.2 * 1.1**step for step in range(ENOUGH + 1)], [5.0] * (ENOUGH + 1)) == [ENOUGH + 1]


def test_a_sign_that_stays_is_said_once() -> None:
    """Does a second warning come only after enough calm measurements to form a new level?"""
    ramp = [0.4 * 1.01**step for step in range(60)]
    calm = [ramp[-1]] * 80
    shares = [0.4] * 30 + ramp + calm + [ramp[-1] * 1.01**step for step in range(60)]
    first, second = warned_updates(shares, [5.0] * len(shares))
    assert 30 < first < 60 and 170 < second < 200
