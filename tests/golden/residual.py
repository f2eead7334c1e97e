"""Makes the golden table of ResiDual's outputs, by the authors' code. From the folder tests:

    python -m golden.residual RESIDUAL

RESIDUAL is a checkout of microsoft/ResiDual at commit 8682f7510be105a0caf5b98a021e712f44f90ace, a plugin of fairseq.
residual.tsv has the first logits of every position of two sentences, one of them padded; without dropout. As in
omega.py, a formula gives every parameter and the batch, to their model here and to ours in the test.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerConfig
from golden import omega

TABLE = Path(__file__).with_name("residual.tsv")
WORDS, SHOWN = 100, 4
SIZES = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("embed_dim", 32), ("layers", 3))},
    **{f"{side}_ffn_embed_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source tokens, their lengths, and decoder input, of two sentences."""
    src, prev = omega.batch(padded=True)
    return src[:2], src[:2].ne(omega.PAD).sum(1), prev[:2]


def fill(model: torch.nn.Module) -> None:
    """Give every parameter its value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(omega.value(name, tuple(parameter.shape)))


def main(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    import resi_dual  # noqa: F401, PLC0415  (registers the model)

    widths = {f"decoder_{side}_dim": SIZES["decoder_embed_dim"] for side in ("input", "output")}
    args = Namespace(share_all_embeddings=True, dropout=0.0, attention_dropout=0.0, **SIZES, **widths)
    cfg = TransformerConfig.from_namespace(args)
    for name in ("enc_alpha", "dec_alpha", "enc_res_input_norm_scale", "dec_res_input_norm_scale"):
        setattr(cfg, name, 1.0)  # as in their configurations for IWSLT and WMT
    words = Dictionary()
    for word in range(WORDS):
        words.add_symbol(f"w{word}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY["resi_dual"].build_model(cfg, task)
    fill(model)
    logits = model(*batch())[0][..., :SHOWN]
    with open(TABLE, "w") as out:
        print("sentence", "position", *(f"logit_{i}" for i in range(SHOWN)), sep="\t", file=out)
        for sentence, rows in enumerate(logits.tolist()):
            for position, row in enumerate(rows):
                print(sentence, position, *(f"{value:.7g}" for value in row), sep="\t", file=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
