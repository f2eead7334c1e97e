"""Training steps of one method by fairseq's trainer: wall and device time, memory, and the share of the card's peak.

A process times one method, and stock's imports nothing of ours. A first round warms up over every shape of batch, and
a second is timed; all methods have the same batches. Each size is a row.

    python -m recipes.gpu_trial.times fast --tokens 4096 16384 --fp16    # and other options of fairseq's; --cpu: tiny
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

from recipes.gpu_trial.flops import training_flops, utilisation
from recipes.gpu_trial.rows import device_name, on_device, seconds, spread, write

STOCK = "--arch transformer --criterion label_smoothed_cross_entropy"
ADMIN = "--arch transformer_admin --admin-init log --optimizer radam --fp16-no-flatten-grads"
METHODS = {
    "stock": f"{STOCK} --optimizer adam",
    "stock-adamw": f"{STOCK} --optimizer fused_adamw",
    "plain": f"{ADMIN} --admin-fast off --criterion label_smoothed_cross_entropy",
    "fast": f"{ADMIN} --criterion label_smoothed_cross_entropy_fast",
    "compiled": f"{ADMIN} --admin-fast compile --criterion label_smoothed_cross_entropy_fast",
}
"""fairseq's options. Stock is fairseq's Post-LN with its defaults (fp16 is flat); ours are as the recipes train."""
COMMON = """--share-all-embeddings --label-smoothing 0.1 --dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1
--adam-betas (0.9,0.98) --lr 1e-5 --lr-scheduler fixed --clip-norm 1.0 --log-interval 100000 --seed 1
--distributed-world-size 1 --encoder-layers 18 --decoder-layers 18"""
SIZES = {False: (31996, range(12, 108, 8)), True: (92, range(12, 28, 8))}
"""Words, and the longest sentence of each batch; by whether this runs small, on a CPU. With fairseq's four symbols the
words are a multiple of 8, as fairseq-preprocess makes it; else products in half precision are slow."""


@register_optimizer("fused_adamw", dataclass=FairseqAdamConfig)
class FusedAdamW(FairseqAdam):
    """torch's fused AdamW, in place of fairseq's loop over parameters where apex is missing."""

    def __init__(self, cfg: Any, params: Iterable[torch.Tensor]) -> None:
        FairseqOptimizer.__init__(self, cfg)
        self._optimizer = torch.optim.AdamW(params, fused=True, **self.optimizer_config)

    supports_flat_params = True


def trainer(method: str, further: list[str]) -> Trainer:
    """fairseq's, of a new model, with further options."""
    if "stock" in method:  # hydra would import our plugin for it
        sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        sys.modules["hydra_plugins"].__path__ = []
    else:
        importlib.import_module("fairseq_admin")
    arguments = ["no-data", *METHODS[method].split(), *COMMON.split(), *further]
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments)
    parsed.tpu = False  # which fairseq takes --bf16 for
    cfg = convert_namespace_to_omegaconf(parsed)
    dictionary = Dictionary()
    for word in range(SIZES[cfg.common.cpu][0]):
        dictionary.add_symbol(f"w{word}")
    task = TranslationTask(cfg.task, dictionary, dictionary)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batches(tokens: int, small: bool) -> Iterator[dict[str, Any]]:
    """Batches of random words, of at most so many tokens, each of sentences of about one length, as fairseq's are."""
    torch.manual_seed(1)
    words, lengths_of_batches = SIZES[small]
    for longest in lengths_of_batches:
        lengths = torch.randint(longest - 4, longest + 1, (tokens // longest, 2)).tolist()
        pairs = [[torch.randint(4, words, (length,)) for length in pair] for pair in lengths]
        samples = [{"id": 0, "source": source, "target": target} for source, target in pairs]
        yield collate(samples, pad_idx=1, eos_idx=2, pad_to_multiple=8)


def flops_of(made: Trainer, batch: dict[str, Any]) -> int:
    """Operations of a step on a batch."""
    cfg, inputs = made.cfg.model, batch["net_input"]
    sizes = {
        "width": cfg.encoder_embed_dim,
        "ffn": cfg.encoder_ffn_embed_dim,
        "words": len(made.task.source_dictionary),
    }
    sentences, source = inputs["src_tokens"].shape
    layers = cfg.encoder_layers, cfg.decoder_layers
    return training_flops(sentences, source, inputs["prev_output_tokens"].size(1), layers=layers, **sizes)


def peak_of(made: Trainer, step: Callable[[], object]) -> dict[str, Any]:
    """GiB at the peak of one step, above those before it, and the kernels that computed attention."""
    before = torch.cuda.memory_allocated()
    made.cuda_env = None  # with which fairseq, to log the peak, would reset it
    if made.cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile() as profile:
        step()
    names = " ".join(event.key for event in profile.key_averages())
    kernels = set(re.findall(r"aten::_scaled_dot_product_(\w+)_attention(?!\w*backward)", names)) or {"bmm"}
    peak = torch.cuda.max_memory_allocated() - before
    return {"step_gib": peak / 2**30, "attention": " and ".join(sorted(kernels))}


def compilation() -> dict[str, Any]:
    """How many graphs were compiled, and in how many seconds."""
    from torch._dynamo import utils

    times = utils.calculate_time_spent()
    return {"graphs": utils.counters["stats"]["unique_graphs"], "compile_s": times.get("entire_frame_compile")}


def measure(method: str, made: Trainer, tokens: int, precision: str) -> None:
    """Write a row of steps on batches of one size."""
    samples = list(batches(tokens, not made.cuda))
    steps = [partial(made.train_step, [batch]) for batch in samples]
    for step in steps:
        step()
    times = [seconds(step) for step in steps]
    flops = sum(flops_of(made, batch) for batch in samples)
    device = {} if method == "compiled" and not made.cuda else on_device(steps[-1], 1000 * times[-1])
    write(
        what=method,
        precision=precision,
        tokens=tokens,
        **spread(times),
        tflops=flops / sum(times) / 1e12,
        mfu=utilisation(flops, sum(times), device_name()),
        **device,
        **peak_of(made, steps[-1]),
        updates=made.get_num_updates(),  # fewer than steps: fp16 overflowed
        **(compilation() if method == "compiled" else {}),
    )


def measure_captured(made: Trainer, tokens: int, precision: str) -> None:
    """Write a row of one CUDA graph of a forward, loss and backward at one shape: the device's time, without the host.

    On a CPU, which has no such graphs, of the same calls.
    """
    batch = list(batches(tokens, not made.cuda))[-1]
    sample, _ = made._prepare_sample(batch)
    made.model.train()

    def forward_backward() -> None:
        loss = made.criterion(made.model, sample)[0]
        made.optimizer.backward(loss)

    replay = forward_backward
    stream = torch.cuda.Stream() if made.cuda else None
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward_backward()
    if stream:
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward_backward()
        replay = graph.replay
    times = [seconds(replay) for _ in range(12)][2:]
    flops = flops_of(made, batch) * len(times)
    rates = {"tflops": flops / sum(times) / 1e12, "mfu": utilisation(flops, sum(times), device_name())}
    write(what="fast, captured", precision=precision, tokens=tokens, **spread(times), **rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="of a batch, at most")
    parser.add_argument("--captured", action="store_true", help="one CUDA graph of forward and backward, alone")
    args, further = parser.parse_known_args()
    logging.disable(logging.INFO)  # fairseq's
    precisions = [word[2:] for word in further if re.fullmatch("--(memory-efficient-)?fp16|--bf16|--amp", word)]
    made = trainer(args.method, further)
    for tokens in args.tokens:
        if args.captured:
            measure_captured(made, tokens, *precisions or ["fp32"])
        else:
            measure(args.method, made, tokens, *precisions or ["fp32"])
    assert ("fairseq_admin" in sys.modules) == ("stock" not in args.method), "stock is timed without anything of ours"


if __name__ == "__main__":
    main()
