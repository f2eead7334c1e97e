"""One measurement of `make gpu-trial`, in a process of its own. It prints a line of JSON after `row: ` for each row.

    python -m recipes.research.bench.gpu ceilings       # copies and products of matrices: the card's best
    python -m recipes.research.bench.gpu fast-bf16      # steps of fairseq's trainer: METHOD-PRECISION
    python -m recipes.research.bench.gpu text-fast-bf16 # two epochs of the batches that fairseq makes of Multi30k
    python -m recipes.research.bench.gpu memory-fp16    # the memory of recorded steps: --admin-fast graph
    python -m recipes.research.bench.gpu bert-attached  # steps of Hugging Face's BERT-base in bf16

Without a GPU everything is tiny. All methods have the same batches, and stock runs import nothing of ours.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

from recipes.research.bench.common import interleaved, seconds, synchronize
from recipes.research.bench.step import batches, read_lengths, trainer

SMALL = not torch.cuda.is_available()
DEVICE = "CPU" if SMALL else torch.cuda.get_device_name()
PLACE = "cpu" if SMALL else "cuda"
WORDS = 92 if SMALL else 31996
"""With fairseq's four symbols a multiple of 8, as fairseq-preprocess makes it; else half products are slow."""
LONGEST = range(12, 28 if SMALL else 108, 8)
"""The longest sentence of each batch."""
TOKENS = [64] if SMALL else [4096, 8192, 16384]
"""The largest number of tokens of a batch, for each size of batch."""
LAYERS, WIDTH = ((1, 1), 16) if SMALL else ((18, 18), 512)
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12}
"""Products of dense 16-bit matrices a second, by NVIDIA's sheets of the SXM cards; by a part of the device's name."""


@register_optimizer("fused_adamw", dataclass=FairseqAdamConfig)
class FusedAdamW(FairseqAdam):
    """torch's fused AdamW, in place of fairseq's loop over parameters where apex is missing."""

    def __init__(self, cfg: Any, params: Iterable[torch.Tensor]) -> None:
        FairseqOptimizer.__init__(self, cfg)
        self._optimizer = torch.optim.AdamW(params, fused=True, **self.optimizer_config)

    supports_flat_params = True


def training_flops(
    sentences: int, source: int, target: int, *, layers: tuple[int, int], width: int, ffn: int, words: int
) -> int:
    """Floating-point operations of the matrix products in a forward and a backward of an encoder-decoder.

    Padding counts, other operations do not. A backward has twice the products of its forward. Embeddings are tied.

    Args:
        sentences: B sentences of S source and T target positions each.
        source: S.
        target: T.
        layers: of the encoder and of the decoder.
        width: C channels.
        ffn: F, of the feed-forward.
        words: V.
    """

    def attention(queries: int, keys: int) -> int:
        return 4 * sentences * queries * keys * width

    rows, target_rows, feed_forward = sentences * source, sentences * target, 4 * width * ffn
    encoder = rows * (8 * width**2 + feed_forward) + attention(source, source)
    decoder = target_rows * (12 * width**2 + feed_forward) + rows * 4 * width**2
    decoder += attention(target, target) + attention(target, source)
    return 3 * (layers[0] * encoder + layers[1] * decoder + 2 * target_rows * width * words)


def utilisation(flops: float, seconds: float, device: str) -> float | None:
    """Model FLOPs utilisation: the share of the device's peak; None for a device whose peak is not known."""
    peak = next((value for name, value in PEAKS.items() if name in device), None)
    return None if peak is None else flops / seconds / peak


def write(what: str, precision: str, times: Sequence[float], flops: float | None = None, **columns: Any) -> None:
    """Print a row: the mean, lowest and highest of the times in ms, and with `flops` the rate of one call."""
    mean = statistics.mean(times)
    row = {"what": what, "precision": precision, **columns}
    row |= {"ms": 1000 * mean, "low": 1000 * min(times), "high": 1000 * max(times)}
    if flops:
        row |= {"tflops": flops / mean / 1e12, "mfu": utilisation(flops, mean, DEVICE)}
    row = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
    print("row:", json.dumps(row), flush=True)


def wall_times(action: Callable[[], object], rounds: int = 10) -> list[float]:
    return interleaved([action], rounds, time.perf_counter)[0]


def profiled(step: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Columns of one step: its peak memory minus the memory before it, in GiB, and the kernels that computed attention.

    On a GPU, also the time in which its kernels ran, their number, and the share of time in which the GPU was idle.

    Args:
        seconds: the wall time of the step.
    """
    before = torch.cuda.memory_allocated()
    if not SMALL:
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile() as profile:
        step()
        synchronize()
    events = profile.key_averages()
    names = " ".join(event.key for event in events)
    attention = set(re.findall(r"aten::_scaled_dot_product_(\w+)_attention(?!\w*backward)", names)) or {"bmm"}
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    columns = {"step_gib": peak, "attention": " and ".join(sorted(attention))}
    # An annotation of the host also appears on the device, and spans the kernels inside it.
    kernels = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
    if kernels:
        busy = sum(event.self_device_time_total for event in kernels) / 1e6
        columns |= {"device_ms": 1000 * busy, "idle": 1 - busy / seconds}
        columns["launches"] = sum(event.count for event in kernels)
    return columns


def ceilings() -> None:
    """Copies in GB/s, read and written, and products of square matrices in TFLOP/s."""
    size = 256 if SMALL else 8192
    source = torch.ones(16 * size**2, device=PLACE)
    times = wall_times(partial(torch.empty_like(source).copy_, source))
    write("copy", "fp32", times, gb_s=2 * source.nbytes / min(times) / 1e9)
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=PLACE).to(dtype) for _ in range(2))
        times = wall_times(partial(torch.mm, a, b))
        write("product", precision, times, tflops=2 * size**3 / min(times) / 1e12)


def flops_of(batch: dict[str, Any]) -> int:
    """Operations of a step on a batch."""
    sentences, source = batch["net_input"]["src_tokens"].shape
    target = batch["net_input"]["prev_output_tokens"].size(1)
    return training_flops(sentences, source, target, layers=LAYERS, width=WIDTH, ffn=4 * WIDTH, words=WORDS + 4)


def trainer_of(method: str, precision: str, *further: str, **more: Any) -> Any:
    """The trainer of a method."""
    if "stock" in method:  # hydra would import our plugin
        sys.modules["hydra_plugins"] = SimpleNamespace(__name__="hydra_plugins", __path__=[])  # type: ignore[assignment]
    made = trainer(method, WORDS, LAYERS, WIDTH, "--cpu" if SMALL else f"--{precision}", *further, **more)
    made.cuda_env = None  # fairseq would reset the peak of memory to log it
    return made


def steps(method: str, precision: str) -> None:
    """Print a row for each size of batch: the time of one training step on each of several shapes.

    Three steps on each shape come first. They warm up, and they record graphs.
    """
    made = trainer_of(method, precision)
    for tokens in TOKENS:
        samples = list(batches(tokens, WORDS, LONGEST))
        actions = [partial(made.train_step, [batch]) for batch in samples]
        *_, times = zip(*interleaved(actions, 3, time.perf_counter))
        columns = profiled(actions[-1], times[-1])
        columns["updates"] = made.get_num_updates()  # fewer than steps: fp16 overflowed
        write(method, precision, times, statistics.mean(map(flops_of, samples)), tokens=tokens, **columns)


def used_gib() -> float:
    """Memory of the GPU that is taken, by this process and others, in GiB; 0 without a GPU."""
    free, total = (0, 0) if SMALL else torch.cuda.mem_get_info()
    return (total - free) / 2**30


def over_text(method: str, precision: str) -> None:
    """Print a row for each size of batch and each of two epochs of Multi30k, with random words: the time of a step.

    `replayed` is the share of steps that were replayed, `used_gib` the memory taken since the trainer was built, and
    `tokens_s` counts the tokens of both sides, without padding. Other columns count padding.
    """
    for tokens in TOKENS:
        gc.collect()
        torch.cuda.empty_cache()
        before, lengths = used_gib(), read_lengths("multi30k")[:: 500 if SMALL else 1]
        made = trainer_of(method, precision, "--max-tokens", str(tokens), "--num-workers", "0", lengths=lengths)
        iterator = made.get_train_iterator(1)
        for epoch in (1, 2):
            samples = list(iterator.next_epoch_itr())
            times, replayed = [], 0
            for sample in samples:
                times.append(seconds(partial(made.train_step, [sample]), time.perf_counter))
                replayed += getattr(made.criterion, "replayed", None) is not None
            real = sum(sample["ntokens"] + int(sample["net_input"]["src_lengths"].sum()) for sample in samples)
            columns = {"tokens": tokens, "epoch": epoch, "steps": len(times), "updates": made.get_num_updates()}
            columns |= {"replayed": replayed / len(times), "used_gib": used_gib() - before}
            columns["tokens_s"] = real / sum(times)
            write(f"{method}, text", precision, times, statistics.mean(map(flops_of, samples)), **columns)
        del made, iterator


def memory(precision: str) -> None:
    """Print a row each with 0, 16 and 64 recorded shapes of batch: the memory taken since the trainer was built.

    The last step before a row is computed as usual, so that its memory counts too. Times are those of the steps since
    the row before: computed as usual, then recorded and replayed once.
    """
    before = used_gib()
    made = trainer_of("graph", precision)
    samples = list(batches(TOKENS[len(TOKENS) // 2], WORDS, range(16, 64 if SMALL else 528, 8)))
    made.train_step(samples[:1])  # the monitor measures a run's first step
    for start, end in ((0, 0), (0, len(samples) // 4), (len(samples) // 4, len(samples))):
        chosen = samples[start:end] or samples
        times = [seconds(partial(made.train_step, [sample]), time.perf_counter) for sample in chosen]
        hook = made.model.register_forward_hook(lambda *_: None)  # a step that a hook watches is computed
        made.train_step(samples[:1])
        hook.remove()
        shapes = sum(pair is not None for pair in made.criterion.steps.pairs.values())
        write("memory", precision, times, shapes=shapes, used_gib=used_gib() - before, updates=made.get_num_updates())


def bert(method: str) -> None:
    """A row of a step of BERT-base: stock, with Admin attached, or attached and compiled."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=2 if SMALL else 12)).to(PLACE)
    words = torch.randint(1000, 30000, (2, 16) if SMALL else (32, 512), device=PLACE)
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    if method != "stock":
        importlib.import_module("fairseq_admin.pytorch").attach(model, batch)
    if method == "compiled":
        for layer in model.bert.encoder.layer:
            layer.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast(PLACE, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = wall_times(step)
    write(f"bert {method}", "bf16", times, tokens=words.numel(), **profiled(step, statistics.mean(times)))


def main() -> None:
    logging.disable(logging.INFO)  # fairseq's
    kind, _, last = sys.argv[1].rpartition("-")
    if kind == "bert":
        bert(last)
    elif kind == "memory":
        memory(last)
    elif kind.startswith("text-"):
        over_text(kind.removeprefix("text-"), last)
    elif kind:
        steps(kind, last)
    else:
        ceilings()
    assert "stock" not in sys.argv[1] or "fairseq_admin" not in sys.modules, "stock is timed without anything of ours"


if __name__ == "__main__":
    main()
