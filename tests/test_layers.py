"""With ω = 1, the model is fairseq's own, bit for bit. ω scales the shortcut. Presets have the right sizes."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from kinds import KINDS, assert_equal, logits, omegas

from fairseq_admin.method.norms import ShortcutNorm

OPTIONS = [
    {},
    {"activation_fn": "gelu"},
    {"no_cross_attention": True},
    {"cross_self_attention": True, "no_cross_attention": True},
    {"layernorm_embedding": True},
    {"encoder_learned_pos": True, "decoder_learned_pos": True},
    {"activation_dropout": 0.2},
    {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
    {"quant_noise_pq": 0.3, "quant_noise_pq_block_size": 8},
    {"max_source_positions": 64, "no_scale_embedding": True},
]


CASES = [
    *(("translation", options, "float") for options in OPTIONS),
    *(("translation", {}, how) for how in ("bfloat16", "float16", "half")),
    *((name, {}, "float") for name in ("language", "masked")),
]


@pytest.mark.parametrize(
    ("name", "options", "how"), CASES, ids=lambda it: it if isinstance(it, str) else "-".join(it) or "plain"
)
def test_stock_weights_have_omega_1_and_compute_the_same(name, options, how, caplog):
    """Logits and gradients are stock, in evaluation and training mode, under autocast, and in half precision."""
    kind, options = KINDS[name], {"attention_dropout": 0.1, **options}
    ours, stock = kind.build(**options), kind.stock(seed=3, **options)
    with caplog.at_level("INFO"):
        ours.load_state_dict(stock.state_dict())
    assert "every omega is 1, nothing will be profiled" in caplog.text and ours.profiled
    results = []
    for model in (ours, stock):
        model = model.half() if how == "half" else model
        with torch.autocast("cpu", dtype=getattr(torch, how), enabled="float1" in how or how == "bfloat16"):
            evaluated, trained = (logits(model.train(mode), kind.batch()) for mode in (False, True))
        torch.log_softmax(trained.float(), -1)[..., 3].sum().backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if "omega" not in key and p.grad is not None}
        results.append({"evaluated": evaluated, "trained": trained, **gradients})
    assert_equal(*results)
    assert all(tensor.isfinite().all() and tensor.dtype == results[1][key].dtype for key, tensor in results[0].items())
    assert set(omegas(ours)) == {1.0}


def test_omega_keeps_its_precision_next_to_a_half_branch():
    """Under autocast, ω stays float32, as does the shortcut. In bfloat16, ω = 1.001 would be 1."""
    norm = ShortcutNorm(8)
    norm.set_omega(1.001)
    branch, shortcut = torch.randn(4, 2, 8).bfloat16(), torch.randn(4, 2, 8)
    expected = torch.nn.functional.layer_norm(shortcut * norm.omega + branch.float(), (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm((branch, shortcut)), expected)


@pytest.mark.parametrize(
    ("arch", "layers", "sizes"),
    [
        ("transformer_admin_18l", (18, 18), (512, 2048, 8)),
        ("transformer_admin_60l_12l", (60, 12), (512, 2048, 8)),
        ("transformer_admin_iwslt_de_en", (6, 6), (512, 1024, 4)),
        ("transformer_lm_admin_24l", (24,), (1024, 4096, 16)),
        ("transformer_lm_admin_48l", (48,), (1600, 6400, 25)),
        ("masked_lm_admin", (12,), (768, 3072, 12)),
        ("masked_lm_admin_48l", (48,), (768, 3072, 12)),
    ],
)
def test_the_sizes_of_a_preset(arch, layers, sizes):
    args = Namespace()
    ARCH_CONFIG_REGISTRY[arch](args)
    sides = {"transformer_admin": ("encoder", "decoder"), "transformer_lm_ad": ("decoder",)}.get(
        arch[:17], ("encoder",)
    )
    for side, depth in zip(sides, layers):
        names = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
        assert [getattr(args, f"{side}_{name}") for name in names] == [depth, *sizes]
