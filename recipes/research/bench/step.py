"""The methods that are timed, with fairseq's trainer and batches. For stock, it imports no code of this project."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

STOCK = "--arch transformer --criterion label_smoothed_cross_entropy"
ADMIN = "--arch transformer_admin --admin-init log --optimizer radam --fp16-no-flatten-grads"
METHODS = {
    "stock": f"{STOCK} --optimizer adam",
    "stock-adamw": f"{STOCK} --optimizer fused_adamw",
    "pre-ln": f"{STOCK} --optimizer adam --encoder-normalize-before --decoder-normalize-before",
    "plain": f"{ADMIN} --admin-fast off --criterion label_smoothed_cross_entropy",
    "fast": f"{ADMIN} --criterion label_smoothed_cross_entropy_fast",
    "graph": f"{ADMIN} --admin-fast graph --criterion label_smoothed_cross_entropy_fast",
}
"""fairseq's options. Stock is Post-LN with fairseq's defaults (fp16 is flat). The others have the recipes' options."""
COMMON = """--share-all-embeddings --label-smoothing 0.1 --dropout 0.1 --attention-dropout 0.1 --adam-betas (0.9,0.98)
--lr 1e-5 --lr-scheduler fixed --clip-norm 1.0 --log-interval 100000 --seed 1 --distributed-world-size 1"""


def trainer(method: str, words: int, layers: tuple[int, int], width: int, *further: str) -> Trainer:
    """fairseq's trainer of a new model. Attention heads have 64 channels each; a width below 128 has two heads.

    Args:
        method: a key of METHODS.
        words: size of the dictionary, without fairseq's four symbols.
        layers: number of layers of the encoder, and of the decoder.
        width: number of channels C. The feed-forward has 4 C channels.
        further: more options of fairseq.
    """
    if ADMIN in METHODS[method]:
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
    task = TranslationTask(cfg.task, dictionary, dictionary)
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
