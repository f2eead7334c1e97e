"""Fresh models to analyse: small, without dropout, feed-forward weights drawn alike in every scheme."""

from __future__ import annotations

from typing import Any

from fairseq_admin.analysis.sentences import Source
from fairseq_admin.analysis.subject import Fresh
from fairseq_admin.method.layers import xavier


class Equal(Fresh):
    """Feed-forward weights are Xavier-uniform, their biases 0, in every scheme, as Admin has them."""

    def make(self, seed: int = 0, **sizes: int) -> Any:
        model = super().make(seed, **sizes)
        for stack in (model.encoder, model.decoder):
            for layer in stack.layers:
                xavier(layer.fc1), xavier(layer.fc2)
        return model


def fresh(scheme: str, layers: int = 6, seed: int = 1, width: int = 64, tokens: int = 512, **options: Any) -> Equal:
    """A model on random words."""
    sizes = {f"{side}_layers": layers for side in ("encoder", "decoder")}
    sizes |= {"encoder_embed_dim": width, "encoder_ffn_embed_dim": 2 * width, "share_all_embeddings": True}
    sizes |= {"admin_scheme": scheme, "dropout": 0.0, **options}
    return Equal("transformer_admin_tiny", sizes, Source(None, "valid", tokens, seed))
