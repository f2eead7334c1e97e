"""Does every scheme compute what its paper says, from the weights its paper says, and go through a whole run?"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from conftest import TRAIN, Run, run_module

from fairseq_admin import cli
from fairseq_admin.checkpoints import files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance, state_dict
from fairseq_admin.method.initial_weights import deepnorm_gains, t_fixup_gains
from fairseq_admin.method.schemes import SCHEMES, deepnorm_scales

GOLDEN = Path(__file__).parent / "golden" / "schemes.tsv"
SMALL = {
    **{f"{side}_embed_dim": 32 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_embed_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    "encoder_layers": 3,
    "decoder_layers": 2,
}
"""The sizes of the golden table: depths that no formula can mix up unnoticed."""
STILL = {"dropout": 0.0, "attention_dropout": 0.0}
STOCK = {
    "post-ln": {},
    "pre-ln": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "post-ln-pre-ln": {"decoder_normalize_before": True},
}
"""The schemes that are fairseq's own, and the options that make them there."""


def build(scheme, **options):
    return reference.build("transformer_admin", admin_scheme=scheme, **{**SMALL, **options})


def logits(model, batch, seed=5):
    torch.manual_seed(seed)
    return model(*batch)[0]


def set_branch_scales(model):
    """Give every layer its own b, as training would; do nothing if there is no b."""
    found = {"encoder": [], "decoder": []}
    for side, scales in found.items():
        for number, layer in enumerate(getattr(model, side).layers):
            scales.append(0.3 + 0.2 * number + 0.05 * (side == "decoder"))
            with torch.no_grad():
                layer.branch_scale.fill_(scales[-1])
    return found


# Formulas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depths", "scales", "gains"),
    [
        # 6^4 * 6 = 7776, its 16th root 1.750541; 0.81 * that, 0.87 / that; 4th roots of 18 and of 72.
        ((6, 6), (1.417938, 2.059767), (0.496989, 0.343295)),
        # 18^5 = 1889568, its 16th root 2.467588; 4th roots of 54 and of 216.
        ((18, 18), (1.998746, 2.710806), (0.352571, 0.260847)),
        # 60^4 * 12 = 155520000, its 16th root 3.250773; 4th roots of 36 (sqrt 6) and of 144 (sqrt 12).
        ((60, 12), (2.633126, 2.449490), (0.267629, 0.288675)),
    ],
)
def test_deepnorm_constants(depths, scales, gains):
    assert deepnorm_scales(*depths) == pytest.approx(scales, abs=1e-6)
    assert deepnorm_gains(*depths) == pytest.approx(gains, abs=1e-6)


@pytest.mark.parametrize(
    ("depths", "gains"),
    [
        # 4th root of 6 is 1.565085; 0.67 / that; 4th root of 54 is 2.710806.
        ((6, 6), (0.428092, 0.368894)),
        # 4th root of 60 is 2.783158; 4th root of 108 is 3.223710.
        ((60, 12), (0.240734, 0.310202)),
    ],
)
def test_t_fixup_constants(depths, gains):
    assert t_fixup_gains(*depths) == pytest.approx(gains, abs=1e-6)


def test_deepnorm_scale_is_in_every_layer_of_the_state_dict_and_not_trained():
    model = build("deepnorm")
    state, parameters = model.state_dict(), dict(model.named_parameters())
    # 3^4 * 2 = 162, its 16th root 1.374357 (162 = 12.72792^2, 12.72792 = 3.567621^2, 1.888815^2, 1.374342^2)
    expected = {f"encoder.layers.{i}.shortcut_scale": 0.81 * 162 ** (1 / 16) for i in range(3)}
    expected.update({f"decoder.layers.{i}.shortcut_scale": 6**0.25 for i in range(2)})
    assert {key for key in state if "scale" in key} == expected.keys()
    for key, value in expected.items():
        assert state[key].tolist() == pytest.approx([value]) and key not in parameters


def test_deepnorm_by_hand():
    """LN(a x + f) of one position: a = 2, x = (1, 3), f = (1, -1) gives LN(3, 5) = (-1, 1)."""
    layer = build("deepnorm").encoder.layers[0]
    layer.shortcut_scale.fill_(2.0)
    total = layer.residual_connection(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 3.0]))
    assert total.tolist() == [3.0, 5.0]
    assert torch.nn.functional.layer_norm(total, (2,)).tolist() == pytest.approx([-1, 1], abs=1e-4)


def test_rezero_by_hand():
    """x + b f: b = 0.5, x = (1, 3), f = (2, -2) gives (2, 2); at b = 0 it is x."""
    layer = build("rezero").decoder.layers[1]
    branch, shortcut = torch.tensor([2.0, -2.0]), torch.tensor([1.0, 3.0])
    assert layer.residual_connection(branch, shortcut).tolist() == [1.0, 3.0]
    layer.branch_scale.data.fill_(0.5)
    assert layer.residual_connection(branch, shortcut).tolist() == [2.0, 2.0]


def test_rezero_starts_as_the_identity_and_learns_its_scales_first():
    """The decoder's b first of all: nothing of the encoder except the embedding reaches the loss while they are 0."""
    model = build("rezero", **STILL)
    src, lengths, prev = reference.batch(padded=False)
    assert torch.equal(model.encoder(src)["encoder_out"][0], model.encoder.forward_embedding(src)[0].transpose(0, 1))
    logits(model, (src, lengths, prev)).square().mean().backward()
    for name, p in model.named_parameters():
        if ".layers." in name:
            assert bool(p.grad.any()) == (name.startswith("decoder") and name.endswith("branch_scale")), name


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_looklinear_starts_linear(activation):
    """f(x) = V W x with the first halves: [V, -V] relu([W, -W] x)."""
    model = build("looklinear", activation_fn=activation, decoder_ffn_embed_dim=48).double()
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    for layer, width in [(layer, 64) for layer in model.encoder.layers] + [
        (layer, 48) for layer in model.decoder.layers
    ]:
        half = width // 2
        found = layer.fc2(layer.activation_fn(layer.fc1(x)))
        expected = x @ layer.fc1.weight[:half].t() @ layer.fc2.weight[:, :half].t()
        # fairseq's gelu computes in single precision.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if activation == "relu" else 1e-6)


def test_b2t_by_hand():
    """One position, branches 0: x = (2, 6), LN(x) = (-1, 1), and the last norm gets LN(x) + x = (1, 7)."""
    layer = build("b2t", **STILL).encoder.layers[0]
    seen = []
    layer.final_layer_norm.register_forward_hook(lambda norm, inputs, output: seen.append(inputs[0] + norm.bottom))
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.zero_() if "norm" not in name else None
    x = torch.tensor([2.0, 6.0] * 16).view(1, 1, 32)
    torch.testing.assert_close(layer(x, None), torch.tensor([-1.0, 1.0] * 16).view(1, 1, 32), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen[0], torch.tensor([1.0, 7.0] * 16).view(1, 1, 32), rtol=0, atol=1e-4)
    assert layer.final_layer_norm.bottom is None


def test_looklinear_needs_an_even_width():
    with pytest.raises(AdminError, match="^--decoder-ffn-embed-dim is 63; --admin-scheme looklinear .* an even width"):
        build("looklinear", decoder_ffn_embed_dim=63)


A = {"encoder": 0.81 * 162 ** (1 / 16), "decoder": 6**0.25}
"""DeepNorm's constants at 3L-2L, in double precision."""
BY_HAND = {
    "post-ln": (reference.post_ln(), reference.post_ln()),
    "pre-ln": (reference.pre_ln, reference.pre_ln),
    "post-ln-pre-ln": (reference.post_ln(), reference.pre_ln),
    "deepnorm": (reference.post_ln(A["encoder"]), reference.post_ln(A["decoder"])),
    "rezero": (reference.no_ln, reference.no_ln),
    "rezero-post-ln": (reference.post_ln(), reference.post_ln()),
    **dict.fromkeys(("t-fixup", "t-fixup-code"), (reference.no_ln, reference.no_ln)),
    **dict.fromkeys(("b2t", "b2t-code"), (reference.b2t, reference.b2t)),
    **dict.fromkeys(("looklinear", "ds-init", "ds-init-code"), (reference.post_ln(), reference.post_ln())),
    "residual": (reference.ResiDual(), reference.ResiDual()),
    "peri-ln": (reference.peri_ln, reference.peri_ln),
    "keel": (reference.keel(6), reference.keel(6)),  # 2 · 3 and 3 · 2
}


@pytest.mark.parametrize("scheme", BY_HAND)
def test_whole_model_is_the_plain_twin(scheme):
    model = build(scheme, **STILL).double()
    if SCHEMES[scheme].branch_norm or SCHEMES[scheme].second_stream:
        reference.scattered(model)  # norms in a row at 1 and 0 can be taken for each other
    b = set_branch_scales(model) if SCHEMES[scheme].branch else None
    src, lengths, prev = reference.batch(padded=False)
    with torch.no_grad():
        found = logits(model, (src, lengths, prev))
        expected = reference.scheme_by_hand(model, src, prev, BY_HAND[scheme], b)
    # DeepNorm's a is stored in single precision, which is right to 6e-8.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if scheme == "deepnorm" else 1e-11)


def test_every_scheme_is_compared_with_its_twin():
    # admin's twins are in test_layers.py and test_profiling.py, fixup's in test_fixup.py
    assert BY_HAND.keys() | {"admin", "fixup"} == SCHEMES.keys()


# Initial weights -----------------------------------------------------------------------------------------------------


def golden():
    table = {}
    for line in GOLDEN.read_text().splitlines()[1:]:
        scheme, name, shape, mean, std, law = line.split("\t")
        table.setdefault(scheme, {})[name] = (tuple(map(int, shape.split("x"))), float(mean), float(std), law)
    return table


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_parameter_has_its_name_shape_and_initial_law(scheme):
    models = [dict(build(scheme, seed=100 + seed).named_parameters()) for seed in range(10)]
    expected = golden()[scheme]
    assert {name for name in models[0] if not name.endswith(".omega_delta")} == expected.keys()
    for name, (shape, mean, std, law) in expected.items():
        values = torch.stack([model[name].detach().double() for model in models])
        assert tuple(values[0].shape) == shape, name
        if law == "constant":
            assert torch.all(values == mean), name
            continue
        # Six standard errors, and the golden table's own: where it was sampled, over 100 seeds, a third of ours.
        n = values.numel() / (2 if scheme == "looklinear" and ".fc" in name else 1)  # one half repeats the other
        assert abs(values.mean().item() - mean) < 6 * 1.1 * std / math.sqrt(n), name
        assert values.std(correction=0).item() == pytest.approx(std, rel=6 * 1.25 / math.sqrt(2 * n)), name
        # Uniform values end at sqrt(3) standard deviations; of 320 normal ones some are beyond two.
        assert (values.abs().max().item() < 2 * std) == (law == "uniform"), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_feed_forward_weights_by_option(scheme):
    """Xavier's or today's law by --admin-ffn-init, whatever the scheme's own; all other weights keep theirs."""
    if SCHEMES[scheme].ffn is None:
        drawn, default = (dict(build(scheme, admin_ffn_init=law).named_parameters()) for law in ("xavier", None))
        assert all(torch.equal(tensor, drawn[name]) for name, tensor in default.items())
        with pytest.raises(AdminError, match=f"^--admin-ffn-init stock was given with --admin-scheme {scheme}, which"):
            build(scheme, admin_ffn_init="stock")
        return
    expected = {law: golden()[like] for law, like in (("xavier", "admin"), ("stock", "post-ln"))}
    for law in (*expected, None):
        models = [dict(build(scheme, admin_ffn_init=law, seed=seed).named_parameters()) for seed in range(10)]
        for name in [name for name in models[0] if ".fc" in name and "norm" not in name]:
            shape, _, std, kind = expected[law or SCHEMES[scheme].ffn][name]
            values = torch.stack([model[name].detach().double() for model in models])
            if scheme == "b2t-code" and name.endswith("weight"):
                std *= (3 if "encoder" in name else 2) ** -0.5
            assert tuple(values[0].shape) == shape and (kind == "constant") == (not values.any()), (law, name)
            # As in the test above; uniform values end at sqrt(3) standard deviations.
            assert values.std(correction=0).item() == pytest.approx(std, rel=6 * 1.25 / math.sqrt(2 * values.numel()))
            assert values.abs().max().item() <= math.sqrt(3) * std * (1 + 1e-2), (law, name)
        others = [name for name in models[0] if ".fc" not in name and "attn" in name]
        assert all(models[0][name].std() == 0 or models[0][name].any() for name in others)


def test_every_scheme_has_a_law():
    assert golden().keys() == SCHEMES.keys()


def test_t_fixup_scales_every_embedding_once():
    """Apart or tied: N(0, 1/C) times (9M)^(-1/4), 18^(-1/4) = 0.4855; padding is 0; not an untied output."""
    for tied in (True, False):
        models = [build("t-fixup", share_all_embeddings=tied, seed=seed) for seed in range(5)]
        for side in ("encoder", "decoder"):
            table = torch.cat([getattr(model, side).embed_tokens.weight for model in models])
            assert table.std().item() == pytest.approx(0.4855 * 32**-0.5, rel=0.03)
            assert not getattr(models[0], side).embed_tokens.weight[reference.PAD].any()
        output = torch.cat([model.decoder.output_projection.weight for model in models])
        assert output.std().item() == pytest.approx((0.4855 if tied else 1.0) * 32**-0.5, rel=0.03)


# fairseq's own -------------------------------------------------------------------------------------------------------


def trained(model, batch):
    """Logits, gradients and weights of two training steps with dropout."""
    torch.manual_seed(7)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        out = model(*batch)[0]
        torch.log_softmax(out.float(), -1)[..., 3].sum().neg().backward()
        optimizer.step()
        found[f"logits {step}"] = out.detach()
        found.update({f"gradient {step} {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {**found, **model.state_dict()}


@pytest.mark.parametrize("scheme", STOCK)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
        {"checkpoint_activations": True, "layernorm_embedding": True},
        {"no_cross_attention": True, "no_decoder_final_norm": True},
        {"share_all_embeddings": False, "quant_noise_pq": 0.3, "quant_noise_pq_block_size": 8},
        {"admin_ffn_init": "stock"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_stock_schemes_are_stock(scheme, options):
    """From the same seed: the same keys, weights, logits, gradients and trained weights, bit for bit."""
    stock = reference.build("transformer", **{**SMALL, **STOCK[scheme], "dropout": 0.1, **options})
    ours = build(scheme, **{"dropout": 0.1, **options})
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in stock.named_parameters()]
    for key, tensor in stock.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key
    expected, found = trained(stock, reference.batch()), trained(ours, reference.batch())
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    stock.eval(), ours.eval()
    assert torch.equal(logits(stock, reference.batch()), logits(ours, reference.batch()))


def test_admin_is_the_default_and_what_it_was():
    """Options saved before there was a choice have no scheme in them."""
    one, other = reference.build("transformer_admin", **SMALL), build("admin")
    assert "scheme" not in (provenance.decode(one.state_dict()[provenance.KEY]) or {})
    logits(one, reference.batch()), logits(other, reference.batch())
    assert list(one.state_dict()) == list(other.state_dict())
    for key, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


# Options and modes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_forward_is_generation_forward(scheme):
    model = build(scheme, **STILL)
    if SCHEMES[scheme].branch:
        set_branch_scales(model)
    src, lengths, prev = reference.batch(padded=False)
    training = logits(model, (src, lengths, prev))
    model.eval()
    with torch.no_grad():
        encoder_out = model.encoder(src, lengths)
        state = {}
        steps = [model.decoder(prev[:, : t + 1], encoder_out, incremental_state=state)[0] for t in range(prev.size(1))]
    # The matrix products have other shapes, so they may sum in another order: a few roundings of 6e-8 a layer.
    torch.testing.assert_close(torch.cat(steps, 1), training, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpointed_activations_change_nothing(scheme):
    plain, checkpointed = build(scheme, dropout=0.1), build(scheme, dropout=0.1, checkpoint_activations=True)
    batch = reference.batch()
    expected, found = (logits(model, batch) for model in (plain, checkpointed))
    assert torch.equal(expected, found)
    for out in (expected, found):
        torch.log_softmax(out, -1)[..., 3].mean().backward()
    gradients = dict(checkpointed.named_parameters())
    for name, p in plain.named_parameters():
        # A tied embedding's gradients are summed in another order, so rounding differs.
        torch.testing.assert_close(p.grad, gradients[name].grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layerdrop_and_embedding_norm(scheme):
    model = build(scheme, encoder_layerdrop=0.5, decoder_layerdrop=0.5, layernorm_embedding=True)
    found = trained(model, reference.batch())
    assert all(tensor.isfinite().all() for tensor in found.values())
    norms = [key for key in model.state_dict() if "layer_norm.weight" in key]
    assert bool(norms) == (SCHEMES[scheme].norm[0] != "none")
    assert "encoder.layernorm_embedding.weight" in model.state_dict()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision(scheme):
    model = build(scheme, **STILL)
    model.profiled = True
    expected = logits(model, reference.batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = logits(model, reference.batch()).float()
    # Logits are of the order of 1, and bfloat16 keeps 8 bits.
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    assert logits(model.half(), reference.batch()).dtype == torch.float16


# Checkpoints ---------------------------------------------------------------------------------------------------------


def tells(scheme):
    """The scheme that a scheme's checkpoint shows: those that only draw other weights are Post-LN."""
    return "post-ln" if scheme in ("looklinear", "ds-init", "ds-init-code") else scheme


@pytest.mark.parametrize("saved", SCHEMES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_load_into_their_own_scheme_only(saved, scheme):
    state = build(saved, seed=3).state_dict()
    model = build(scheme)
    if tells(saved) == tells(scheme):
        model.load_state_dict(state)
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in state.items())
    elif scheme == "admin" and tells(saved) == "post-ln":
        model.load_state_dict(state)
        assert provenance.decode(model.state_dict()[provenance.KEY])["rule"] == "stock checkpoint, omega = 1"
    elif scheme == "admin" and saved in STOCK:
        with pytest.raises(
            AdminError, match="the checkpoint is a Pre-LN Transformer .*; Admin takes Post-LN weights only"
        ):
            model.load_state_dict(state)
    else:
        message = f"^the checkpoint is of --admin-scheme {tells(saved)} and the model of --admin-scheme {scheme}. Give"
        with pytest.raises(AdminError, match=message):
            model.load_state_dict(state)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_record_names_the_scheme(scheme):
    model = build(scheme)
    state = model.state_dict()
    if SCHEMES[scheme].stock_layers:
        assert provenance.KEY not in state and model.profiled
    elif scheme != "admin":
        assert provenance.decode(state[provenance.KEY])["scheme"] == scheme and model.profiled
    assert state_dict.scheme(state) == tells(scheme)


def test_stock_checkpoints_load():
    for scheme, options in STOCK.items():
        state = reference.build("transformer", seed=4, **SMALL, **options).state_dict()
        model = build(scheme)
        model.load_state_dict(state)
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in state.items())


def test_scale_is_loaded_with_the_weights():
    """A pruned model keeps the a that it was trained with."""
    saved = build("deepnorm", seed=3)
    pruned = build("deepnorm", encoder_layers_to_keep="0,2")
    assert len(pruned.encoder.layers) == 2
    assert pruned.encoder.layers[0].shortcut_scale.item() != pytest.approx(A["encoder"])
    state = {k: v for k, v in saved.state_dict().items() if not k.startswith("encoder.layers.1.")}
    state = {k.replace("encoder.layers.2.", "encoder.layers.1."): v for k, v in state.items()}
    pruned.load_state_dict(state)
    assert pruned.encoder.layers[0].shortcut_scale.item() == pytest.approx(A["encoder"])


def test_omega_of_another_scheme(tmp_path, capsys):
    torch.save({"model": build("rezero-post-ln").state_dict()}, tmp_path / "c.pt")
    with pytest.raises(AdminError, match=r"c\.pt has no omega: it is not \(or no longer\) an Admin model"):
        arguments = cli.parse(["omega", str(tmp_path / "c.pt")])
        arguments.run(arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_ffn_init": "kaiming"}, "^--admin-ffn-init is kaiming; expected one of xavier, stock"),
        ({"admin_scheme": "sandwich"}, "^--admin-scheme is sandwich; expected one of admin, post-ln, pre-ln, "),
        (
            {"admin_scheme": "deepnorm", "admin_init": "log"},
            "^--admin-init log was given with --admin-scheme deepnorm, which has no omega to set. Leave one",
        ),
        (
            {"admin_scheme": "pre-ln", "encoder_normalize_before": True},
            "^--encoder-normalize-before .* was given, .* for Pre-LN give --admin-scheme pre-ln",
        ),
        ({"admin_scheme": "rezero", "scale_resids": True}, "^scale_resids was given"),
        ({"admin_scheme": "residual", "no_decoder_final_norm": True}, "^--no-decoder-final-norm .* second stream ends"),
        ({"admin_scheme": "keel", "cross_self_attention": True}, "^--cross-self-attention was given with --admin-"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_refusals(options, message):
    with pytest.raises(AdminError, match=message):
        reference.build("transformer_admin", **{**SMALL, **options})


# Whole runs ----------------------------------------------------------------------------------------------------------


def train(corpus, folder, *arguments):
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    fixed = ["--disable-validation", "--save-interval-updates", 6, "--optimizer", "adam", "--save-dir", folder]
    return run_module("fairseq_cli.train", corpus, *TRAIN, *fixed, *arguments, log=log)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_train_resume_generate(scheme: str, corpus: Path, tmp_path: Path, run: Callable[..., Run]):
    """Does a run resume from its checkpoint bit for bit, and does its model translate?"""
    option = ["--admin-scheme", scheme, *(["--admin-ffn-init", "xavier"] if scheme == "pre-ln" else [])]
    done = train(corpus, tmp_path / "whole", *option, "--max-update", 9)
    assert done.status == 0, done.output[-4000:]
    assert ("profiled by rule" in done.output) == (scheme == "admin")
    (tmp_path / "resumed").mkdir()
    (saved,) = (tmp_path / "whole").glob("checkpoint_*_6.pt")
    shutil.copy(saved, tmp_path / "resumed" / "checkpoint_last.pt")
    done = train(corpus, tmp_path / "resumed", *option, "--max-update", 9)
    assert done.status == 0, done.output[-4000:]
    whole, resumed = (files.read(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "resumed"))
    assert whole["optimizer_history"][-1]["num_updates"] == resumed["optimizer_history"][-1]["num_updates"] == 9
    assert whole["model"].keys() == resumed["model"].keys()
    for key, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][key]), key
    trained_scales = [tensor.item() for key, tensor in whole["model"].items() if key.endswith("branch_scale")]
    assert len(trained_scales) == (4 if SCHEMES[scheme].branch else 0) and all(trained_scales)
    path = tmp_path / "whole" / "checkpoint_last.pt"
    if scheme == "admin":  # as it was saved before there was a choice
        del whole["cfg"]["model"]["admin_scheme"]
        files.write(whole, path)
    given = ["--user-dir", "fairseq_admin", "--path", path, "--beam", 2, "--max-len-b", 5, "--cpu"]
    # fairseq's main branch otherwise leaves out the sentences short of a batch of 8, and its worker outlives the test.
    given += ["--required-batch-size-multiple", 1, "--num-workers", 0]
    done = run("fairseq_cli.generate", corpus, *given)
    assert done.status == 0 and len(re.findall("^H-", done.output, re.M)) == 20, done.output[-4000:]


def test_mismatch_on_the_command_line(corpus: Path, tmp_path: Path):
    """Are both schemes and the option named in one line?"""
    assert train(corpus, tmp_path / "run", "--admin-scheme", "rezero", "--max-update", 1).status == 0
    done = train(corpus, tmp_path / "run", "--admin-scheme", "deepnorm", "--max-update", 2)
    last = done.output.splitlines()[-1]
    assert done.status == 2 and "Traceback" not in done.output
    assert last.startswith(
        "fairseq-admin: the checkpoint is of --admin-scheme rezero and the model of --admin-scheme deep"
    )
