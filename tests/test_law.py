"""What Admin is for: how far a small change of all weights moves the output, against depth.

Liu et al. 2020, section 4.2 and theorem 2: |F(x, W) - F(x, W*)|² grows as N for Post-LN and as log N for Pre-LN; and as
log N for Admin (section 4.3). Measured on encoders of N = 6 … 48 layers, the embedding unchanged.
"""

from __future__ import annotations

import copy
import math

import pytest
import reference
import torch
from torch import Tensor, nn

from fairseq_admin.analysis.output_change import changes as output_changes
from fairseq_admin.analysis.output_change import first_update, fit, fits, perturb, predicted, sublayers_of
from fairseq_admin.method.profiling import measure

DEPTHS = (6, 9, 12, 18, 24, 36, 48)
SEEDS = 32
RELATIVE = 0.002
"""The change of the weights, a share of their own size: small enough that Post-LN's output does not saturate."""
Found = dict[str, dict[str, list[float]]]


def encoder_of(method: str, layers: int, seed: int) -> nn.Module:
    """A fresh narrow encoder without dropout: "post-ln", "pre-ln" or "admin", with Xavier's feed-forward weights."""
    sizes = {**reference.TINY, "decoder_layers": 1, "encoder_layers": layers, "dropout": 0.0, "attention_dropout": 0.0}
    model = reference.build("transformer_admin", seed=seed, admin_scheme=method, admin_ffn_init="xavier", **sizes)
    if method == "admin":
        src, _, prev = sentences(seed)
        measure(model, src, prev, "reference")
    return model.eval().encoder


def sentences(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return reference.batch(sentences=16, source=8, padded=False, seed=seed)


def perturbed(encoder: nn.Module, relative: float, seed: int) -> nn.Module:
    """A copy of an encoder, with noise in its weights."""
    moved = copy.deepcopy(encoder)
    perturb(moved.layers, relative, torch.Generator().manual_seed(seed))
    return moved


@pytest.fixture(scope="module")
def changes() -> Found:
    """By method: the mean output change over the seeds at each depth, and what theorem 2 says it is.

    One deep encoder serves all depths: layers are drawn independently, and Admin's `reference` ω depends only on the
    sub-layers before, so its first n layers are a fresh encoder of n layers.
    """
    found = {}
    for method in ("post-ln", "pre-ln", "admin"):
        measured, expected = (torch.zeros(DEPTHS[-1]) for _ in range(2))
        for seed in range(SEEDS):
            src, _, _ = sentences(seed)
            encoder = encoder_of(method, DEPTHS[-1], seed)
            moved = perturbed(encoder, RELATIVE, 100 + seed)
            before = sublayers_of(encoder, src)
            measured += output_changes(before, sublayers_of(moved, src))
            expected += predicted(before, sublayers_of(moved, src, [it.branch for it in before]))
        found[method] = {
            name: [values[n - 1].item() / SEEDS for n in DEPTHS]
            for name, values in (("measured", measured), ("theorem 2", expected))
        }
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "law", "other"), [("post-ln", "linear", "logarithmic"),
                                                      ("pre-ln", "logarithmic", "linear"),
                                                      ("admin", "logarithmic", "linear")])  # fmt: skip
def test_change_against_depth(changes: Found, method: str, law: str, other: str) -> None:
    """The bound of 0.97 is the project's; Post-LN's fit came out at 0.985, over half the seeds at 0.967 and 0.986."""
    measured = changes[method]["measured"]
    found = fits(DEPTHS, measured)
    assert found[law]["r2"] >= 0.97 > found[other]["r2"]
    growth = measured[-1] / measured[0]  # of eightfold depth: Post-LN's was 7.9, Admin's 2.5 and Pre-LN's 2.7
    assert growth > 6 if method == "post-ln" else growth < 4


@pytest.mark.nightly
def test_theorem_2(changes: Found) -> None:
    """Law: Σ β² C is the measured change within a quarter. It came out from 5 % too low to 16 % too high for Post-LN,
    up to 10 % too low for Pre-LN and 9 % for Admin. The estimate for Post-LN is not Pre-LN's.
    """

    def apart(one: str, other: str) -> list[float]:
        return [a / b - 1 for a, b in zip(changes[one]["theorem 2"], changes[other]["measured"])]

    for method in changes:
        assert -0.25 < min(apart(method, method)) <= max(apart(method, method)) < 0.25
    assert max(apart("post-ln", "pre-ln")[-3:]) > 1 and min(apart("pre-ln", "post-ln")[-3:]) < -0.5


@pytest.mark.parametrize("method", ["post-ln", "pre-ln", "admin"])
def test_theorem_2_by_hand(method: str) -> None:
    """Reference: where one branch alone has moved, theorem 2 is the change itself."""
    src, _, _ = sentences(1)
    encoder = encoder_of(method, 1, seed=1).double()
    moved = copy.deepcopy(encoder)
    with torch.no_grad():
        moved.layers[0].fc2.weight += 1e-4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).double()
    before = sublayers_of(encoder, src)
    alone = predicted(before, sublayers_of(moved, src, [it.branch for it in before]))
    # Only the last branch has moved, so what theorem 2 says is the change itself, to the first order.
    assert alone.item() == pytest.approx(output_changes(before, sublayers_of(moved, src)).item(), rel=0.05)


def test_first_update_is_adams() -> None:
    """Reference: torch's Adam, which a deep model's memory has no room for."""
    encoder = encoder_of("post-ln", 2, seed=1)
    src, _, _ = sentences(1)
    encoder(src)["encoder_out"][0].square().sum().backward()
    other = copy.deepcopy(encoder)
    for one, two in zip(other.parameters(), encoder.parameters()):
        one.grad = None if two.grad is None else two.grad.clone()
    first_update(encoder, 1e-3)
    torch.optim.Adam(other.layers.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-8).step()
    for name, tensor in encoder.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=1e-6)


def test_fit_tells_a_line_from_a_curve() -> None:
    assert fit([1, 2, 3], [5.0, 7.0, 9.0]) == pytest.approx({"intercept": 3.0, "slope": 2.0, "r2": 1.0})
    assert fit([1, 2, 3], [9.0, 7.0, 5.0])["r2"] == 0.0
    assert fit([1, 2, 3, 4], [1.0, -1.0, 1.0, -1.0])["r2"] < 0.3
    assert fits([1, 10, 100], [0.0, 1.0, 2.0])["logarithmic"]["slope"] == pytest.approx(1 / math.log(10))
