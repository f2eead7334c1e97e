"""The comparison of two checkpoints: its sentences, its result, and its refusals."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from test_fold import state_of

from fairseq_admin.checkpoints import equivalence
from fairseq_admin.checkpoints.building import build
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError


def stock(seed=1, **options):
    sizes = {**reference.TINY, **options}
    return state_of(reference.build("transformer", seed=seed, **sizes), "transformer", **sizes)


def test_random_sentences_look_like_fairseqs():
    """Sources end in </s> and are padded on the left; targets begin with it and are padded on the right."""
    batches = equivalence.random_batches(Checkpoint(stock()), batches=20)
    for batch in batches:
        src, lengths, prev = (batch[name] for name in reference.INPUTS)
        assert src.shape == (8, 40) and src[:, -1].eq(2).all() and prev[:, 0].eq(2).all()
        assert torch.equal(src.ne(1).sum(1), lengths)
        for tokens in (src.flip(1), prev):
            padding = tokens.eq(1).int()
            assert torch.equal(padding, padding.cummax(1).values)
    words = torch.cat([batch["src_tokens"].flatten() for batch in batches])
    assert set(words.tolist()) == {1, 2, *range(4, 104)}
    assert len({tuple(batch["src_lengths"].tolist()) for batch in batches}) == 20


def test_no_sentence_is_longer_than_the_model_takes():
    state = stock()
    state["cfg"]["model"]["max_target_positions"] = 5
    assert {batch["src_tokens"].shape for batch in equivalence.random_batches(Checkpoint(state))} == {(8, 5)}


def test_a_checkpoint_equals_itself_without_dropout():
    state = stock()
    state["cfg"]["model"]["dropout"] = 0.5
    batches = equivalence.random_batches(Checkpoint(state))
    words = sum(int(batch["prev_output_tokens"].ne(1).sum()) for batch in batches)
    assert equivalence.verify(Checkpoint(state), Checkpoint(state)) == (0.0, words)


def test_the_difference_is_of_log_probabilities():
    """The difference is the largest one over all positions and words.

    The test computes it by hand, for a known change of the output projection.
    """
    one = stock(share_all_embeddings=False)
    model = {name: tensor.clone() for name, tensor in one["model"].items()}
    model["decoder.output_projection.weight"] *= 1.1
    difference = equivalence.verify(Checkpoint(one), Checkpoint({**one, "model": model}))[0]
    largest = 0.0
    for batch in equivalence.random_batches(Checkpoint(one)):
        scores = []
        for weights in (one["model"], model):
            built = build(Checkpoint({**one, "model": weights}))
            with torch.no_grad():
                logits, _ = built(**batch)
            scores.append(torch.log_softmax(logits, -1)[batch["prev_output_tokens"].ne(1)])
        largest = max(largest, (scores[0] - scores[1]).abs().max().item())
    assert difference == pytest.approx(largest, abs=1e-6) and largest > 0.1


def test_not_a_number_is_not_equal():
    one = stock()
    model = {name: tensor.clone() for name, tensor in one["model"].items()}
    model["encoder.layers.0.fc1.bias"][0] = math.nan
    assert equivalence.verify(Checkpoint(one), Checkpoint({**one, "model": model}))[0] == math.inf


def test_real_batches_are_the_first_of_the_validation_set(corpus):
    """Real batches are the validation set's first sentences. A model with another dictionary is refused."""
    sizes = reference.TINY
    state = state_of(reference.build("transformer", words=44, **sizes), "transformer", **sizes)
    batches = equivalence.real_batches(Checkpoint(state), corpus)
    sentences = sum(len(batch["src_tokens"]) for batch in batches)
    assert 8 <= sentences <= 40 and all(batch["src_tokens"].max() < 48 for batch in batches)
    assert (
        equivalence.verify(Checkpoint(state), Checkpoint(state), corpus)[1]
        > equivalence.verify(Checkpoint(state), Checkpoint(state))[1]
    )
    with pytest.raises(AdminError, match="the dictionary has 48 symbols and the model 104"):
        equivalence.real_batches(Checkpoint(stock()), corpus)
