"""Models of one stack, the language model and the masked one: profiled as a plain loop does, loaded, left alone.

What they share with the translation model, and the schemes, are in test_schemes.py.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from types import SimpleNamespace

import language
import masked
import pytest
import reference
import torch
from fairseq.models.roberta import RobertaEncoder
from fairseq.models.transformer import TransformerDecoder
from kinds import KINDS, STILL, assert_equal, logits, omegas
from reference import PAD

import fairseq_admin
from fairseq_admin.errors import AdminError
from fairseq_admin.method import profiling, provenance, state_dict
from fairseq_admin.method.schemes import stacks_of

KIND = pytest.mark.parametrize("kind", [KINDS["language"], KINDS["masked"]], ids=["language", "masked"])


def pair(kind, **options):
    """Source and decoder input, of which a model of one stack has one."""
    words = kind.batch(**options)
    return words.get("encoder"), words.get("decoder")


# Profiling -----------------------------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("rule", ["reference", "paper"])
@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1}, {**STILL, "encoder_layerdrop": 0.9, "decoder_layerdrop": 0.9}],
    ids=["dropout", "layerdrop"],
)
def test_profile_against_the_layers_written_out(kind, rule, options):
    """Of padded sentences."""
    model, words = kind.build(**options), pair(kind)
    torch.manual_seed(3)
    measured = profiling.measure(model, *words, rule)
    torch.manual_seed(3)
    (expected,) = reference.profile_by_hand(model, *words, rule)
    assert len(expected) == 6 and max(expected) > 1.2
    # float32 activations of half a dozen sub-layers, each off by a few roundings of 6e-8.
    assert measured.tolist() == pytest.approx(expected, rel=2e-6)


@KIND
@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}])
def test_the_first_training_forward_profiles_and_no_other(kind, options):
    model, words = kind.build(**options).eval(), kind.batch()
    logits(model, words)
    assert set(omegas(model)) == {1.0} and not model.profiled
    logits(model.train(), words, seed=3)
    first, again = omegas(model), kind.build(**options)
    torch.manual_seed(3)
    assert first == profiling.measure(again, *pair(kind), "reference").tolist()
    logits(model, kind.batch(seed=9))
    assert omegas(model) == first and first[0] == 1.0 and len(set(first)) == 6
    record = provenance.decode(model.state_dict()[provenance.KEY])
    tokens = sum(int(it.ne(PAD).sum()) for it in words.values())
    assert record == {"rule": "reference", "tokens": tokens, "seed": 3, "version": fairseq_admin.__version__}
    other = kind.build(seed=2)
    other.load_state_dict(model.state_dict())
    logits(other, kind.batch(seed=9))
    assert omegas(other) == first
    assert [len(part) for part in state_dict.omegas(other.state_dict()).values()] == [6]


def test_budget_and_log(caplog):
    model, words = KINDS["language"].build(admin_profile_tokens=25), KINDS["language"].batch()
    with caplog.at_level("INFO"):
        logits(model, words)  # 11 words a sentence: two fit
    (line,) = [record.getMessage() for record in caplog.records if "profiled" in record.getMessage()]
    assert line.startswith("Admin: profiled by rule reference on 21 tokens in ")
    assert ": decoder 6 sub-layers, omega 1.000 to " in line


@KIND
@pytest.mark.parametrize("rule, omega", [("log", 1.6116105), ("constant", math.sqrt(6))])
def test_rules_by_depth_need_no_batch(kind, rule, omega):
    # log, S = 6: 7 / ln 7 = 3.5972884, less 1 = 2.5972884, root = 1.6116105.
    model = kind.build(admin_init=rule)
    assert model.profiled and omegas(model) == [pytest.approx(omega, abs=1e-6)] * 6


@KIND
def test_a_stack_that_trains_alone_is_refused(kind):
    model = kind.build()
    (stack,) = stacks_of(model).values()
    with pytest.raises(AdminError, match="whose first call profiles omega"):
        stack(*kind.batch().values())


# Checkpoints ---------------------------------------------------------------------------------------------------------


def older(state):
    """RoBERTa's state dict under the names that its published models have."""
    renamed = {}
    for key, tensor in state.items():
        key = key.replace("layernorm_embedding", "emb_layer_norm")
        renamed["decoder" + key[len("encoder") :] if key.startswith("encoder") else key] = tensor
    for layer in range(masked.LAYERS):
        attention = f"decoder.sentence_encoder.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [renamed.pop(f"{attention}{name}_proj.{kind}") for name in "qkv"]
            renamed[f"{attention}in_proj_{kind}"] = torch.cat(parts)
    return renamed


@pytest.mark.parametrize(("name", "names"), [("language", dict), ("masked", dict), ("masked", older)])
def test_stock_post_ln_loads_with_omega_1_and_the_same_function(name, names):
    kind = KINDS[name]
    stock, ours = kind.stock(seed=3).eval(), kind.build()
    ours.load_state_dict(names(stock.state_dict()))
    assert ours.profiled and provenance.decode(ours.state_dict()[provenance.KEY])["rule"].startswith("stock")
    logits(ours, kind.batch())
    assert set(omegas(ours)) == {1.0}
    assert torch.equal(logits(ours.eval(), kind.batch()), logits(stock, kind.batch()))


@KIND
def test_another_depth(kind):
    with pytest.raises(AdminError, match="the checkpoint's (en|de)coder has 3 layers and the model's has 2. Use"):
        kind.build(encoder_layers=2, decoder_layers=2).load_state_dict(kind.build().state_dict())


def test_classification_head():
    """What fine-tuning adds to RoBERTa: it trains over a loaded model, is saved, and loads again."""
    model, other = masked.build(), masked.build(seed=2)
    model(masked.batch())
    for each in (model, other):
        each.register_classification_head("mood", num_classes=3)
    other.load_state_dict(model.state_dict())
    assert omegas(other) == omegas(model)
    scores = [each.eval()(masked.batch(), classification_head_name="mood")[0] for each in (model, other)]
    assert torch.equal(*scores) and scores[0].shape == (8, 3)


# fairseq's own -------------------------------------------------------------------------------------------------------


@KIND
def test_building_one_leaves_fairseqs_own_as_it_was(kind):
    before = kind.stock()
    kind.build()
    assert_equal(before.state_dict(), kind.stock().state_dict())
    for side, expected in (("decoder", TransformerDecoder), ("encoder", RobertaEncoder)):
        assert type(getattr(kind.stock(), side, None)) in (expected, type(None))


def test_open_widths_follow_the_embedding():
    """fairseq's own default of 512 would put a projection before and after a narrower decoder."""
    model = language.build(decoder_input_dim=None, decoder_output_dim=None, **STILL)
    assert model.decoder.project_in_dim is None and model.decoder.output_projection.in_features == language.WIDTH


def test_the_options_given_stay_as_they_were():
    """They are saved in the checkpoint; normalize_before there would be refused on loading."""
    args = Namespace(**language.options("transformer_lm_admin", admin_scheme="pre-ln"))
    before, words = copy.deepcopy(vars(args)), reference.dictionary(10)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = type(language.build()).build_model(args, task)
    assert vars(args) == before and model.decoder.layer_norm is not None
