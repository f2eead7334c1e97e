"""Admin's main claim: with depth, a small change of all weights moves the output less than in Post-LN.

Liu et al. 2020, section 4.2 and theorem 2: |F(x, W) - F(x, W*)|² grows as N for Post-LN and as log N for Pre-LN; for
Admin it also grows as log N (section 4.3). The tests measure encoders of N = 6 … 48 layers. Embeddings do not change.
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
"""Change of the weights relative to their size. It is so small that Post-LN's output does not saturate."""
Found = dict[str, dict[str, list[float]]]


def encoder_of(method: str, layers: int, seed: int) -> nn.Module:
    """A fresh narrow encoder without dropout: "post-ln", "pre-ln" or "admin", with Xavier's feed-forward weights."""
    sizes = {**reference.TINY, "decoder_layers": 1, "encoder_layers": layers, "dropout": 0.0, "attention_dropout": 0.0}
    model = reference.build("transformer_admin", seed=seed, admin_scheme=method, admin_ffn_init="xavier", **sizes)
    if method == "admin":
        src, _, prev = sentences(seed)
        measure(model, {"encoder": src, "decoder": prev}, "reference")
    return model.eval().encoder


def sentences(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return reference.batch(sentences=16, source=8, padded=False, seed=seed)


def perturbed(encoder: nn.Module, relative: float, seed: int) -> nn.Module:
    """A copy of an encoder, with noise added to its weights."""
    moved = copy.deepcopy(encoder)
    perturb(moved.layers, relative, torch.Generator().manual_seed(seed))
    return moved


@pytest.fixture(scope="module")
def changes() -> Found:
    """For each method and depth: the mean output change over the seeds, measured and predicted by theorem 2.

    One deep encoder serves all depths. Layers are drawn independently, and Admin's `reference` ω depends only on
    earlier sub-layers, so its first n layers are a fresh encoder of n layers.
    """
    results = {}
    for method in ("post-ln", "pre-ln", "admin"):
        measured, expected = (torch.zeros(DEPTHS[-1]) for _ in range(2))
        for seed in range(SEEDS):
            src, _, _ = sentences(seed)
            encoder = encoder_of(method, DEPTHS[-1], seed)
            moved = perturbed(encoder, RELATIVE, 100 + seed)
            at_start = sublayers_of(encoder, src)
            measured += output_changes(at_start, sublayers_of(moved, src))
            expected += predicted(at_start, sublayers_of(moved, src, [sublayer.branch for sublayer in at_start]))
        results[method] = {
            name: [values[n - 1].item() / SEEDS for n in DEPTHS]
            for name, values in (("measured", measured), ("theorem 2", expected))
        }
    return results


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "law", "other"), [("post-ln", "linear", "logarithmic"),
                                                      ("pre-ln", "logarithmic", "linear"),
                                                      ("admin", "logarithmic", "linear")])  # fmt: skip
def test_change_against_depth(changes: Found, method: str, law: str, other: str) -> None:
    """Law: for each method, the expected law fits with R² ≥ 0.97, and the other law fits with a smaller R².

    The bound of 0.97 is this project's. Post-LN's fit had R² 0.985, and 0.967 and 0.986 over half the seeds each.
    """
    measured = changes[method]["measured"]
    fitted = fits(DEPTHS, measured)
    assert fitted[law]["r2"] >= 0.97 > fitted[other]["r2"]
    growth = measured[-1] / measured[0]  # over eightfold depth, measured: Post-LN 7.9, Admin 2.5, Pre-LN 2.7
    assert growth > 6 if method == "post-ln" else growth < 4


@pytest.mark.nightly
def test_theorem_2(changes: Found) -> None:
    """Law: Σ β² C is within 25 % of the measured change, and Post-LN's estimate does not fit Pre-LN.

    The estimates were 5 % too low to 16 % too high for Post-LN, up to 10 % too low for Pre-LN, and 9 % for Admin.
    """

    def apart(one: str, other: str) -> list[float]:
        return [a / b - 1 for a, b in zip(changes[one]["theorem 2"], changes[other]["measured"])]

    for method in changes:
        assert -0.25 < min(apart(method, method)) <= max(apart(method, method)) < 0.25
    assert max(apart("post-ln", "pre-ln")[-3:]) > 1 and min(apart("pre-ln", "post-ln")[-3:]) < -0.5


@pytest.mark.parametrize("method", ["post-ln", "pre-ln", "admin"])
def test_theorem_2_by_hand(method: str) -> None:
    """Reference: if only one branch has moved, theorem 2 gives the change itself."""
    src, _, _ = sentences(1)
    encoder = encoder_of(method, 1, seed=1).double()
    moved = copy.deepcopy(encoder)
    with torch.no_grad():
        moved.layers[0].fc2.weight += 1e-4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).double()
    at_start = sublayers_of(encoder, src)
    alone = predicted(at_start, sublayers_of(moved, src, [sublayer.branch for sublayer in at_start]))
    # Only the last branch has moved, so theorem 2 gives the change itself, to first order.
    assert alone.item() == pytest.approx(output_changes(at_start, sublayers_of(moved, src)).item(), rel=0.05)


def test_first_update_is_adams() -> None:
    """Reference: `first_update` equals torch's Adam. Adam's state would not fit in memory for deep models."""
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
