"""Stock weights in our models, and features of one-stack models only: language model and masked language model.

test_schemes.py and test_profiling.py test their common features with the translation model.
"""

from __future__ import annotations

import language
import pytest
import torch
from fairseq.models.roberta import RobertaEncoder
from fairseq.models.transformer import TransformerDecoder
from kinds import KINDS, STILL, assert_equal, logits, omegas

from fairseq_admin.errors import AdminError

KIND = pytest.mark.parametrize("kind", [KINDS["language"], KINDS["masked"]], ids=["language", "masked"])


# Checkpoints ---------------------------------------------------------------------------------------------------------


def older(state):
    """RoBERTa's state dict under the names in its published models."""
    renamed = {}
    for key, tensor in state.items():
        key = key.replace("layernorm_embedding", "emb_layer_norm")
        renamed["decoder" + key[len("encoder") :] if key.startswith("encoder") else key] = tensor
    for layer in range(language.LAYERS):
        attention = f"decoder.sentence_encoder.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [renamed.pop(f"{attention}{name}_proj.{kind}") for name in "qkv"]
            renamed[f"{attention}in_proj_{kind}"] = torch.cat(parts)
    return renamed


def test_a_published_roberta_loads():
    kind = KINDS["masked"]
    ours, stock = kind.build().eval(), kind.stock(seed=3).eval()
    ours.load_state_dict(older(stock.state_dict()))
    assert ours.profiled and torch.equal(logits(ours, kind.batch()), logits(stock, kind.batch()))


@pytest.mark.parametrize(
    ("name", "side"),
    [("translation", "encoder"), ("translation", "decoder"), ("language", "decoder"), ("masked", "encoder")],
)
def test_another_depth_is_refused(name, side):
    layers = {f"{side}_layers": 4}
    message = f"the checkpoint's {side} has 4 layers and the model's has [23]. Use .*--{side}-layers 4"
    with pytest.raises(AdminError, match=message):
        KINDS[name].build().load_state_dict(KINDS[name].build(**layers).state_dict())


def test_a_classification_head_is_trained_and_loaded():
    """The head that fine-tuning adds to RoBERTa trains on a loaded model, is saved, and loads again."""
    model, other = language.build_masked(), language.build_masked(seed=2)
    model(language.batch())
    for each in (model, other):
        each.register_classification_head("mood", num_classes=3)
    other.load_state_dict(model.state_dict())
    assert omegas(other) == omegas(model)
    scores = [each.eval()(language.batch(), classification_head_name="mood")[0] for each in (model, other)]
    assert torch.equal(*scores) and scores[0].shape == (8, 3)


# fairseq's own -------------------------------------------------------------------------------------------------------


@KIND
def test_building_one_leaves_fairseqs_own_as_it_was(kind):
    stock = kind.stock()
    kind.build()
    assert_equal(stock.state_dict(), kind.stock().state_dict())
    for side, expected in (("decoder", TransformerDecoder), ("encoder", RobertaEncoder)):
        assert type(getattr(kind.stock(), side, None)) in (expected, type(None))


def test_open_widths_follow_the_embedding():
    """Unset widths follow the embedding. fairseq's default of 512 would add projections around a narrower decoder."""
    model = language.build(decoder_input_dim=None, decoder_output_dim=None, **STILL)
    assert model.decoder.project_in_dim is None and model.decoder.output_projection.in_features == language.WIDTH
