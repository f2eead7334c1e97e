"""Small fresh models to analyse, without dropout. Every scheme draws feed-forward weights in the same way."""

from __future__ import annotations

from typing import Any

from fairseq_admin.analysis.fresh import Fresh
from fairseq_admin.analysis.subject import Source


def fresh(scheme: str, layers: int = 6, seed: int = 1, width: int = 64, tokens: int = 512, **options: Any) -> Fresh:
    """A fresh model, ready for analysis on random words."""
    sizes = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    sizes |= {"encoder_embed_dim": width, "encoder_ffn_embed_dim": 2 * width, "share_all_embeddings": True}
    sizes |= {"admin_scheme": scheme, "dropout": 0.0, "admin_ffn_init": "xavier", **options}
    return Fresh("transformer_admin_tiny", sizes, Source(None, "valid", tokens, seed))
