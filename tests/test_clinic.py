"""golden/clinic.pt, a checkpoint of the authors' own code, can be read, folded and fine-tuned.

The model is 2L-2L, width 16, trained for 8 updates that move every ω, even the first of each stack. The file also has a
batch and the log-probabilities that their code computed for it. golden/omega.py says where the program is that made it.
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

GOLDEN = Path(__file__).parent / "golden/clinic.pt"


@pytest.fixture(scope="module")
def theirs():
    return Checkpoint.read(GOLDEN)


@pytest.mark.parametrize("change", [lambda checkpoint: checkpoint, fold_checkpoint], ids=["read", "folded"])
def test_their_checkpoint_computes_the_same(theirs, change):
    """It computes the same. Each stack's first ω is a vector, which only folds into an untied embedding."""
    expected = theirs.state["extra_state"]["expected"]
    changed = change(theirs)
    (scores,) = log_probabilities(build(changed), [dict(zip(reference.INPUTS, expected["batch"]))])
    assert changed.kind == ("transformer_admin" if changed is theirs else "transformer")
    # Sums are computed in another order. When this was written, the results differed by 3e-6.
    torch.testing.assert_close(scores, expected["log_probabilities"], rtol=0, atol=2e-5)


def test_their_weights_are_trained_on(theirs):
    """Training continues from their weights, loaded by the names in the file, as with --finetune-from-model."""
    raw = torch.load(GOLDEN, weights_only=True)["model"]
    model = build(theirs)
    deltas = {name: omega.clone() for name, omega in model.named_parameters() if name.endswith("omega_delta")}
    model.load_state_dict(dict(raw), strict=True)
    assert model.profiled and len(deltas) == 8
    theirs_ratio = raw["decoder.layers.1.encoder_ratio_change"]
    torch.testing.assert_close(model.decoder.layers[1].encoder_attn_layer_norm.omega, theirs_ratio)
    model.train()(*theirs.state["extra_state"]["expected"]["batch"])[0].logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
