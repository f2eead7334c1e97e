"""What every model with a scheme does around fairseq's own, be it of translation or of language."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerConfig
from torch import Tensor, nn

from ..errors import AdminError
from ..fast.model import speed_up
from ..fast.twin import twins_of
from ..method import provenance
from ..method.layers import shortcut_norms
from ..method.omega import omega_from_depth
from ..method.profiling import profile
from ..method.schemes import SCHEMES, stacks_of
from ..method.state_dict import adopt
from ..method.state_dict import scheme as scheme_of
from ..version import __version__
from .config import DEPTH_RULES
from .divergence import SkippedUpdates


class SchemeModel(BaseFairseqModel):
    """Initial weights, profiling, its record, loading, and the stop of a diverged run; a model's first base class.

    The model has an `encoder`, a `decoder` or both of stacks.py, and calls `set_up_scheme` last in its construction and
    `profile_once` first in its `forward`.
    """

    cfg: TransformerConfig

    def set_up_scheme(self, cfg: TransformerConfig) -> None:
        """Draw the scheme's initial weights, and set ω where the depth tells it."""
        self.scheme = SCHEMES[cfg.admin_scheme]
        self.profiled = not self.scheme.omega
        self.skipped_updates = SkippedUpdates(cfg.admin_max_skipped_updates, max(cfg.update_freq))
        stacks = stacks_of(self)
        if self.scheme.weights is not None:
            # A model of one stack is to a row's function one with another of no layers and the same embedding.
            embedding = next(iter(stacks.values())).embed_tokens
            none = SimpleNamespace(layers=nn.ModuleList(), embed_tokens=embedding, output_projection=None)
            self.scheme.weights(*(stacks.get(side, none) for side in ("encoder", "decoder")))
        speed_up(self, cfg)
        if self.scheme.stock_layers:
            return
        self.register_buffer(provenance.KEY, torch.zeros(provenance.LENGTH))
        if not self.scheme.omega:
            self._record({"scheme": cfg.admin_scheme, "version": __version__})
        elif cfg.admin_init in DEPTH_RULES:
            for stack in stacks.values():
                norms = shortcut_norms(stack)
                for norm in norms:
                    norm.set_omega(omega_from_depth(cfg.admin_init, len(norms)))
            self._record({"rule": cfg.admin_init, "version": __version__})

    def _record(self, record: dict[str, Any]) -> None:
        buffer = getattr(self, provenance.KEY)
        buffer.copy_(provenance.encode(record))
        self.profiled = True

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        if self.training:
            self.skipped_updates.before_batch(num_updates)

    def profile_once(self, src_tokens: Tensor | None, prev_output_tokens: Tensor | None) -> None:
        """Profile ω on this batch if it is the first in training mode. Arguments as for `profiling.measure`."""
        if self.training and not self.profiled:
            cfg = self.cfg
            with twins_of(self):
                record = profile(self, src_tokens, prev_output_tokens, cfg.admin_init, cfg.admin_profile_tokens)
            self._record(record)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq's; with Admin, a stock Post-LN Transformer's weights load with ω = 1, its function unchanged.

        Raises:
            AdminError: the weights are of another depth, or of another scheme.
        """
        own = self.state_dict()
        found = scheme_of(state_dict)
        if found != scheme_of(own) and not (self.scheme.omega and provenance.KEY not in state_dict):
            raise AdminError(
                f"the checkpoint is of --admin-scheme {found} and the model of --admin-scheme {self.cfg.admin_scheme}. "
                "Give the checkpoint's, or another --save-dir to start anew."
            )
        depths = {
            side: stack.layers
            for side, stack in (("encoder", self.cfg.encoder), ("decoder", self.cfg.decoder))
            if hasattr(self, side) and not stack.layers_to_keep
        }
        adopt(state_dict, own, depths)
        self.skipped_updates.restart()  # fairseq has just told the number of updates, and no batch has come with it
        result = super().load_state_dict(state_dict, strict, model_cfg, args)
        if self.scheme.omega:
            self.profiled = provenance.decode(getattr(self, provenance.KEY)) is not None
        return result
