"""Checkpoints from before the package had sub-packages, and of the authors' own code, compute the same function.

golden/flat_layout.pt was trained at commit d741641 with `fairseq-train --arch transformer_admin_tiny`. golden/clinic.pt
is of the authors' code: it has moved every ω, even the first of each stack, and golden/omega.py says where the program
is that made the file. Both models are 2L-2L of width 16, after 8 updates. Each file holds a batch, and the
log-probabilities that the code that trained the model computed for that batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import torch

from fairseq_admin.checkpoints.building import build
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.checkpoints.equivalence import log_probabilities
from fairseq_admin.checkpoints.fold import fold_checkpoint

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["flat_layout.pt", "clinic.pt"])
@pytest.mark.parametrize("fold", [False, True])
def test_the_checkpoint_computes_the_same(name, fold):
    """Each stack's first ω is a vector in the authors' checkpoint, which only folds into an untied embedding."""
    checkpoint = Checkpoint.read(GOLDEN / name)
    assert [len(checkpoint.omegas[stack]) for stack in ("encoder", "decoder")] == [4, 6]
    expected = checkpoint.state["extra_state"]["expected"]
    model = build(fold_checkpoint(checkpoint) if fold else checkpoint)
    (scores,) = log_probabilities(model, [dict(zip(reference.INPUTS, expected["batch"]))])
    assert type(model).__name__ == ("TransformerModel" if fold else "TransformerAdminModel")
    # Sums in another order differ; by 3e-6 when this was written.
    torch.testing.assert_close(scores, expected["log_probabilities"], rtol=0, atol=1e-5)


def test_a_folded_file_names_a_stock_criterion():
    """A folded file names a stock criterion: fairseq-validate builds it, and only the plugin registers ours."""
    checkpoint = Checkpoint.read(GOLDEN / "flat_layout.pt")
    checkpoint.state["cfg"]["criterion"] |= {"_name": "label_smoothed_cross_entropy_fast", "label_smoothing": 0.3}
    args = fold_checkpoint(checkpoint).state["args"]
    assert (args.criterion, args.label_smoothing) == ("label_smoothed_cross_entropy", 0.3)


def test_the_authors_weights_are_trained_on():
    """Training continues from their weights, loaded by the names in the file, as with --finetune-from-model."""
    checkpoint, raw = (
        Checkpoint.read(GOLDEN / "clinic.pt"),
        torch.load(GOLDEN / "clinic.pt", weights_only=True)["model"],
    )
    model = build(checkpoint)
    model.load_state_dict(dict(raw), strict=True)
    assert model.profiled and len([name for name, _ in model.named_parameters() if name.endswith("omega_delta")]) == 8
    theirs = raw["decoder.layers.1.encoder_ratio_change"]
    torch.testing.assert_close(model.decoder.layers[1].encoder_attn_layer_norm.omega, theirs)
    model.train()(*checkpoint.state["extra_state"]["expected"]["batch"])[0].logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
