"""Does Admin train a deep encoder under a shallow decoder?

The task needs attention: the target is the reversed source with each word re-mapped. Words are uniform, so without
attention a model stays at the entropy of one word, the plateau.
"""

from __future__ import annotations

import math

import pytest
import reference
import torch
from torch import nn

from fairseq_admin.radam import RAdam

WORDS, LENGTH, SENTENCES, UPDATES, WARMUP = 20, 6, 32, 300, 50
PLATEAU = math.log2(WORDS)
"""Bits per word."""


def batches(seed):
    """Endless random batches: source, lengths, decoder input and target, without ends of sentences."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        words = torch.randint(WORDS, (SENTENCES, LENGTH), generator=generator)
        source = nn.functional.pad(words + 4, (0, 1), value=2)
        target = (7 * words.flip(1) + 3) % WORDS + 4
        yield source, torch.full((SENTENCES,), LENGTH + 1), nn.functional.pad(target[:, :-1], (1, 0), value=2), target


def trained_loss(scheme, encoder_layers, decoder_layers, seed):
    """Bits per word over the last 20 updates. No batch repeats."""
    sizes = {
        **{f"{side}_embed_dim": 32 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_embed_dim": 64 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    }
    depths = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
    options = {"admin_scheme": scheme, "admin_ffn_init": "xavier", "dropout": 0.0}
    model = reference.build("transformer_admin", words=WORDS, seed=seed, **options, **sizes, **depths)
    optimizer = RAdam(model.parameters(), lr=4e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    losses = []
    for update, (source, lengths, previous, target) in zip(range(UPDATES), batches(seed)):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min((update + 1) / WARMUP, 1)
        logits = model(source, lengths, previous)[0]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    return sum(losses[-20:]) / 20


@pytest.mark.nightly
@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), [(18, 1), (18, 2), (12, 3)])
def test_admin_trains_a_deep_encoder_under_a_shallow_decoder(encoder_layers, decoder_layers):
    """Does the loss fall two bits below the plateau of 4.3 bits?"""
    assert trained_loss("admin", encoder_layers, decoder_layers, seed=1) < PLATEAU - 2
