"""Checkpoint: its properties for every kind of model, its check for damage, and the model built from it."""

from __future__ import annotations

from argparse import Namespace

import language
import pytest
import reference
import torch
from kinds import assert_equal

from fairseq_admin.checkpoints.building import build, check_weights
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.checkpoints.fold import FOLDABLE, fold_checkpoint
from fairseq_admin.method.schemes import SCHEMES

BOTH = ("encoder", "decoder")
ADMIN = {"admin_init": "log", "admin_profile_tokens": 8192, "admin_max_skipped_updates": 100, "update_freq": [1]}


def translation(arch, **options):
    sizes = {**reference.TINY, "share_all_embeddings": True, **options}
    ours = ADMIN if arch == "transformer_admin" else {}
    return reference.build(arch, **sizes, **({"admin_init": "log"} if ours else {})), {**sizes, **ours}


def language_model(arch, **options):
    return language.build(arch, **options), language.options(arch, **options)


def masked_language_model(arch, **options):
    ours = {**ADMIN, "admin_init": "reference"} if arch == "masked_lm_admin" else {}
    return language.build_masked(arch, **options), {**language.MASKED, **ours, **options}


KINDS = [
    (translation, "transformer_admin", {}, "admin", BOTH, 2),
    (translation, "transformer", {}, "post-ln", BOTH, 2),
    (translation, "transformer", {f"{side}_normalize_before": True for side in BOTH}, "pre-ln", BOTH, 2),
    (language_model, "transformer_lm_admin", {}, "admin", ("decoder",), 3),
    (language_model, "transformer_lm_admin", {"admin_scheme": "deepnorm"}, "deepnorm", ("decoder",), 3),
    (language_model, "transformer_lm", {}, "post-ln", ("decoder",), 3),
    (masked_language_model, "masked_lm_admin", {}, "admin", ("encoder",), 3),
    (masked_language_model, "roberta", {}, "post-ln", ("encoder",), 3),
]


def checkpoint_of(kind, arch, options):
    """A checkpoint as fairseq-train's command line writes it."""
    model, flat = kind(arch, **options)
    args = Namespace(**{**flat, "arch": arch, "task": "any", "criterion": "any"})
    return Checkpoint({"args": args, "model": model.state_dict(), "optimizer_history": [{"num_updates": 7}]})


@pytest.mark.parametrize(("kind", "arch", "options", "scheme", "stacks", "layers"), KINDS)
def test_every_kind_tells_what_it_is_and_is_built_again(kind, arch, options, scheme, stacks, layers):
    checkpoint = checkpoint_of(kind, arch, options)
    properties = checkpoint.kind, checkpoint.scheme_name, checkpoint.stacks, checkpoint.updates, checkpoint.folded
    assert properties == (arch, scheme, stacks, 7, False)
    assert checkpoint.layers == dict.fromkeys(stacks, layers) and checkpoint.vocabulary == dict.fromkeys(stacks, 104)
    assert bool(checkpoint.omegas) == checkpoint.scheme.omega == (scheme == "admin")
    state = torch.get_rng_state()
    check_weights(checkpoint)
    assert torch.equal(torch.get_rng_state(), state)  # draw no initial weights
    model = build(checkpoint)
    assert not model.training
    assert_equal(model.state_dict(), checkpoint.weights)
    assert checkpoint.trained_as == (scheme, SCHEMES[scheme].title)
    if arch in FOLDABLE:
        assert fold_checkpoint(checkpoint).trained_as == (scheme, f"{SCHEMES[scheme].title}, folded")
    if scheme == "admin":  # a checkpoint from before the choice of schemes
        vars(checkpoint.state["args"]).pop("admin_scheme", None)
        assert Checkpoint(checkpoint.state).scheme_name == "admin"


def test_checked_weights_survive_an_overwritten_file(tmp_path):
    """A checked file stays valid if a training overwrites it. Reading an overwritten mapped file would crash Python."""
    checkpoint_of(*KINDS[0][:3]).write(tmp_path / "c.pt")
    checkpoint = Checkpoint.read(tmp_path / "c.pt")
    check_weights(checkpoint)
    expected = {key: tensor.clone() for key, tensor in checkpoint.weights.items()}
    (tmp_path / "c.pt").write_bytes(b"")
    assert_equal(checkpoint.weights, expected)
