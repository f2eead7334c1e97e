"""Make clinic.pt, a checkpoint written by the authors' code (see clinic.py). From the folder tests:

    python -m golden.clinic_checkpoint TRANSFORMER_CLINIC

The model is 2L-2L, width 16. It is profiled, then trained for 8 updates that are large enough to move every ω, even the
first of each stack. The file also holds a batch and the log-probabilities that their code computes for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from golden import clinic, omega

FILE = Path(__file__).with_name("clinic.pt")


def main(checkout: Path) -> None:
    clinic.enter(checkout)
    from fairseq import checkpoint_utils

    torch.manual_seed(1)
    sizes = {"layers": 2, "embed-dim": 16, "ffn-embed-dim": 32, "attention-heads": 2}
    options = [f"--{side}-{name}={size}" for side in ("encoder", "decoder") for name, size in sizes.items()]
    model = clinic.build("--arch=transformer", "--init-type=adaptive-profiling", "--no-save-optimizer-state", *options)
    src, prev = omega.batch(padded=True)
    omega.profiled(model, src, prev)
    args = model.encoder.layers[0].args
    args.init_type = "adaptive"  # options of their second run
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(8):
        scores = model.get_normalized_probs(model(src, src.ne(omega.PAD).sum(1), prev), log_probs=True)
        adam.zero_grad()
        scores[:, :-1].gather(2, prev[:, 1:, None]).mean().neg().backward()
        adam.step()
    batch = src[:4], src[:4].ne(omega.PAD).sum(1), prev[:4]
    with torch.no_grad():
        scores = model.eval().get_normalized_probs(model(*batch), log_probs=True)[prev[:4].ne(omega.PAD)]
    expected = {"batch": batch, "log_probabilities": scores}
    schedule = SimpleNamespace(state_dict=dict)
    state = (args, model.state_dict(), torch.nn.Module(), adam, schedule, 8)
    checkpoint_utils.save_state(FILE, *state, extra_state={"expected": expected})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
