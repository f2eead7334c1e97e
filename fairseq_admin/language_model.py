"""The model `transformer_lm_admin`: fairseq's decoder-only language model with Admin or another scheme."""

from types import FunctionType
from typing import Any

from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel

from .config import TransformerLMAdminConfig, flat_decoder, nested_decoder, refuse_unsuitable
from .errors import AdminError
from .scheme_model import SchemeModel
from .schemes import SCHEMES
from .stacks import AdminDecoder


def _decoder(args, dictionary, embed_tokens, no_encoder_attn=True) -> AdminDecoder:
    """What stands for fairseq's TransformerDecoder, which takes flat options."""
    return AdminDecoder(nested_decoder(args), dictionary, embed_tokens, no_encoder_attn)


def _with_our_decoder(build: FunctionType) -> FunctionType:
    """fairseq's build_model with our decoder: it names the class in its body, and has no hook for another.

    The function's own code, with a namespace of its own in which that name means ours; fairseq's module stays as it is.
    """
    assert "TransformerDecoder" in build.__code__.co_names, "this fairseq builds its language model in another way"
    return FunctionType(build.__code__, {**build.__globals__, "TransformerDecoder": _decoder}, build.__name__)


@register_model("transformer_lm_admin", dataclass=TransformerLMAdminConfig)
class TransformerLMAdminModel(SchemeModel, TransformerLanguageModel):
    """Decoder-only Transformer with a scheme of the table in schemes.py: Admin, unless the options say otherwise.

    Task, criteria and commands are fairseq's for language models. The state dict is that of fairseq's
    `transformer_lm` with what `TransformerAdminModel` has beside a stock one's.
    """

    def __init__(self, decoder: AdminDecoder) -> None:
        super().__init__(decoder)
        self.cfg = decoder.cfg
        self.set_up_scheme(self.cfg)

    @classmethod
    def build_model(cls, cfg, task):
        args = flat_decoder(cfg)
        refuse_unsuitable(nested_decoder(args), sides=("decoder",))
        if args.admin_scheme == "t-fixup" and (args.adaptive_input or args.character_embeddings):
            raise AdminError(
                "--admin-scheme t-fixup scales one embedding matrix, and --adaptive-input and --character-embeddings "
                "have others. Leave these out."
            )
        args.decoder_normalize_before = SCHEMES[args.admin_scheme].norm[1] == "before"
        return _with_our_decoder(TransformerLanguageModel.build_model.__func__)(cls, args, task)

    def forward(self, src_tokens, **kwargs):
        """As fairseq's language model; the first call in training mode profiles ω on its batch beforehand."""
        self.profile_once(None, src_tokens)
        return super().forward(src_tokens, **kwargs)


assert MODEL_REGISTRY["transformer_lm_admin"] is TransformerLMAdminModel, "another plugin took transformer_lm_admin"


def _preset(arch: str, **sizes: Any) -> None:
    def fill(args: Any) -> None:
        for name, value in sizes.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)

    register_model_architecture("transformer_lm_admin", arch)(fill)


def _deep(arch: str, layers: int, width: int, heads: int) -> None:
    """The sizes, and the dropout, of fairseq's transformer_lm_gpt and its larger kin, which are Pre-LN."""
    _preset(
        arch,
        decoder_layers=layers,
        decoder_embed_dim=width,
        decoder_ffn_embed_dim=4 * width,
        decoder_attention_heads=heads,
        dropout=0.1,
        attention_dropout=0.1,
        activation_fn="gelu",
    )


_deep("transformer_lm_admin_12l", layers=12, width=768, heads=12)
_deep("transformer_lm_admin_24l", layers=24, width=1024, heads=16)
_deep("transformer_lm_admin_48l", layers=48, width=1600, heads=25)
_preset(
    "transformer_lm_admin_tiny",
    decoder_layers=2,
    decoder_embed_dim=64,
    decoder_ffn_embed_dim=128,
    decoder_attention_heads=4,
)
