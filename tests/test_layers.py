"""With ω = 1 the model is fairseq's own, bit for bit; with its initial weights it is the paper's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import reference
import torch

from fairseq_admin.method.norms import ShortcutNorm, shortcut_norms

GOLDEN = Path(__file__).parent / "golden"
OURS = (".omega_init", ".omega_delta")


def pair(**options):
    """A stock Post-LN Transformer, and an Admin model that took over its weights, ω = 1."""
    stock = reference.build("transformer", **{**reference.TINY, "dropout": 0.1, "attention_dropout": 0.1, **options})
    admin = reference.build(
        "transformer_admin", seed=2, **{**reference.TINY, "dropout": 0.1, "attention_dropout": 0.1, **options}
    )
    admin.load_state_dict(stock.state_dict())
    return stock, admin


def forward(model, batch, seed=5):
    torch.manual_seed(seed)
    return model(*batch)[0]


def gradients(model, batch):
    model.zero_grad()
    torch.log_softmax(forward(model, batch).float(), -1)[..., 3].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if not name.endswith(OURS)}


def assert_identical(stock, admin, batch):
    for mode in (True, False):
        stock.train(mode), admin.train(mode)
        expected, found = forward(stock, batch), forward(admin, batch)
        assert expected.dtype == found.dtype
        assert torch.equal(expected, found)
        assert expected.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_fn": "gelu"},
        {"no_cross_attention": True},
        {"cross_self_attention": True, "no_cross_attention": True},
        {"layernorm_embedding": True},
        {"encoder_learned_pos": True, "decoder_learned_pos": True},
        {"activation_dropout": 0.2},
        {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
        {"checkpoint_activations": True},
        {"quant_noise_pq": 0.3, "quant_noise_pq_block_size": 8},
        {"max_source_positions": 64, "no_scale_embedding": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_whole_model_with_omega_1_is_stock(options):
    assert_identical(*pair(**options), reference.batch())


def test_gradients_with_omega_1_are_stock():
    stock, admin = pair()
    expected, found = gradients(stock, reference.batch()), gradients(admin, reference.batch())
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_omega_1_is_stock(dtype):
    stock, admin = pair()
    with torch.autocast("cpu", dtype=dtype):
        assert_identical(stock, admin, reference.batch())
        expected, found = gradients(stock, reference.batch()), gradients(admin, reference.batch())
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_half_model_with_omega_1_is_stock():
    stock, admin = (model.half() for model in pair())
    assert_identical(stock, admin, reference.batch())


def test_omega_scales_the_shortcut_and_not_the_branch():
    norm = ShortcutNorm(8)
    norm.set_omega(3.0)
    with torch.no_grad():
        norm.omega_delta[2] = 0.5
    branch, shortcut = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    omega = torch.tensor([3.0, 3.0, 3.5, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert torch.equal(norm.omega, omega)
    expected = torch.nn.functional.layer_norm(shortcut * omega + branch, (8,))
    assert torch.equal(norm((branch, shortcut)), expected)


def test_omega_keeps_its_precision_next_to_a_half_branch():
    """Under autocast the branch is half and the shortcut float: ω = 1.001 would be 1 in bfloat16."""
    norm = ShortcutNorm(8)
    norm.set_omega(1.001)
    branch, shortcut = torch.randn(4, 2, 8).bfloat16(), torch.randn(4, 2, 8)
    expected = torch.nn.functional.layer_norm(shortcut * norm.omega + branch.float(), (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm((branch, shortcut)), expected)


def test_gradient_of_omega_by_hand():
    norm = ShortcutNorm(8).double()
    norm.set_omega(1.7)
    branch, shortcut = (torch.randn(4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda f, x, delta: torch.func.functional_call(norm, {"omega_delta": delta}, ((f, x),)),
        (branch, shortcut, norm.omega_delta),
    )


def test_layers_keep_their_place_without_encoder_attention():
    admin = reference.build("transformer_admin", **reference.TINY, no_cross_attention=True)
    assert [len(shortcut_norms(stack)) for stack in (admin.encoder, admin.decoder)] == [4, 4]


def test_norms_stand_in_forward_order():
    admin = reference.build("transformer_admin", **reference.TINY)
    admin(*reference.batch())
    seen = []
    for norm in admin.modules():
        if isinstance(norm, ShortcutNorm):
            norm.register_forward_hook(lambda module, inputs, output: seen.append(module))
    admin.eval()(*reference.batch())
    listed = shortcut_norms(admin.encoder) + shortcut_norms(admin.decoder)
    assert [id(norm) for norm in seen] == [id(norm) for norm in listed]


def golden(size):
    rows = [line.split("\t") for line in (GOLDEN / f"parameters_{size}.tsv").read_text().splitlines()[1:]]
    return {name: (tuple(map(int, shape.split("x"))), float(mean), float(std)) for name, shape, mean, std in rows}


@pytest.mark.parametrize("size, seeds", [("tiny", 8), ("base", 2)])
def test_every_parameter_has_its_name_shape_and_initial_law(size, seeds):
    arch, options = ("transformer_admin_tiny", {}) if size == "tiny" else ("transformer_admin", {})
    if size == "base":
        options = {"encoder_layers": 1, "decoder_layers": 1}
    models = [dict(reference.build(arch, seed=100 + s, **options).named_parameters()) for s in range(seeds)]
    expected = golden(size)
    assert {name for name in models[0] if not name.endswith(".omega_delta")} == expected.keys()
    for name, first in models[0].items():
        values = torch.stack([model[name].detach().double() for model in models])
        if name.endswith(".omega_delta"):
            assert not values.any(), name
            continue
        shape, mean, std = expected[name]
        assert tuple(first.shape) == shape, name
        if std == 0:
            assert torch.all(values == mean), name
            continue
        # Six standard errors of a mean, and of a standard deviation of normal values (uniform ones err less); the
        # golden table holds 20 seeds, so its own error adds at most a tenth to two eighths.
        n = values.numel()
        assert abs(values.mean().item() - mean) < 6 * 1.2 * std / math.sqrt(n), name
        assert values.std(correction=0).item() == pytest.approx(std, rel=6 * 1.2 / math.sqrt(2 * n)), name
        # Uniform values end at sqrt(3) standard deviations; normal ones (the embedding) do not.
        uniform = values.abs().max().item() < 1.8 * std
        assert uniform == ("embed_tokens" not in name), name
