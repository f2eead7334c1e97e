"""The base of every model with a scheme: profiling, records, loading, stopping a diverged run."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerConfig
from torch import Tensor, nn

from .. import fingerprint
from ..errors import AdminError
from ..fast.graphs import count_hooks
from ..fast.model import speed_up
from ..fast.plain import plain_layers
from ..method import clinic, initial_weights, provenance
from ..method.norms import set_omega_by_depth
from ..method.profiling import profile
from ..method.schemes import RULES, SCHEMES, by_depth, layers_of, stacks_of
from ..method.state_dict import prune, upgrade_stock_state
from ..method.state_dict import scheme as scheme_of
from ..monitor.monitor import Monitor
from ..version import __version__
from .divergence import ExplodedLoss, SkippedUpdates
from .refusals import layers_to_keep


def _note_dictionaries(model: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Hook on state_dict: put the dictionaries' fingerprints into its metadata."""
    metadata[fingerprint.KEY] = dict(model.fingerprints)


def _widen_records(model: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Hook on state_dict: make its records float32. A moving average leaves a float32 record unchanged."""
    for key in state:
        if key.endswith(provenance.KEY):
            state[key] = state[key].float()


def _before_loading(model: Any, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Hook before loading: refuse weights trained with another dictionary, even one of the same size.

    The hook also runs if a wrapper of the model loads the weights.
    """
    model._profiled = False  # the record about to be loaded says whether ω is profiled
    noted = metadata.get(fingerprint.KEY) or {}
    for stack, expected in model.fingerprints.items():
        if noted.get(stack) not in (None, expected):
            raise AdminError(
                f"the checkpoint's {stack} was trained with another dictionary than the data's: with other units, or "
                "the same in another order. Give the data that it was trained on (or, to make new data with its "
                "dictionaries, fairseq-preprocess --srcdict and --tgtdict)."
            )


class SchemeModel(BaseFairseqModel):
    """First base class of a model with an `encoder`, a `decoder` or both from stacks.py.

    The model calls `set_up_scheme` at the end of its construction and `before_forward` at the start of its `forward`.
    """

    cfg: TransformerConfig

    def set_up_scheme(self, cfg: TransformerConfig) -> None:
        """Draw the scheme's initial weights, and set ω if it follows from the depth.

        Args:
            cfg: the model's options, as `nested` returns them.
        """
        self.scheme = SCHEMES[cfg.admin_scheme]
        self._profiled = False
        self.register_state_dict_post_hook(_note_dictionaries)
        self.register_state_dict_post_hook(_widen_records)
        self.register_load_state_dict_pre_hook(_before_loading)
        self.skipped_updates = SkippedUpdates(cfg.admin_max_skipped_updates, max(cfg.update_freq))
        self.exploded_loss = ExplodedLoss()
        every = cfg.admin_monitor or (cfg.log_interval if self.scheme.omega else 0)
        self.monitor = Monitor(every, thorough=cfg.admin_monitor > 0)
        stacks = stacks_of(self)
        self.fingerprints = {side: fingerprint.of_dictionary(stack.dictionary) for side, stack in stacks.items()}
        initial_weights.draw(cfg.admin_scheme, stacks)
        speed_up(self, cfg, stacks)
        if not self.scheme.stock_layers:
            self.register_buffer(provenance.KEY, torch.zeros(provenance.LENGTH))
            if not self.scheme.omega:
                self._record({"scheme": cfg.admin_scheme, "version": __version__})
            elif by_depth(cfg.admin_init):
                for stack in stacks.values():
                    set_omega_by_depth(stack, cfg.admin_init)
                self._record({"rule": cfg.admin_init, "version": __version__})
            else:
                for stack in stacks.values():
                    layers_of(stack)[0].register_forward_pre_hook(self._refuse_unprofiled)
        self.built_in_hooks = count_hooks(self)

    def _record(self, record: dict[str, Any]) -> None:
        getattr(self, provenance.KEY).copy_(provenance.encode(record))

    @property
    def profiled(self) -> bool:
        """Whether ω is set, or the scheme has no ω.

        The record in the state dict says whether ω is set, so this also works if a wrapper loaded the weights.
        """
        if not self._profiled:
            self._profiled = not self.scheme.omega or provenance.decode(getattr(self, provenance.KEY)) is not None
        return self._profiled

    def _refuse_unprofiled(self, layer: nn.Module, inputs: Any) -> None:
        """Hook on a stack's first layer. A task that never calls the model's `forward` would train a Post-LN model."""
        if layer.training and torch.is_grad_enabled() and not self.profiled:
            raise AdminError(
                "the task calls the encoder or the decoder without the model, whose first call profiles omega. Give "
                "--admin-init log, which sets omega from the depth."
            )

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        if self.training:
            self.skipped_updates.before_batch(num_updates)
            self.monitor.before_batch(num_updates)
            if self.exploded_loss.first is None or num_updates % self.cfg.log_interval == 0:
                self.exploded_loss.check()

    def train(self, mode: bool = True) -> SchemeModel:
        """Switch the mode as torch does, and stop a diverged run.

        fairseq switches to evaluation mode before it validates, so the run stops before it saves a checkpoint.
        """
        if self.training and not mode:
            self.exploded_loss.check()
        return super().train(mode)

    def all_reduce_grads(self) -> None:
        """fairseq's optimizers call this before an update, when its gradients are complete.

        (Not with --ddp-backend legacy_ddp, which has its own method of that name.)
        """
        self.monitor.after_backward(self)

    def before_forward(self, **words: Tensor) -> None:
        """Profile ω on the first batch in training mode, and measure the run if a measurement is due.

        Args:
            words: the input of each stack, by side, the encoder's first. Shapes (B, T).
        """
        if self.training and not self.profiled:
            with plain_layers(self):
                self._record(profile(self, words, self.cfg.admin_init, self.cfg.admin_profile_tokens))
        self.monitor.before_forward(self, words)

    def _refuse_other(self, state_dict: dict[str, Any]) -> None:
        """Refuse weights of another scheme, or with ω by another rule. Admin takes a stock Transformer's weights.

        Raises:
            AdminError: the weights are refused.
        """
        cfg, scheme = self.cfg, scheme_of(state_dict)
        if self.scheme.omega and provenance.KEY not in state_dict:
            return
        if scheme != scheme_of(self.state_dict()):
            raise AdminError(
                f"the checkpoint is of --admin-scheme {scheme} and the model of --admin-scheme {cfg.admin_scheme}. "
                "Give the checkpoint's, or another --save-dir to start again."
            )
        if not self.scheme.omega:
            return
        rule = (provenance.decode(state_dict[provenance.KEY]) or {}).get("rule")
        known = rule is not None and (rule in RULES or by_depth(rule))  # not of ω = 1 from stock weights
        if known and rule != cfg.admin_init:
            raise AdminError(
                f"the checkpoint's omega is by --admin-init {rule}; --admin-init {cfg.admin_init} would change "
                f"nothing. Give --admin-init {rule}, or another --save-dir to start again."
            )

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load weights as fairseq does. Admin also loads the authors' weights, and stock Post-LN weights with ω = 1.

        Args:
            state_dict: the weights, which are renamed and completed in place.
            strict: whether every name must match.
            model_cfg: the options that the next checkpoint saves. If they name layers to keep, the other layers are
                dropped, and `model_cfg` gets the new depth.
            args: not used.

        Raises:
            AdminError: the depth, the scheme, the dictionary or the rule of ω differs from that of the weights.
        """
        clinic.rename(state_dict)
        self._refuse_other(state_dict)
        stacks = stacks_of(self)
        for side in stacks:
            kept = layers_to_keep(getattr(self.cfg, side))
            if kept:
                prune(state_dict, side, kept)
                if model_cfg is not None:  # the options that the next checkpoint saves
                    setattr(model_cfg, f"{side}_layers", len(kept))
                    setattr(model_cfg, f"{side}_layers_to_keep", None)
        depths = {side: len(layers_of(stack)) for side, stack in stacks.items()}
        upgrade_stock_state(state_dict, self.state_dict(), depths)
        for counter in (self.skipped_updates, self.monitor):
            counter.restart()  # fairseq has just set the number of updates, and ran no batch
        return super().load_state_dict(state_dict, strict)  # fairseq would prune by the options again
