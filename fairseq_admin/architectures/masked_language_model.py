"""The model `masked_lm_admin`: fairseq's RoBERTa, which fills in masked words, with Admin or another scheme."""

from __future__ import annotations

from argparse import Namespace

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.modules.transformer_sentence_encoder import init_bert_params

from ..method.layers import ffn_law, xavier
from ..method.schemes import SCHEMES, layers_of
from ..method.stacks import AdminEncoder
from .config import AdminOptions, fill_masked, flat_encoder, nested
from .presets import register_presets
from .refusals import refuse_unsuitable
from .scheme_model import SchemeModel


class AdminMaskedEncoder(RobertaEncoder):
    """RoBERTa's encoder and head, over the layers of a scheme."""

    def build_encoder(self, args, dictionary, embed_tokens):
        cfg = nested(args, ["encoder"])
        encoder = AdminEncoder(cfg, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


@register_model("masked_lm_admin")
class MaskedLMAdminModel(SchemeModel, RobertaModel):
    """fairseq's RoBERTa with a scheme of the table in schemes.py, by default Admin.

    Task, criteria, classification heads and commands are fairseq's for RoBERTa. The state dict is that of fairseq's
    `roberta` with the entries that `TransformerAdminModel` adds. RoBERTa's initial distribution, N(0, 0.02²) with zero
    biases, applies to all weights that the scheme does not initialise, and to `stock` feed-forward weights.

    Args:
        args: the options, as `build_model` completes them.
        encoder: RoBERTa's encoder over the scheme's layers.
        task: fairseq's task, for subclasses.
    """

    def __init__(self, args: Namespace, encoder: AdminMaskedEncoder, task: object = None) -> None:
        super().__init__(args, encoder)
        self.cfg = nested(args, ["encoder"])
        if ffn_law(self.cfg) == "xavier":
            for layer in layers_of(self.encoder.sentence_encoder):  # RoBERTa has just redrawn these weights
                xavier(layer.fc1), xavier(layer.fc2)
        self.set_up_scheme(self.cfg)

    @staticmethod
    def add_args(parser) -> None:
        RobertaModel.add_args(parser)
        gen_parser_from_dataclass(parser, AdminOptions())

    @classmethod
    def build_model(cls, args, task):
        args = flat_encoder(args, task)
        refuse_unsuitable(nested(args, ["encoder"]), ["encoder"])
        args.encoder_normalize_before = SCHEMES[args.admin_scheme].norm[0] == "before"
        return cls(args, AdminMaskedEncoder(args, task.source_dictionary), task)

    def forward(self, src_tokens, *args, **kwargs):
        """Compute what fairseq's RoBERTa computes. The first call in training mode first profiles ω on its batch."""
        self.before_forward(encoder=src_tokens)
        return super().forward(src_tokens, *args, **kwargs)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load as `SchemeModel` does. This method also accepts the weight names of older RoBERTas."""
        self.upgrade_state_dict(state_dict)
        return super().load_state_dict(state_dict, strict, model_cfg, args)


# The sizes of fairseq's roberta_base and roberta_large, and a 48-layer model as wide as roberta_base.
register_presets(
    "masked_lm_admin",
    MaskedLMAdminModel,
    fill_masked,
    masked_lm_admin={},
    masked_lm_admin_24l={"layers": 24, "embed_dim": 1024, "ffn_embed_dim": 4096, "attention_heads": 16},
    masked_lm_admin_48l={"layers": 48},
    masked_lm_admin_tiny={"layers": 2, "embed_dim": 64, "ffn_embed_dim": 128, "attention_heads": 4},
)
