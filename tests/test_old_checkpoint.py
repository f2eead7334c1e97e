"""A checkpoint from before the package had sub-packages loads and computes the same function.

golden/flat_layout.pt was trained at commit d741641 (2L-2L, width 16, 8 updates) with `fairseq-train --arch
transformer_admin_tiny`. It also holds a batch and the log-probabilities that this commit computed for it.
"""

from __future__ import annotations

from pathlib import Path

import reference
import torch

from fairseq_admin.checkpoints.building import build
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.checkpoints.equivalence import log_probabilities
from fairseq_admin.checkpoints.fold import fold_checkpoint

GOLDEN = Path(__file__).parent / "golden/flat_layout.pt"


def test_a_checkpoint_from_before_the_rooms_computes_the_same():
    checkpoint = Checkpoint.read(GOLDEN)
    expected = checkpoint.state["extra_state"]["expected"]
    (scores,) = log_probabilities(build(checkpoint), [dict(zip(reference.INPUTS, expected["batch"]))])
    # Other versions of torch may sum in another order.
    torch.testing.assert_close(scores, expected["log_probabilities"], rtol=0, atol=1e-5)
    omegas = checkpoint.omegas
    assert [len(omegas[stack]) for stack in ("encoder", "decoder")] == [4, 6]


def test_a_folded_file_names_a_stock_criterion():
    """A folded file names a stock criterion: fairseq-validate builds it, and only the plugin registers ours."""
    checkpoint = Checkpoint.read(GOLDEN)
    checkpoint.state["cfg"]["criterion"]["_name"] = "label_smoothed_cross_entropy_fast"
    assert fold_checkpoint(checkpoint).state["args"].criterion == "label_smoothed_cross_entropy"
