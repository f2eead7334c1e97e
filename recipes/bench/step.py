"""What is timed: a training step of one model, with the loss and the optimizer that are its own, on a fixed batch.

Stock Post-LN and Pre-LN have fairseq's loss and Adam, Admin plain fairseq's loss and torch's RAdam, and Admin fast has
its own of both.
"""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.optim.adam import Adam
from torch import Tensor

import fairseq_admin  # noqa: F401  (registers transformer_admin)
from fairseq_admin.fast.loss import smoothed_loss
from fairseq_admin.method.profiling import measure
from fairseq_admin.radam import RAdam
from recipes.bench import counting

METHODS: dict[str, tuple[str, dict]] = {
    "post-ln": ("transformer", {}),
    "pre-ln": ("transformer", {"encoder_normalize_before": True, "decoder_normalize_before": True}),
    "admin-plain": ("transformer_admin", {"admin_fast": "off"}),
    "admin": ("transformer_admin", {"admin_fast": "on"}),
}
"""Architecture and options of each; the first is what the others are compared with."""
PADDING = 1


class Run:
    """One model with its loss, its optimizer and its batch."""

    def __init__(self, method: str, args: Namespace) -> None:
        arch, options = METHODS[method]
        given = Namespace(share_all_embeddings=True, dropout=0.1, attention_dropout=0.1, update_freq=[1], **options)
        given.admin_init, given.admin_profile_tokens, given.admin_max_skipped_updates = "reference", 8192, 100
        for side, layers in (("encoder", args.layers), ("decoder", args.decoder_layers)):
            sizes = {"layers": layers, "embed_dim": args.width, "ffn_embed_dim": args.ffn}
            for name, value in {**sizes, "attention_heads": args.heads}.items():
                setattr(given, f"{side}_{name}", value)
        ARCH_CONFIG_REGISTRY[arch](given)
        words = Dictionary()
        for word in range(args.words):
            words.add_symbol(f"w{word}")
        torch.manual_seed(1)
        task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
        self.model = ARCH_MODEL_REGISTRY[arch].build_model(given, task).train()
        size = (max(1, args.tokens // args.length), args.length)
        self.src, self.target = (torch.randint(4, args.words + 4, size) for _ in range(2))
        self.lengths = torch.full(size[:1], args.length)
        self.prev = self.target.roll(1, 1)
        params = list(self.model.parameters())
        self.fast = method == "admin"
        if method.startswith("admin"):
            self.rule: Any = RAdam(params, lr=1e-5, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
            self.rule.fused = self.fast
        else:
            self.rule = Adam(params, lr=1e-5, betas=(0.9, 0.98))

    def forward(self) -> Tensor:
        return self.model(self.src, self.lengths, self.prev)[0]

    def loss(self, logits: Tensor) -> Tensor:
        logits, target = logits.flatten(0, 1), self.target.flatten()
        if self.fast:
            return smoothed_loss(logits, target, 0.1, PADDING)[0]
        lprobs = torch.nn.functional.log_softmax(logits, 1, dtype=torch.float32)
        return label_smoothed_nll_loss(lprobs, target, 0.1, ignore_index=PADDING)[0]

    def forward_backward(self) -> None:
        self.loss(self.forward()).backward()

    def step(self) -> None:
        self.forward_backward()
        self.rule.step()
        self.model.zero_grad(set_to_none=True)

    def profile(self) -> None:
        measure(self.model, self.src, self.prev, "reference")

    def counts(self) -> dict[str, float]:
        return counting.counts(self.model, lambda: self.loss(self.forward()))
