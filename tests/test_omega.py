"""The formulas of omega.py against numbers worked by hand. test_profiling.py measures omega against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from fairseq_admin.core.omega import omega_from_depth
from fairseq_admin.method.profile_rules import variance
from fairseq_admin.method.state_dict import omega_summary


@pytest.mark.parametrize(
    ("rule", "sublayers", "omega"),
    [
        # S = 36: ln 37 = 3.6109179, 37 / 3.6109179 = 10.246702, less 1 = 9.246702, root = 3.0408390.
        ("log", 36, 3.0408390),
        # S = 1: ln 2 = 0.6931472, 2 / 0.6931472 = 2.8853901, less 1 = 1.8853901, root = 1.3730951.
        ("log", 1, 1.3730951),
        ("constant", 1, 1.0),
        ("constant", 54, 7.348469),
        ("linear", 120, 20.0),  # 120 / 6
        ("linear", 1, 1.0),  # never below 1
        ("12.5", 36, 12.5),
    ],
)
def test_rules_by_depth(rule, sublayers, omega):
    assert omega_from_depth(rule, sublayers) == pytest.approx(omega, abs=5e-7)


def positions(real):
    return real.flatten().nonzero().squeeze(1)


@pytest.mark.parametrize("filler", [0.0, 1e30, math.nan])
def test_padding_is_ignored(filler):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(4, 3, 8, generator=generator)
    real = torch.rand(4, 3, generator=generator) > 0.3
    padded = x.masked_fill(~real.unsqueeze(-1), filler)
    assert torch.equal(variance(padded, positions(real)), variance(x, positions(real)))


def test_variance_of_half_is_taken_in_float():
    # Values near 300 have squares near 90,000, beyond float16's 65,504.
    x = torch.full((4, 2, 16), 300.0, dtype=torch.float16)
    x[:2] = -300
    result = variance(x, positions(torch.ones(4, 2, dtype=torch.bool)))
    assert result.dtype == torch.float32 and result.item() == 90000.0


def test_summary_by_hand():
    assert omega_summary(torch.tensor([1.0, 2.0, 6.0])) == {"min": 1.0, "mean": 3.0, "max": 6.0}
