"""The model `transformer_lm_admin`: fairseq's decoder-only language model with Admin or another scheme."""

from __future__ import annotations

from unittest.mock import patch

from fairseq.models import register_model, transformer_lm
from fairseq.models.transformer_lm import TransformerLanguageModel

from ..method.schemes import SCHEMES
from ..method.stacks import AdminDecoder
from .config import TransformerLMAdminConfig, fill_decoder, flat_decoder, nested
from .presets import register_presets
from .refusals import refuse_unsuitable
from .scheme_model import SchemeModel


def _decoder(args, dictionary, embed_tokens, no_encoder_attn=True) -> AdminDecoder:
    """Our decoder with the signature of fairseq's TransformerDecoder, which takes flat options."""
    cfg = nested(args, ["decoder"])
    decoder = AdminDecoder(cfg, dictionary, embed_tokens, no_encoder_attn)
    decoder.args = args
    return decoder


@register_model("transformer_lm_admin", dataclass=TransformerLMAdminConfig)
class TransformerLMAdminModel(SchemeModel, TransformerLanguageModel):
    """fairseq's decoder-only Transformer with a scheme of the table in schemes.py, by default Admin.

    Task, criteria and commands are fairseq's for language models. The state dict is that of fairseq's
    `transformer_lm` with the entries that `TransformerAdminModel` adds.

    Args:
        decoder: a stack of the scheme's layers.
    """

    def __init__(self, decoder: AdminDecoder) -> None:
        super().__init__(decoder)
        self.cfg = decoder.cfg
        self.set_up_scheme(self.cfg)

    @classmethod
    def build_model(cls, cfg, task):
        args = flat_decoder(cfg)
        refuse_unsuitable(nested(args, ["decoder"]), ["decoder"])
        args.decoder_normalize_before = SCHEMES[args.admin_scheme].norm[1] == "before"
        # fairseq names the class of its decoder in build_model and has no hook for another.
        with patch.object(transformer_lm, "TransformerDecoder", _decoder):
            return super().build_model(args, task)

    def forward(self, src_tokens, **kwargs):
        """Compute what fairseq's language model computes.

        The first call in training mode first profiles ω on its batch.
        """
        self.before_forward(decoder=src_tokens)
        return super().forward(src_tokens, **kwargs)


# The sizes of fairseq's transformer_lm_gpt, _gpt2_small and _gpt2_big.
register_presets(
    "transformer_lm_admin",
    TransformerLMAdminModel,
    fill_decoder,
    transformer_lm_admin_12l={"layers": 12, "embed_dim": 768, "ffn_embed_dim": 3072, "attention_heads": 12},
    transformer_lm_admin_24l={"layers": 24, "embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16},
    transformer_lm_admin_48l={"layers": 48, "embed_dim": 1600, "ffn_embed_dim": 6400, "attention_heads": 25},
    transformer_lm_admin_tiny={"layers": 2, "embed_dim": 64, "ffn_embed_dim": 128, "attention_heads": 4},
)
