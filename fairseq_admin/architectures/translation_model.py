"""The model `transformer_admin`: fairseq's Transformer with Admin or another scheme; and its `--arch` presets."""

from __future__ import annotations

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase

from ..method.schemes import SCHEMES
from ..method.stacks import AdminDecoder, AdminEncoder
from .config import TransformerAdminConfig, fill_sizes, flat_translation, nested
from .presets import register_presets
from .refusals import refuse_unsuitable
from .scheme_model import SchemeModel
from .shaped_pairs import shape_batches


@register_model("transformer_admin", dataclass=TransformerAdminConfig)
class TransformerAdminModel(SchemeModel, TransformerModelBase):
    """fairseq's Transformer with a scheme of the table in schemes.py, by default Admin.

    With Admin (Liu et al. 2020) the first forward in training mode profiles ω on its batch; then ω is trained. The
    state dict has the stock Transformer's entries, `omega_init` and `omega_delta` of every norm, and
    `admin_provenance`, which is zero until ω has been profiled. The first norm of a stack has no `omega_delta`. The
    state dict of a scheme over stock layers is that of a stock Transformer; for any other scheme, `admin_provenance`
    names the scheme.

    Example:
        >>> from argparse import Namespace
        >>> import torch
        >>> from fairseq.data import Dictionary
        >>> from fairseq_admin import TransformerAdminModel
        >>> words = Dictionary()
        >>> tokens = torch.tensor([[words.add_symbol(word) for word in ("ein", "Haus", "brennt")]])
        >>> task = Namespace(source_dictionary=words, target_dictionary=words)
        >>> sizes = {"encoder_layers": 3, "decoder_layers": 2, "encoder_embed_dim": 16, "encoder_attention_heads": 2}
        >>> model = TransformerAdminModel.build_model(Namespace(**sizes), task)
        >>> logits, _ = model(tokens, torch.tensor([3]), tokens)
        >>> logits.shape
        torch.Size([1, 3, 7])
        >>> omega = model.encoder.layers[2].final_layer_norm.omega
        >>> omega.shape, bool((omega > 1).all())
        (torch.Size([16]), True)

    Args:
        cfg: the options, as `build_model` completes them.
        encoder: a stack of the scheme's layers.
        decoder: a stack of the scheme's layers.
    """

    aligned = False
    """Whether the task loads alignments: its criterion then reads the last decoder layer's attention in training."""

    def __init__(self, cfg: TransformerConfig, encoder: AdminEncoder, decoder: AdminDecoder) -> None:
        super().__init__(cfg, encoder, decoder)
        self.args = cfg  # as fairseq's `transformer` has it
        self.set_up_scheme(cfg)

    @classmethod
    def add_args(cls, parser) -> None:
        # TransformerModelBase adds its own options here; fairseq does this for every other dataclass.
        super(TransformerModelBase, cls).add_args(parser)

    @classmethod
    def build_model(cls, cfg, task):
        transformer_cfg = nested(flat_translation(cfg))
        refuse_unsuitable(transformer_cfg)
        norm = SCHEMES[transformer_cfg.admin_scheme].norm
        for stack, place in zip((transformer_cfg.encoder, transformer_cfg.decoder), norm):
            stack.normalize_before = place == "before"
        model = super().build_model(transformer_cfg, task)
        if transformer_cfg.admin_fast == "graph" and hasattr(task, "load_dataset"):
            shape_batches(task)
        options = getattr(task, "cfg", None) or getattr(task, "args", None)
        model.aligned = getattr(options, "load_alignments", False)
        model.decoder.left_pad_target = str(getattr(options, "left_pad_target", False)) == "True"
        return model

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return AdminEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return AdminDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def forward(self, src_tokens, src_lengths, prev_output_tokens, **kwargs):
        """Compute what fairseq's Transformer computes.

        The first call in training mode first profiles ω on its batch.
        """
        self.before_forward(encoder=src_tokens, decoder=prev_output_tokens)
        kwargs.setdefault("return_all_hiddens", False)  # no decoder here reads the encoder's hidden states
        if self.aligned:
            kwargs.setdefault("alignment_layer", self.decoder.num_layers - 1)
        return super().forward(src_tokens, src_lengths, prev_output_tokens, **kwargs)


register_presets(
    "transformer_admin",
    TransformerAdminModel,
    fill_sizes,
    transformer_admin_6l={},
    transformer_admin_12l={"layers": 12},
    transformer_admin_18l={"layers": 18},
    transformer_admin_60l_12l={"encoder_layers": 60, "decoder_layers": 12},
    transformer_admin_iwslt_de_en={"ffn_embed_dim": 1024, "attention_heads": 4},
    transformer_admin_tiny={"layers": 2, "embed_dim": 64, "ffn_embed_dim": 128, "attention_heads": 4},
)
