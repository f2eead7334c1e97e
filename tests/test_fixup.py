"""Does Fixup start as its paper says? (Its layers written out, and its modes, are in test_schemes.py.)"""

from __future__ import annotations

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
