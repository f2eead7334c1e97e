"""Does Fixup compute what its paper says, written out, and start as its paper says?"""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import nn

from fairseq_admin.checkpoints import fold
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.method.initial_weights import fixup_weights

SMALL = {
    **{f"{side}_embed_dim": 32 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_embed_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "encoder_layers": 3,
    "decoder_layers": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def build(**options):
    return reference.build("transformer_admin", admin_scheme="fixup", **{**SMALL, **options})


def by_hand(model, src, prev):
    """Logits, without dropout and padding, every bias where the paper has it."""
    memory = None
    for stack, words in ((model.encoder, src), (model.decoder, prev)):
        x = (stack.embed_scale * stack.embed_tokens(words) + stack.embed_positions(words)).transpose(0, 1)
        mask = None if stack is model.encoder else torch.full((x.size(0), x.size(0)), -math.inf, dtype=x.dtype).triu(1)
        for layer in stack.layers:
            y = x + layer.self_attn_layer_norm.bias
            x = x + reference.fixup_attention(layer.self_attn, y, y, mask)
            if memory is not None:
                x = x + reference.fixup_attention(
                    layer.encoder_attn, x + layer.encoder_attn_layer_norm.bias, memory, None
                )
            y = (x + layer.final_layer_norm.bias) @ layer.fc1.weight.t() + layer.fc1.output_bias
            y = (y.clamp(min=0) + layer.fc2.input_bias) @ layer.fc2.weight.t()
            x = x + layer.fc2.branch_multiplier * y
        x = x + stack.layer_norm.bias
        if stack is model.encoder:
            memory = x = x * stack.layer_norm.multiplier
    return x.transpose(0, 1) @ model.decoder.output_projection.weight.t()


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}], ids=["plain", "checkpointed"])
def test_whole_model_is_the_plain_twin(options):
    model = reference.scattered(build(**options).double())
    src, lengths, prev = reference.batch(padded=False)
    found, expected = model(src, lengths, prev)[0], by_hand(model, src, prev)
    # Rounding of the scores below may tip one in single precision.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4), dtype=found.dtype)
    gradients = []
    for out in (found, expected):
        model.zero_grad()
        (out * weights).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-4, msg=name)


def test_generation_is_the_plain_twin_too():
    """The incremental path computes other products; each step must have the biases once."""
    model = reference.scattered(build()).eval()
    src, lengths, prev = reference.batch(padded=False)
    with torch.no_grad():
        encoder_out = model.encoder(src, lengths)
        state = {}
        steps = [model.decoder(prev[:, : t + 1], encoder_out, incremental_state=state)[0] for t in range(prev.size(1))]
        torch.testing.assert_close(torch.cat(steps, 1), by_hand(model, src, prev), rtol=0, atol=1e-5)


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


def test_drawing_again_draws_anew():
    model = build()
    before = model.encoder.layers[0].fc1.weight.clone()
    fixup_weights(model.encoder, model.decoder)
    assert not torch.equal(before, model.encoder.layers[0].fc1.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_of_a_trained_model(dtype):
    model = reference.scattered(build())
    batch = reference.batch()
    expected = model(*batch)[0]
    found = model.to(dtype)(*batch)[0]
    assert found.dtype == dtype
    # float16 keeps 11 bits and bfloat16 8, over some twenty sums.
    share = 0.002 if dtype == torch.float16 else 0.015
    assert (found.float() - expected).abs().max() < share * expected.abs().max()


def test_a_branch_stays_half_under_autocast():
    layer = build().decoder.layers[0]
    x = torch.randn(3, 2, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.fc1(x).dtype == layer.fc2(layer.fc1(x)).dtype == torch.bfloat16
        assert layer.self_attn(x, x, x)[0].dtype == torch.bfloat16


def test_fold_refuses():
    model = build()
    with pytest.raises(
        AdminError, match="^the checkpoint is of --admin-scheme fixup, whose layers no stock Transformer"
    ):
        options = {"model": {"_name": "transformer_admin", "admin_scheme": "fixup"}}
        fold.fold(Checkpoint({"model": model.state_dict(), "cfg": options}))
