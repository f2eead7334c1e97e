"""What is timed: a training step of one model on a fixed batch, with fairseq's classes for the loss and the optimizer.

Stock Post-LN and Pre-LN have fairseq's loss and Adam, Admin plain fairseq's loss and torch's RAdam, and Admin fast has
its own of both.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from torch import Tensor

import fairseq_admin.plugin  # noqa: F401  (registers the models)
from fairseq_admin.method.profiling import measure
from recipes.bench import counting

STOCK = "--arch transformer --criterion label_smoothed_cross_entropy --optimizer adam"
ADMIN = "--arch transformer_admin --optimizer radam"
METHODS = {
    "post-ln": STOCK,
    "pre-ln": f"{STOCK} --encoder-normalize-before --decoder-normalize-before",
    "admin-plain": f"{ADMIN} --admin-fast off --criterion label_smoothed_cross_entropy",
    "admin": f"{ADMIN} --admin-fast on --criterion label_smoothed_cross_entropy_fast",
}
"""fairseq's options of each; the first is what the others are compared with."""
COMMON = """--share-all-embeddings --label-smoothing 0.1 --dropout 0.1 --attention-dropout 0.1 --adam-betas (0.9,0.98)
--lr 1e-5 --lr-scheduler fixed --clip-norm 1.0 --log-interval 100000 --seed 1 --distributed-world-size 1"""
PADDING = 1


def trainer(options_of_method: str, words: int, further: Sequence[str]) -> Trainer:
    """fairseq's, of a new model, with further options.

    Args:
        words: of the dictionary.
    """
    arguments = ["no-data", *options_of_method.split(), *COMMON.split(), *further]
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    parsed.tpu = False  # which fairseq takes --bf16 for
    cfg = convert_namespace_to_omegaconf(parsed)
    dictionary = Dictionary()
    for word in range(words):
        dictionary.add_symbol(f"w{word}")
    task = TranslationTask(cfg.task, dictionary, dictionary)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


class Run:
    """A method's model with its loss, its optimizer and a fixed batch of random words, on the CPU."""

    def __init__(self, method: str, args: Namespace, *further: str) -> None:
        sizes = ["--cpu", *further]
        for side, layers in (("encoder", args.layers), ("decoder", args.decoder_layers)):
            shape = {"layers": layers, "embed-dim": args.width, "ffn-embed-dim": args.ffn}
            for name, value in {**shape, "attention-heads": args.heads}.items():
                sizes += [f"--{side}-{name}", str(value)]
        made = trainer(METHODS[method], args.words, sizes)
        self.fast, self.criterion = method == "admin", made.criterion
        self.model, self.optimizer = made.model.train(), made.optimizer
        self.optimizer.optimizer.fused = self.fast
        batch = (max(1, args.tokens // args.length), args.length)
        source, self.target = (torch.randint(4, args.words + 4, batch) for _ in range(2))
        lengths = torch.full(batch[:1], args.length)
        self.inputs = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": self.target.roll(1, 1)}

    def loss(self) -> Tensor:
        sample = {"net_input": self.inputs, "target": self.target, "ntokens": self.target.numel()}
        return self.criterion(self.model, sample)[0]

    def forward_backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def profile(self) -> None:
        measure(self.model, self.inputs["src_tokens"], self.inputs["prev_output_tokens"], "reference")

    def counts(self) -> dict[str, float]:
        return counting.counts(self.model, self.loss)
