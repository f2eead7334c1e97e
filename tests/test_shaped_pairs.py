"""Batches of few shapes: their number and padding on two texts, what the model computes of them, and who gets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import LanguagePairDataset, data_utils
from fairseq.data.language_pair_dataset import collate
from reference import PAD, build, dictionary

from fairseq_admin.architectures.shaped_pairs import ShapedPairs, shape_batches
from fairseq_admin.fast.graphs import MOST
from fairseq_admin.method import provenance
from recipes.research.bench.step import read_lengths, trainer

WORDS = dictionary(96)


def dataset(kind: type[LanguagePairDataset], lengths: np.ndarray) -> LanguagePairDataset:
    sides = [(range(len(lengths)), lengths[:, side], WORDS) for side in (0, 1)]
    return kind(*sides[0], *sides[1])


def batches_of(pairs: LanguagePairDataset, tokens: int) -> list[np.ndarray]:
    """The batches of an epoch, as fairseq's task makes them."""
    with data_utils.numpy_seed(2):
        indices = pairs.ordered_indices()
    indices, _ = pairs.filter_indices_by_size(indices, (tokens, tokens))
    return pairs.batch_by_size(indices, max_tokens=tokens, required_batch_size_multiple=8)


def shapes_of(pairs: ShapedPairs, batches: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [(len(batch), *pairs.padded(pairs.sizes[batch].max(0)).tolist()) for batch in batches]


@pytest.mark.parametrize("tokens", [4096, 8192])
@pytest.mark.parametrize("text", ["iwslt14", "multi30k"])
def test_real_texts_have_few_shapes_and_little_padding(text: str, tokens: int) -> None:
    """Do K lengths give about K shapes, in fewer batches than fairseq makes, of at most 5 % more tokens?

    A shape is computed when it comes first. So 4 of 5 steps are replayed in the first epoch, and later all of them.
    """
    lengths = read_lengths(text)
    stock, shaped = dataset(LanguagePairDataset, lengths), dataset(ShapedPairs, lengths)
    batches, expected = batches_of(shaped, tokens), batches_of(stock, tokens)
    shapes = shapes_of(shaped, batches)
    assert len(set(shapes)) <= min(MOST, len(shaped.lengths) + 3)  # three for what is left over
    assert len(set(shapes)) < 0.2 * len(shapes)
    of_stock = sum(len(batch) * int(lengths[batch].max(0).sum()) for batch in expected)
    assert sum(number * (source + target) for number, source, target in shapes) < 1.05 * of_stock
    assert len(batches) < len(expected)


def random_lengths(ratio: float, number: int) -> np.ndarray:
    """Lengths of pairs whose targets are about `ratio` times as long as their sources."""
    generator = np.random.default_rng(1)
    source = generator.lognormal(3, 0.5, number).clip(2, 200)
    target = (ratio * source * generator.lognormal(0, 0.3, number)).clip(2, 400)
    return np.stack([source, target], axis=1).astype(np.int64)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1, 2])
@pytest.mark.parametrize("number", [5, 100, 20000])
def test_every_pair_is_in_one_batch_within_the_limits(ratio: float, number: int) -> None:
    """Is every pair in one batch that keeps fairseq's limits? fairseq drops up to seven pairs, which fill no batch."""
    pairs = dataset(ShapedPairs, random_lengths(ratio, number))
    batches = batches_of(pairs, 2000)
    indices = np.concatenate([[], *batches]).tolist()
    assert len(indices) == len(set(indices)) >= number - 7
    shapes = shapes_of(pairs, batches)
    for (sentences, *padded), batch in zip(shapes, batches):
        longest = pairs.sizes[batch].max(0)
        assert (padded >= longest).all() and sentences * max(padded) <= 2000
        assert sentences < 8 or sentences % 8 == 0
        assert (padded - longest <= -(-pairs.num_tokens_vec(batch).max() // 4)).all()  # to quarters
    if number == 20000:
        assert len(set(shapes)) <= min(MOST, len(shapes) / 6)


def test_padding_changes_only_rounding() -> None:
    """Are loss, gradients, ω and the counts those of the batch as fairseq pads it, in float64 without dropout?"""
    torch.manual_seed(1)
    lengths = np.array([[3, 4], [5, 3], [9, 13], [12, 11], [6, 6], [4, 9], [13, 8], [7, 10]])
    pairs = dataset(ShapedPairs, lengths)
    pairs.src, pairs.tgt = ([torch.randint(4, 96, (int(n),)) for n in side] for side in lengths.T)
    pairs.lengths = np.array([8, 17])
    items = [pairs[number] for number in range(8)]
    results = []
    for sample in (pairs.collater(items), collate(items, PAD, WORDS.eos())):
        still = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        model = build("transformer_admin_tiny", admin_fast="graph", **still).double().train()
        task = SimpleNamespace(target_dictionary=WORDS)
        criterion = CRITERION_REGISTRY["label_smoothed_cross_entropy_fast"](task, False, 0.1)
        loss, size, log = criterion(model, sample)
        loss.backward()
        record = provenance.decode(getattr(model, provenance.KEY))
        counts = [size, log["ntokens"], log["nsentences"], record["source_tokens"], record["target_tokens"]]
        omegas = [tensor for name, tensor in model.state_dict().items() if name.endswith("omega_init")]
        results.append((sample, counts, loss, log["nll_loss"], omegas, [p.grad for p in model.parameters()]))
    (padded, *shaped), (plain, *stock) = results
    assert padded["net_input"]["src_tokens"].shape == padded["target"].shape == (8, 17) != plain["target"].shape
    assert torch.equal(padded["id"], plain["id"]) and shaped[0] == stock[0] and shaped[0][0] == lengths[:, 1].sum()
    # ω is profiled in float32, and its rounding, which differs by machine, moves all gradients by as much.
    torch.testing.assert_close(shaped[1:], stock[1:], rtol=1e-6, atol=1e-6)


def test_empty_batches_are_fairseqs() -> None:
    """Are empty batches, which fairseq gives some processes, and texts too short for a batch fairseq's?"""
    assert dataset(ShapedPairs, np.array([[3, 4]])).collater([]) == {}
    assert batches_of(dataset(ShapedPairs, np.array([[3, 4]])), 100) == []


def iterator(method: str, *further: str) -> Any:
    """The dataset and the first epoch's batches of a trainer."""
    made = trainer(method, 92, (1, 1), 16, "--cpu", "--max-tokens", "300", *further, lengths=random_lengths(1, 300))
    samples = list(made.get_train_iterator(1).next_epoch_itr())
    return made.task, made.task.datasets["train"], samples


def test_only_graph_makes_other_batches() -> None:
    """Are the batches of all other methods fairseq's, and is only the training set's class changed?"""
    (_, stock, expected), (_, fast, ours), (task, graph, shaped) = map(iterator, ("stock", "fast", "graph"))
    assert type(stock) is type(fast) is LanguagePairDataset and type(graph) is ShapedPairs
    assert len(expected) == len(ours) > 10
    for a, b in zip(expected, ours):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len({sample["target"].shape for sample in shaped}) < len({sample["target"].shape for sample in ours})
    task.load_dataset("valid")
    assert type(task.datasets["valid"]) is LanguagePairDataset
    task.load_dataset("train", task_cfg=task.cfg)  # as fairseq-generate does
    assert type(task.datasets["train"]) is LanguagePairDataset


def test_other_datasets_keep_their_batches() -> None:
    class Own(LanguagePairDataset):
        pass

    task = SimpleNamespace(cfg=SimpleNamespace(train_subset="train"), datasets={})
    for kind in (Own, LanguagePairDataset):
        task.load_dataset = lambda split, kind=kind: task.datasets.update({split: dataset(kind, random_lengths(1, 9))})
        shape_batches(task)
        task.load_dataset("train")
        assert type(task.datasets["train"]) is {LanguagePairDataset: ShapedPairs}.get(kind, kind)
