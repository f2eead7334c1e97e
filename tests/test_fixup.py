"""Does Fixup start as its paper says? (Its layers written out, and its modes, are in test_schemes.py.)"""

from __future__ import annotations

import math

import pytest
import reference
import torch
from kinds import KINDS, STILL
from torch import nn


def build(**options):
    return KINDS["translation"].build(admin_scheme="fixup", **STILL, **options)


def test_starts_as_the_identity_and_moves_last_layers_first():
    model = build()
    src, lengths, prev = reference.batch(padded=False)
    assert torch.equal(model.encoder(src)["encoder_out"][0], model.encoder.forward_embedding(src)[0].transpose(0, 1))
    model(src, lengths, prev)[0].square().mean().backward()
    moved = {name for name, p in model.named_parameters() if ".layers." in name and p.grad.any()}
    assert moved == {f"decoder.layers.{i}.{last}.weight" for i in range(2) for last in LAST}


LAST = ("self_attn.out_proj", "encoder_attn.out_proj", "fc2")


@pytest.mark.parametrize(
    ("options", "attention", "feed_forward"),
    [
        # 2 * 3 + 3 * 2 = 12 branches: 12^(-1/6) = 0.660897, 12^(-1/2) = 0.288675.
        ({}, 0.660897, 0.288675),
        # 2 * 3 + 2 * 2 = 10: 10^(-1/6) = 0.681292, 10^(-1/2) = 0.316228.
        ({"no_cross_attention": True}, 0.681292, 0.316228),
    ],
    ids=["translation", "no-cross-attention"],
)
def test_weights_by_hand(options, attention, feed_forward):
    """Xavier-uniform ends at gain * sqrt(6 / (in + out)); the largest of 1,024 values is within a percent of it."""
    model = build(**options)
    for stack in (model.encoder, model.decoder):
        for layer in stack.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                end = attention * math.sqrt(0.5 * 6 / 64)
                assert 0.99 * end < projection.weight.abs().max().item() <= end * 1.000001
            end = feed_forward * math.sqrt(6 / 96)
            assert 0.99 * end < layer.fc1.weight.abs().max().item() <= end * 1.000001
            assert not layer.self_attn.out_proj.weight.any() and not layer.fc2.weight.any()


@pytest.mark.parametrize("share", ["all", "decoder", "none"])
def test_output_projection_is_zero_unless_tied(share):
    model = build(share_all_embeddings=share == "all", share_decoder_input_output_embed=share == "decoder")
    assert bool(model.decoder.output_projection.weight.any()) == (share != "none")
    assert model.decoder.embed_tokens.weight.any()


def test_no_bias_vector_is_trained_or_stored():
    model = build()
    vectors = [name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 1 and p.numel() > 1]
    assert vectors == []
    assert not [key for key in model.state_dict() if key.endswith(("proj.bias", "fc1.bias", "fc2.bias"))]
    assert all(not linear.bias.any() for linear in model.decoder.layers[0].modules() if isinstance(linear, nn.Linear))
