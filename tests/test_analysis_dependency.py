"""`fairseq-admin analyze dependency`: β against a plain loop in float64, and against the paper's claims."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from analysed import fresh
from torch import Tensor, nn

from fairseq_admin.analysis import dependency
from fairseq_admin.analysis.registry import Settings
from fairseq_admin.method.sublayers import observed, real_positions


def part_by_hand(x: Tensor, j: int, branches: list[Tensor], norms: list[nn.Module], scheme: str) -> list[Tensor]:
    """The contribution of branch j (0: the input) to each normalised sum, position by position. Shapes (P, C), float64.

    The sums leave out the other branches, but are divided by the deviations of the whole sums.
    """
    parts = []
    whole, part = x, x if j == 0 else torch.zeros_like(x)
    start_whole, start_part = whole, part
    for i, (branch, norm) in enumerate(zip(branches, norms), 1):
        omega = norm.omega.double() if scheme == "admin" else 1.0
        whole = omega * whole + branch
        part = omega * part + (branch if i == j else 0)
        if scheme == "b2t" and i % 2 == 0:
            whole, part = whole + start_whole, part + start_part
        scale = torch.stack([of.std(unbiased=False) for of in whole])
        parts.append((part - part.mean(1, keepdim=True)) / scale[:, None])
        if scheme != "pre-ln":
            rows = []
            for row, of in zip(part, whole):
                deviation = math.sqrt(sum((v - of.mean()) ** 2 for v in of) / len(of) + norm.eps)
                rows.append((row - row.mean()) / deviation * norm.weight.double())
            part = torch.stack(rows)
            whole = nn.functional.layer_norm(whole, whole.shape[1:], norm.weight, norm.bias, norm.eps)
        if i % 2 == 0:
            start_whole, start_part = whole, part
    return parts


@pytest.mark.parametrize("scheme", ["admin", "post-ln", "pre-ln", "b2t"])
def test_dependency_is_the_plain_one(scheme: str) -> None:
    """Reference: on padded sentences, every β of a small encoder with scattered weights matches `part_by_hand`."""
    model = reference.build(
        "transformer_admin_tiny", admin_scheme=scheme, encoder_embed_dim=8, encoder_ffn_embed_dim=12, decoder_layers=1,
        encoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, words=20,
    )  # fmt: skip
    model = reference.scattered(model).double().eval()
    src, lengths, prev = reference.batch(sentences=2, source=5, words=20)
    real = real_positions(src, reference.PAD)
    if scheme == "admin":
        for norm in (layer.final_layer_norm for layer in model.encoder.layers):
            norm.set_omega(1.7)
    with observed({"encoder": model.encoder}, {"encoder": src}) as seen, torch.no_grad():
        model.encoder(src, lengths)
    squared = dependency.squared_dependencies(seen["encoder"]) / len(real)
    rows = [sublayer.branch.flatten(0, 1)[real] for sublayer in seen["encoder"]]
    norms = [norm for layer in model.encoder.layers for norm in (layer.self_attn_layer_norm, layer.final_layer_norm)]
    first = seen["encoder"][0].shortcut.flatten(0, 1)[real]
    for j in range(5):
        with torch.no_grad():
            parts = part_by_hand(first, j, rows, norms, scheme)
        for i, part in enumerate(parts, 1):
            assert squared[i, j].item() == pytest.approx(part.square().mean().item(), rel=1e-9, abs=1e-15)
    assert not hasattr(model.encoder.layers[0], "__wrapped__")
    assert "residual_connection" not in vars(model.encoder.layers[0]), "the model is not as it was"


def test_padding_is_left_out() -> None:
    """Reference: two sentences have the same shares in one padded batch as in two separate batches."""
    subject = fresh("post-ln", layers=1, width=16)
    src, lengths, prev = reference.batch(sentences=2, source=6, target=5)
    src[1, :2] = prev[1, 3:] = reference.PAD
    lengths[1] = 4
    shares = []
    for rows in (((src, lengths, prev),), ((src[:1], lengths[:1], prev[:1]), (src[1:, 2:], lengths[1:], prev[1:, :3]))):
        names = ("src_tokens", "src_lengths", "prev_output_tokens")
        subject.samples = [{"net_input": dict(zip(names, row))} for row in rows]
        shares.append(dependency.measure(subject)["stacks"])
    for side, positions in (("encoder", 10), ("decoder", 8)):
        padded, alone = (share[side] for share in shares)
        assert padded["positions"] == alone["positions"] == positions
        for one, other in zip(padded["beta"], alone["beta"]):
            assert one == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def dependencies() -> dict[str, dict]:
    return {scheme: dependency.measure(fresh(scheme), Settings()) for scheme in ("post-ln", "pre-ln", "admin")}


def test_shares_add_up_at_initialisation(dependencies) -> None:
    """Law: Σ_j β² is 1 within the reported error, which is small because the parts are nearly independent."""
    for scheme, result in dependencies.items():
        for side, stack in result["stacks"].items():
            sums = [sum(value**2 for value in row) for row in stack["beta"]]
            assert [len(row) for row in stack["beta"]] == list(range(1, len(sums) + 1))
            assert len(sums) == len(stack["sublayers"]) == (13 if side == "encoder" else 19)
            assert max(abs(total - 1) for total in sums) == pytest.approx(stack["error"], rel=1e-9)
            assert stack["error"] < 0.4, (scheme, side)


def test_post_ln_depends_on_its_last_branches(dependencies) -> None:
    """Law (section 4.1): with depth, a sub-layer's own share stays constant in Post-LN and falls as 1/i in Pre-LN. In
    Admin it also falls, and is smaller than in Post-LN."""
    shares = {
        scheme: [row[-1] ** 2 for row in result["stacks"]["encoder"]["beta"][1:]]
        for scheme, result in dependencies.items()
    }
    last = {scheme: sum(values[-4:]) / 4 for scheme, values in shares.items()}
    second = {scheme: sum(values[:4]) / 4 for scheme, values in shares.items()}
    assert last["post-ln"] > 0.7 * second["post-ln"]
    assert last["pre-ln"] < 0.6 * second["pre-ln"]
    assert last["admin"] < 0.6 * second["admin"]
    assert last["post-ln"] > 2 * max(last["admin"], last["pre-ln"])
