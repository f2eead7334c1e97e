"""The methods that are timed, with fairseq's trainer and batches. For stock, it imports no code of this project."""

from __future__ import annotations

import csv
import gzip
import importlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options
from fairseq.data import Dictionary, LanguagePairDataset, data_utils
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

STOCK = "--arch transformer --criterion label_smoothed_cross_entropy"
ADMIN = "--arch transformer_admin --admin-init log --optimizer radam --fp16-no-flatten-grads"
GRAPH = "--admin-fast graph --criterion label_smoothed_cross_entropy_fast"
METHODS = {
    "stock": f"{STOCK} --optimizer adam",
    "stock-adamw": f"{STOCK} --optimizer fused_adamw",
    "pre-ln": f"{STOCK} --optimizer adam --encoder-normalize-before --decoder-normalize-before",
    "plain": f"{ADMIN} --admin-fast off --criterion label_smoothed_cross_entropy",
    "fast": f"{ADMIN} --criterion label_smoothed_cross_entropy_fast",
    "graph": f"{ADMIN} {GRAPH}",
    "readme": f"--arch transformer_admin --optimizer radam {GRAPH}",
}
"""fairseq's options. Stock is Post-LN with fairseq's defaults (fp16 is flat). The others have the recipes' options, or
those of the README's command."""
COMMON = """--share-all-embeddings --label-smoothing 0.1 --dropout 0.1 --attention-dropout 0.1 --adam-betas (0.9,0.98)
--lr 1e-5 --lr-scheduler fixed --clip-norm 1.0 --log-interval 100000 --seed 1 --distributed-world-size 1"""
LENGTHS = Path(__file__).parent / "lengths"
"""Folder with the lengths of two texts: NAME.tsv.gz has the number of training pairs of each source and target length,
in BPE tokens with the end of the sentence. iwslt14 is what fairseq's prepare-iwslt14.sh makes; multi30k is de-en by
`make multi30k`."""


def read_lengths(text: str) -> np.ndarray:
    """The lengths of a text's training pairs, source and target. Shape (N, 2).

    Args:
        text: a name in LENGTHS, or a folder that fairseq-preprocess made.
    """
    if text in {path.name.partition(".")[0] for path in LENGTHS.iterdir()}:
        with gzip.open(LENGTHS / f"{text}.tsv.gz", "rt") as file:
            rows = [[int(cell) for cell in row.values()] for row in csv.DictReader(file, delimiter="\t")]
        return np.repeat(np.array(rows)[:, :2], np.array(rows)[:, 2], axis=0)
    source, target = data_utils.infer_language_pair(text) if Path(text).is_dir() else (None, None)
    paths = [f"{text}/train.{source}-{target}.{language}" for language in (source, target)]
    sides = [data_utils.load_indexed_dataset(path, None) for path in paths if Path(f"{path}.idx").exists()]
    if len(sides) < 2:
        names = ", ".join(sorted(path.name.partition(".")[0] for path in LENGTHS.iterdir()))
        raise ValueError(f"{text} is no folder of fairseq-preprocess with training pairs; expected one, or {names}.")
    return np.stack([side.sizes for side in sides], axis=1)


class RandomText(TranslationTask):
    """fairseq's translation, of random words.

    Attributes:
        lengths: of the training pairs. Shape (N, 2).
    """

    lengths = np.empty((0, 2), dtype=np.int64)

    def load_dataset(self, split: str, **_: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        words, sizes = len(self.src_dict), self.lengths.T
        sides = [torch.randint(4, words, (size.sum(),), generator=generator).split(size.tolist()) for size in sizes]
        arguments = [(side, size, self.src_dict) for side, size in zip(sides, sizes)]
        self.datasets[split] = LanguagePairDataset(*arguments[0], *arguments[1])


def trainer(
    method: str, words: int, layers: tuple[int, int], width: int, *further: str, lengths: np.ndarray | None = None
) -> Trainer:
    """fairseq's trainer of a new model. Attention heads have 64 channels each; a width below 128 has two heads.

    Args:
        method: a key of METHODS.
        words: size of the dictionary, without fairseq's four symbols.
        layers: number of layers of the encoder, and of the decoder.
        width: number of channels C. The feed-forward has 4 C channels.
        further: more options of fairseq.
        lengths: of the pairs that `get_train_iterator` makes batches of. Shape (N, 2).
    """
    if "transformer_admin" in METHODS[method]:
        importlib.import_module("fairseq_admin.plugin")
    arguments = ["no-data", *METHODS[method].split(), *COMMON.split(), *further]
    shape = {"embed-dim": width, "ffn-embed-dim": 4 * width, "attention-heads": math.gcd(width, max(2, width // 64))}
    for side, number in zip(("encoder", "decoder"), layers):
        arguments += [f"--{side}-{name}={size}" for name, size in {"layers": number, **shape}.items()]
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    parsed.tpu = False  # fairseq reads --bf16 as a request for a TPU
    cfg = convert_namespace_to_omegaconf(parsed)
    dictionary = Dictionary()
    for word in range(words):
        dictionary.add_symbol(f"w{word}")
    task = RandomText(cfg.task, dictionary, dictionary)
    if lengths is not None:
        task.lengths = lengths
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batches(tokens: int, words: int, longest_of_each: Iterable[int]) -> Iterator[dict[str, Any]]:
    """fairseq's batches of random words and some padding, each of sentences of about one length.

    Args:
        tokens: the largest number of tokens that a batch may have on either side.
        words: as for `trainer`.
        longest_of_each: the longest sentence of each batch.
    """
    torch.manual_seed(1)
    for longest in longest_of_each:
        lengths = torch.randint(longest - 4, longest + 1, (tokens // longest, 2)).tolist()
        pairs = [[torch.randint(4, words, (length,)) for length in pair] for pair in lengths]
        samples = [{"id": 0, "source": source, "target": target} for source, target in pairs]
        yield collate(samples, pad_idx=1, eos_idx=2, pad_to_multiple=8)
