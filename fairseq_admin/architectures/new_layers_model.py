"""The model `deeper_admin`: a pre-trained RoBERTa, new layers of any scheme on top, and fairseq's heads."""

from __future__ import annotations

import copy
import weakref
from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.tasks import FairseqTask
from torch import Tensor

from ..errors import AdminError
from ..fast.model import speed_up, wanted
from ..fast.plain import plain_layers
from ..fast.stacks import FastEncoder
from ..method import provenance
from ..method.new_layers import NewLayers, set_up
from ..method.schemes import SCHEMES
from ..rates import LrGroup, set_lr_group
from .config import NewLayersOptions, fill, fill_masked, flat_encoder, nested
from .masked_language_model import AdminMaskedEncoder, MaskedLMAdminModel
from .presets import register_presets
from .refusals import refuse_new_layers

NEW_LAYERS = "more."
"""The new layers in a state dict."""


def _new_layer_options(args: Namespace) -> Any:
    """The options of the new layers, as fairseq's layers read them."""
    cfg = nested(copy.deepcopy(args), ["encoder"])
    cfg.admin_scheme = args.more_scheme
    cfg.encoder.layers = args.more_layers
    cfg.encoder.layerdrop = 0.0
    cfg.encoder.layers_to_keep = None
    cfg.encoder.normalize_before = SCHEMES[args.more_scheme].norm[0] == "before"
    cfg.dropout = cfg.attention_dropout = cfg.activation_dropout = args.more_dropout
    cfg.no_token_positional_embeddings = True
    cfg.layernorm_embedding = False
    cfg.quant_noise.pq = 0.0
    return cfg


def _fill(args: Namespace, **sizes: int) -> None:
    options = (option for option in fields(NewLayersOptions) if not option.name.startswith("_"))
    fill(args, **{option.name: option.default for option in options})
    fill_masked(args, **sizes)


class FastNewLayers(NewLayers, FastEncoder):
    """`NewLayers`, batch-first."""


@register_model("deeper_admin")
class DeeperAdminModel(MaskedLMAdminModel):
    """RoBERTa, new layers on top of it, and fairseq's classification heads.

    --admin-scheme is the scheme of the pre-trained encoder (a stock RoBERTa is `post-ln`), and --more-scheme is the
    scheme of the new layers. The state dict is that of `masked_lm_admin`, with the new layers under `more.`. A state
    dict without them is that of a pre-trained encoder: loading it sets the new layers up.

    A frozen encoder (--pretrained-lr-factor 0) is always in evaluation mode, so the new layers get the same features in
    set-up, training and test. Its weights need no gradient, so nothing is kept for a backward. (DT-Fixup's authors do
    not freeze their encoder. Their code has an option that freezes it; the option is off by default and leaves the
    encoder's dropout on.)

    Args:
        args: the options, as `build_model` completes them.
        encoder: RoBERTa's encoder over the layers of --admin-scheme.
        task: fairseq's task, with the training set that sets the new layers up.
    """

    def __init__(self, args: Namespace, encoder: AdminMaskedEncoder, task: FairseqTask) -> None:
        super().__init__(args, encoder)
        self.pretrained = False
        self._task = weakref.ref(task)  # weak, so that a copy of the model (--store-ema) does not copy the data
        self.more: NewLayers | None = None
        if args.more_layers:
            # Build these after RoBERTa's __init__, which draws the weights of every module that exists.
            cfg = _new_layer_options(args)
            self.more = (FastNewLayers if wanted(cfg) else NewLayers)(cfg, task.source_dictionary)
            speed_up(self.more, cfg, {"encoder": self.more})
        self.slower: LrGroup | None = None
        self.frozen = args.pretrained_lr_factor == 0
        if self.frozen:
            self.encoder.requires_grad_(False)
        elif args.pretrained_lr_factor != 1:
            self.slower = set_lr_group(self.encoder.parameters(), "pretrained", args.pretrained_lr_factor)

    @staticmethod
    def add_args(parser) -> None:
        MaskedLMAdminModel.add_args(parser)
        gen_parser_from_dataclass(parser, NewLayersOptions())

    @classmethod
    def build_model(cls, args, task):
        args = flat_encoder(args, task)
        _fill(args)
        refuse_new_layers(args, task)
        return super().build_model(args, task)

    def train(self, mode: bool = True) -> DeeperAdminModel:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(
        self, src_tokens, features_only=False, return_all_hiddens=False, classification_head_name=None, **kwargs
    ):
        """Run fairseq's RoBERTa with the new layers between its encoder and a head; it predicts no words."""
        if self.training:
            self._refuse_unready()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            x, extra = super().forward(src_tokens, features_only=True, return_all_hiddens=return_all_hiddens, **kwargs)
        if self.more is not None:
            x = self.more.extend(src_tokens, x)
        if classification_head_name is not None:
            x = self.classification_heads[classification_head_name](x)
        return x, extra

    def _refuse_unready(self) -> None:
        if not self.pretrained:
            raise AdminError(
                "--arch deeper_admin has no pre-trained encoder: no checkpoint was loaded. Give --finetune-from-model "
                "CHECKPOINT."
            )
        if self.slower and not self.slower.used:
            raise AdminError(
                f"--pretrained-lr-factor {self.slower.factor} was given, and the optimizer has one rate for all. Give "
                "--optimizer radam or adam_by_group (with --fp16 also --fp16-no-flatten-grads), or a factor of 0 or 1."
            )

    def _refuse_other_sizes(self, state: dict[str, Any]) -> None:
        """Refuse an encoder's weights of another width, vocabulary or number of positions."""
        for key, tensor in self.state_dict().items():
            if key.startswith("encoder.") and key in state and state[key].shape != tensor.shape:
                raise AdminError(
                    f"{key} of the checkpoint is {' x '.join(map(str, state[key].shape))} and the model's "
                    f"{' x '.join(map(str, tensor.shape))}. Give the sizes (--encoder-embed-dim, --max-positions) and "
                    "the dictionary that the encoder was pre-trained with."
                )

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load as `SchemeModel` does. If the weights have no new layers, they are those of a pre-trained encoder.

        Loading such weights sets the new layers up.

        Raises:
            AdminError: see `SchemeModel`; or the checkpoint's encoder or new layers are not those of this model; or
                there is no training set.
        """
        state = {key[len(NEW_LAYERS) :]: state_dict.pop(key) for key in list(state_dict) if key.startswith(NEW_LAYERS)}
        self.upgrade_state_dict(state_dict)
        self._refuse_other_sizes(state_dict)
        new_layers, self.more = self.more, None
        result = super().load_state_dict(state_dict, strict, model_cfg, args)
        self.more = new_layers
        self.pretrained = True
        if state or new_layers is None:
            self._load_new_layers(state, strict)
        elif new_layers.measured:
            self._set_up(new_layers)
        return result

    def _load_new_layers(self, state: dict[str, Tensor], strict: bool) -> None:
        layers = {key.split(".")[1] for key in state if key.startswith("layers.")}
        record = (provenance.decode(state[provenance.KEY]) or {}) if provenance.KEY in state else {}
        expected = (len(self.more.layers), self.more.cfg.admin_scheme) if self.more is not None else (0, None)
        if (len(layers), record.get("scheme")) != expected:
            raise AdminError(
                f"the checkpoint has {len(layers)} new layers of --more-scheme {record.get('scheme')} and the model "
                f"{expected[0]} of {expected[1]}. Give the checkpoint's, or another --save-dir to start again."
            )
        if self.more is not None:
            self.more.load_state_dict(state, strict)

    def _set_up(self, new_layers: NewLayers) -> None:
        """Set the new layers up on the training set."""
        data, order = self._training_set(self._task())
        budget = max(self.cfg.admin_profile_tokens, max(map(data.num_tokens, order)))  # at least one sentence
        samples = (data.collater([data[i] for i in batch]) for batch in data.batch_by_size(order, budget))
        device = next(self.parameters()).device
        batches = (sample["net_input"]["src_tokens"].to(device) for sample in samples)
        training = self.training
        self.eval()
        with plain_layers(self):
            set_up(new_layers, lambda tokens: self.encoder(tokens, features_only=True)[0], batches, len(order))
        self.train(training)

    def _training_set(self, task: FairseqTask) -> tuple[Any, Any]:
        """The training set, and the indices of at most --profile-sentences of its sentences, in random order."""
        try:
            task.load_dataset("train")
        except (AssertionError, FileNotFoundError) as error:
            raise AdminError(
                f"--more-scheme {self.args.more_scheme} is set up on the training set, which is missing: {error}. Give "
                "the folder of data with the split train."
            ) from error
        data = task.dataset("train")
        order, _ = data.filter_indices_by_size(data.ordered_indices(), task.max_positions())
        if not len(order):
            raise AdminError("The training set has no sentence within --max-positions. Give another training set.")
        return data, order[: self.args.profile_sentences or None]


register_presets(
    "deeper_admin",
    DeeperAdminModel,
    _fill,
    deeper_admin={},
    deeper_admin_tiny={"layers": 2, "embed_dim": 64, "ffn_embed_dim": 128, "attention_heads": 4},
)
