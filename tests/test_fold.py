"""The fold: its formulas, the same function in every configuration, files that stock fairseq loads, and refusals."""

from __future__ import annotations

import copy

import pytest
import reference
import torch
from conftest import python
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fairseq_admin import cli
from fairseq_admin.checkpoints import equivalence, fold
from fairseq_admin.checkpoints.building import build
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance
from fairseq_admin.method.norms import shortcut_norms

TASK = {"_name": "translation", "data": "nowhere", "source_lang": "a", "target_lang": "b", "left_pad_source": True}
TASK.update(dataset_impl=None, train_subset="train", required_seq_len_multiple=1)


def scramble(model, low=-3.0, high=3.0, seed=1):
    """Set random norm weights, and trainable ω of either sign, log-uniform in 10^low .. 10^high."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            for norm in shortcut_norms(stack):
                for parameter in (norm.weight, norm.bias):
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
                if norm.omega_delta is not None:
                    size = 10 ** (low + (high - low) * torch.rand(norm.omega_init.shape, generator=generator))
                    sign = torch.randint(0, 2, size.shape, generator=generator) * 2 - 1
                    norm.omega_init.copy_(0.75 * size * sign)
                    norm.omega_delta.copy_(0.25 * size * sign)
    return model


def state_of(model, arch="transformer_admin", **options):
    """A checkpoint in fairseq-train's format, of a model that `reference.build` made with these options."""
    flat = {"_name": arch, "share_all_embeddings": True, "max_source_positions": 256, "max_target_positions": 256}
    flat.update(admin_init="reference", admin_profile_tokens=8192, admin_max_skipped_updates=100, update_freq=[1])
    return {
        "args": None,
        "cfg": {"model": {**flat, **options}, "task": dict(TASK), "criterion": {"_name": "cross_entropy"}},
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 7}],
        "last_optimizer_state": {"state": {0: torch.ones(3)}},
    }


def tiny(seed=1, low=-3.0, high=3.0, **options):
    sizes = {**reference.TINY, **options}
    model = scramble(reference.build("transformer_admin", seed=seed, **sizes), low, high, seed)
    return state_of(model, **sizes)


# -- formula ---------------------------------------------------------------------------------------------------------


def test_fold_by_hand():
    """Sub-layer 2 of an encoder: ω = 4 scales the norm before it and divides fc1's columns; c = 2 halves out_proj."""
    layer = "encoder.layers.0"
    state = {
        f"{layer}.self_attn.out_proj.weight": torch.tensor([[6.0, 1.0]]),
        f"{layer}.self_attn.out_proj.bias": torch.tensor([3.0]),
        f"{layer}.self_attn_layer_norm.weight": torch.tensor([2.0, 1.0]),
        f"{layer}.self_attn_layer_norm.bias": torch.tensor([1.0, -3.0]),
        f"{layer}.self_attn_layer_norm.omega_init": torch.tensor([2.0, 2.0]),
        f"{layer}.fc1.weight": torch.tensor([[6.0, 5.0], [1.0, 1.0]]),
        f"{layer}.fc1.bias": torch.tensor([7.0, 8.0]),
        f"{layer}.final_layer_norm.weight": torch.tensor([1.0, 1.0]),
        f"{layer}.final_layer_norm.omega_init": torch.tensor([1.0, 1.0]),
        f"{layer}.final_layer_norm.omega_delta": torch.tensor([3.0, -3.0]),  # ω = (4, -2)
        provenance.KEY: torch.zeros(256),
        "encoder.embed_positions._float_tensor": torch.zeros(1),  # fairseq 0.12.2 writes it, no version reads it
    }
    copied = copy.deepcopy(state)
    folded = {
        key.replace(f"{layer}.", ""): tensor.tolist()
        for key, tensor in fold.fold_weights(Checkpoint({"model": state})).items()
    }
    assert folded == {
        "self_attn.out_proj.weight": [[3.0, 0.5]],
        "self_attn.out_proj.bias": [1.5],
        "self_attn_layer_norm.weight": [8.0, -2.0],
        "self_attn_layer_norm.bias": [4.0, 6.0],
        "fc1.weight": [[1.5, -2.5], [0.25, -0.5]],
        "fc1.bias": [7.0, 8.0],
        "final_layer_norm.weight": [1.0, 1.0],
    }
    assert all(torch.equal(state[key], copied[key]) for key in state)


# -- the same function -----------------------------------------------------------------------------------------------


def difference(state, tmp_path, **options):
    """Fold, write, read and compare. Returns the largest difference of log-probabilities."""
    unfolded = Checkpoint(state)
    fold.fold_checkpoint(unfolded, **options).write(tmp_path / "folded.pt")
    folded = Checkpoint.read(tmp_path / "folded.pt")
    stock = build(folded)
    assert type(stock).__name__ == "TransformerModel" and not any("omega" in key for key in stock.state_dict())
    return equivalence.verify(unfolded, folded)[0]


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "encoder_layers": st.integers(1, 4),
        "decoder_layers": st.integers(1, 4),
        "encoder_attention_heads": st.sampled_from([1, 4]),
        "decoder_ffn_embed_dim": st.sampled_from([32, 128]),
        "activation_fn": st.sampled_from(["relu", "gelu", "tanh"]),
        "admin_init": st.sampled_from(["reference", "paper", "log", "constant", "linear", "120"]),
        "layernorm_embedding": st.booleans(),
        "encoder_learned_pos": st.booleans(),
        "decoder_learned_pos": st.booleans(),
        "no_scale_embedding": st.booleans(),
        "no_cross_attention": st.sampled_from([False, False, True]),
        "tied": st.sampled_from(["all", "decoder", "none"]),
        "half": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configuration=CONFIGURATIONS, seed=st.integers(1, 1000), low=st.sampled_from([-3.0, 0.0]))
def test_the_fold_is_the_same_function(tmp_path_factory, configuration, seed, low):
    """Any foldable options, ω over six orders of magnitude with either sign, and weights saved in half precision."""
    options = dict(configuration)
    tied, half = options.pop("tied"), options.pop("half")
    learned = options["encoder_learned_pos"] or options["decoder_learned_pos"]
    unscaled = options["no_scale_embedding"] and learned and not options["layernorm_embedding"]
    assume(not (unscaled and options["admin_init"] not in ("reference", "paper")))  # the next test covers this
    options["share_all_embeddings"] = tied == "all"
    options["share_decoder_input_output_embed"] = tied == "decoder"
    state = tiny(seed, low, **options)
    if half:  # as --fp16 saves it: compare with the rounded weights
        state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    # The promised bound. float32 alone rounds each model's log-probabilities by 1e-6 to 4e-6.
    assert difference(state, tmp_path_factory.mktemp("fold")) <= 1e-4


def test_a_constant_on_a_tiny_embedding_is_not_exact(tmp_path):
    """With unscaled embeddings and learned positions, Var[x_0] is 1/64, and LayerNorm's eps matters. It cannot fold."""
    shallow = {"encoder_layers": 1, "decoder_layers": 1, "admin_init": "constant", "no_scale_embedding": True}
    shallow |= {"encoder_learned_pos": True, "decoder_learned_pos": True}
    assert 1e-4 < difference(tiny(**shallow), tmp_path) < 1e-2
    normalised = tiny(**shallow, layernorm_embedding=True)
    for stack in ("encoder", "decoder"):
        normalised["model"][f"{stack}.layernorm_embedding.weight"] *= 0.1
    assert difference(normalised, tmp_path) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "decoder", "low"), [(60, 12, -3.0), (1, 18, 0.0)])
def test_deep_models_fold_to_the_same_function(tmp_path, encoder, decoder, low):
    state = tiny(encoder_layers=encoder, decoder_layers=decoder, low=low)
    assert difference(state, tmp_path) <= 1e-4


# -- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_plain_and_its_options_are_attributes(tmp_path):
    """The file loads with weights_only, without the plugin. Only a note in it mentions Admin."""
    state = tiny()
    fold.fold_checkpoint(Checkpoint(state)).write(tmp_path / "folded.pt")
    program = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
args = state["args"]
assert args.arch == args._name == "transformer_wmt_en_de" and args.task == "translation" and args.source_lang == "a"
assert (args.encoder_layers, args.decoder_layers, args.encoder_embed_dim) == (2, 2, 64)
assert vars(args) == dict(args)
assert not [name for name in vars(args) if name.startswith("admin") or name == "update_freq"]
assert state["extra_state"]["admin_fold"]["provenance"] is None and "last_optimizer_state" not in state
assert state["optimizer_history"][-1]["num_updates"] == 7
model = state["model"]
assert model["encoder.embed_tokens.weight"].data_ptr() == model["decoder.output_projection.weight"].data_ptr()
assert {tensor.dtype for tensor in model.values()} == {torch.float32}
"""
    python(program, tmp_path / "folded.pt")


def test_pretrained_embeddings_and_pruning_are_not_asked_for_again(tmp_path):
    state = tiny()
    state["cfg"]["model"].update(encoder_embed_path="gone.txt", encoder_layers_to_keep="0,1", encoder_layers=4)
    args = fold.fold_checkpoint(Checkpoint(state)).state["args"]
    assert args.encoder_embed_path is None and args.encoder_layers_to_keep is None and args.encoder_layers == 2
    assert difference(state, tmp_path) <= 1e-4


def scheme(name, **options):
    """A checkpoint of another scheme. No parameter keeps its initial 0 or 1."""
    sizes = {**reference.TINY, "encoder_layers": 3, "admin_scheme": name, **options}
    return state_of(reference.scattered(reference.build("transformer_admin", **sizes)), **sizes)


STOCK = {"looklinear": "after after", "ds-init": "after after", "pre-ln": "before before", "post-ln": "after after"}
STOCK["post-ln-pre-ln"] = "after before"


@pytest.mark.parametrize("name", [*STOCK, "deepnorm", "rezero-post-ln", "pre-ln-by-depth"])
@pytest.mark.parametrize(
    "options", [{}, {"layernorm_embedding": True}, {"no_cross_attention": True}, {"scale_attn": True, "scale_fc": True}]
)
def test_other_schemes_that_stock_fairseq_can_compute(tmp_path, name, options):
    state = scheme(name, **options)
    assert difference(state, tmp_path) <= 1e-4
    folded = fold.fold_checkpoint(Checkpoint(state)).state
    places = {**STOCK, "pre-ln-by-depth": "before before"}.get(name, "after after").split()
    for stack, place in zip(("encoder", "decoder"), places):
        assert getattr(folded["args"], f"{stack}_normalize_before") is (place == "before")
    assert folded["extra_state"]["admin_fold"]["scheme"] == name
    if name in STOCK:
        assert all(torch.equal(tensor, state["model"][key]) for key, tensor in folded["model"].items())


def test_sizes_of_a_preset_are_written_out(tmp_path):
    """hydra stores a preset's name (transformer_admin_18l) without sizes. Stock fairseq needs sizes."""
    state = tiny(share_decoder_input_output_embed=False)
    names = ("_name", "admin_init", "update_freq", "admin_profile_tokens", "admin_max_skipped_updates")
    state["cfg"]["model"] = {name: state["cfg"]["model"][name] for name in names}
    state["cfg"]["model"].update(_name="transformer_admin_tiny", share_all_embeddings=True, encoder_layers=None)
    args = fold.fold_checkpoint(Checkpoint(state)).state["args"]
    assert (args.encoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads) == (64, 128, 4)
    assert args.max_source_positions == 1024 and args.encoder_normalize_before is False
    assert difference(state, tmp_path) <= 1e-4


# -- refusals --------------------------------------------------------------------------------------------------------


def test_omega_near_zero_is_refused_or_clamped(tmp_path):
    state = tiny(low=-1.0, high=1.0)
    norm = "decoder.layers.1.final_layer_norm"
    state["model"][f"{norm}.omega_init"][17:19] = 0.0
    state["model"][f"{norm}.omega_delta"][17:19] = torch.tensor([-2e-9, 0.0])
    message = (
        r"omega of decoder\.layers\.1\.final_layer_norm is 0 at channel 18; folding divides by it.*--min-omega 1e-06"
    )
    with pytest.raises(AdminError, match=message):
        fold.fold_checkpoint(Checkpoint(state))
    folded = fold.fold_weights(Checkpoint(state), 1e-3, clamp=True)
    weight = state["model"]["decoder.layers.1.encoder_attn_layer_norm.weight"].double()
    folded_weight = folded["decoder.layers.1.encoder_attn_layer_norm.weight"]
    torch.testing.assert_close((folded_weight / weight)[17:19], torch.tensor([-1e-3, 1e-3], dtype=torch.float64))
    assert difference(state, tmp_path, min_omega=1e-6) <= 1e-4


FIRST = {"a vector": torch.linspace(0.5, 2, 64), "negative": torch.full((64,), -1.0)}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_a_first_omega_that_is_a_vector_is_folded_into_the_embedding(tmp_path, first, learned):
    """In a model without layer 0, the first ω is a vector.

    The fold scales words and positions, so embeddings become untied.
    """
    state = tiny(encoder_learned_pos=learned, share_all_embeddings=True)
    for stack in ("encoder", "decoder"):
        state["model"][f"{stack}.layers.0.self_attn_layer_norm.omega_init"].copy_(FIRST[first])
    assert difference(state, tmp_path) <= 1e-4


def test_a_first_omega_over_adaptive_inputs_is_refused():
    state = tiny()
    state["model"]["encoder.layers.0.self_attn_layer_norm.omega_init"].copy_(FIRST["a vector"])
    checkpoint = Checkpoint(state)
    checkpoint.weights["encoder.embed_tokens.weight"] = torch.ones(12, 32)
    with pytest.raises(AdminError, match="the first omega of the encoder is not one positive number"):
        fold.fold_weights(checkpoint)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_written_file_is_compared(tmp_path, capsys, monkeypatch):
    """The written file is compared, not the model in memory. If its weights differ, the file is deleted."""
    torch.save(tiny(), tmp_path / "average.pt")
    save, norm = torch.save, "decoder.layers.1.final_layer_norm.weight"

    def changed(state, path):
        save({**state, "model": {**state["model"], norm: 1.01 * state["model"][norm]}}, path)

    monkeypatch.setattr(torch, "save", changed)
    assert cli.main(["fold", str(tmp_path / "average.pt"), "-o", str(tmp_path / "folded.pt")]) == 2
    err = capsys.readouterr().err
    assert "folded is not the same: log-probabilities of" in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["average.pt"]
