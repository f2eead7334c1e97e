"""How fast an Admin model translates: folded, next to a stock Transformer of equal sizes; and with CTranslate2.

The folded model and a freshly initialised stock one take turns, in alternating order, to translate the same sentences;
a pair gives one ratio, and the median counts. Every translation is given the same length, so that different weights do
the same work. CTranslate2, in float32 and int8, is compared with fairseq's beam search with the folded model in the
same way.

    python recipes/bench/engines.py                         # 18L-18L of random weights, about ten minutes
    python recipes/bench/engines.py --checkpoint average.pt --data data --text data/bpe/test.de
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from fairseq.data import Dictionary  # noqa: E402
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY  # noqa: E402
from fairseq.sequence_generator import SequenceGenerator  # noqa: E402

from fairseq_admin.checkpoints.building import build  # noqa: E402
from fairseq_admin.checkpoints.checkpoint import Checkpoint  # noqa: E402
from fairseq_admin.checkpoints.stock import ARCH  # noqa: E402
from fairseq_admin.export.exportable import prepare  # noqa: E402
from fairseq_admin.export.folder import export  # noqa: E402
from fairseq_admin.method.norms import shortcut_norms  # noqa: E402
from fairseq_admin.text.assets import Assets
from fairseq_admin.translation.engines import padded  # noqa: E402
from recipes.bench.conditions import conditions, keep  # noqa: E402
from recipes.bench.turns import paired, summary  # noqa: E402

BEAM = 5
TARGET = 1.02


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--checkpoint", type=Path, help="of an Admin model (default: one of random weights)")
    top.add_argument("--data", type=Path, help="folder with the checkpoint's dictionaries (default: next to it)")
    top.add_argument("--text", type=Path, help="sentences in the model's units (default: random ones)")
    top.add_argument("--layers", type=int, default=18, help="of the random model; so are the next four")
    top.add_argument("--width", type=int, default=256)
    top.add_argument("--ffn", type=int, default=1024)
    top.add_argument("--heads", type=int, default=4)
    top.add_argument("--words", type=int, default=4000)
    top.add_argument("--sentences", type=int, default=16, help="how many to translate (default: 16)")
    top.add_argument("--length", type=int, default=20, help="units of every translation (default: 20)")
    top.add_argument("--free", action="store_true", help="let CTranslate2 and fairseq end their translations")
    top.add_argument("--batch", type=int, default=16, help="sentences translated at once (default: 16)")
    top.add_argument("--threads", type=int, default=1)
    top.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a busy machine")
    top.add_argument("--pairs", type=int, default=7)
    top.add_argument("--csv", type=Path, help="file to write the rows to")
    return top


def random_checkpoint(args: Namespace, folder: Path) -> Path:
    """A checkpoint of an Admin model with random weights and random ω, its dictionaries next to it."""
    words = Dictionary()
    for number in range(args.words):
        words.add_symbol(f"w{number}")
    for language in ("a", "b"):
        words.save(str(folder / f"dict.{language}.txt"))
    options = dict(_name="transformer_admin", share_all_embeddings=True, update_freq=[1])
    options.update(admin_init="reference", admin_profile_tokens=8192, admin_max_skipped_updates=100)
    sizes = {"layers": args.layers, "embed_dim": args.width, "ffn_embed_dim": args.ffn, "attention_heads": args.heads}
    options.update({f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()})
    namespace = Namespace(**options)
    ARCH_CONFIG_REGISTRY["transformer_admin"](namespace)
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY["transformer_admin"].build_model(namespace, task)
    for stack in (model.encoder, model.decoder):
        for norm in shortcut_norms(stack):
            norm.omega_init.fill_(1.0)
            if norm.omega_delta is not None:
                torch.nn.init.uniform_(norm.omega_delta, 0.0, 3.0)
    task_options = {"_name": "translation", "source_lang": "a", "target_lang": "b", "data": str(folder)}
    cfg = {"model": vars(namespace), "task": task_options, "criterion": {"_name": "cross_entropy"}}
    path = folder / "random.pt"
    Checkpoint({"args": None, "cfg": cfg, "model": model.state_dict()}).write(path)
    return path


def in_fairseq(
    model: Any, source: Dictionary, target: Dictionary, batches: list[list[list[str]]], length: int
) -> Callable:
    """An action that translates the batches by fairseq's beam search; length 0: until the end of a sentence."""
    bounds: dict[str, int] = {"min_len": length, "max_len_b": length} if length else {"max_len_b": 200}
    generator = SequenceGenerator([model], target, beam_size=BEAM, max_len_a=0, **bounds)
    samples = [padded(batch, source, left=True) for batch in batches]

    def action() -> None:
        for tokens in samples:
            net_input = {"src_tokens": tokens, "src_lengths": tokens.ne(source.pad()).sum(1)}
            found = generator.generate([model], {"net_input": net_input})
            assert not length or all(len(hypotheses[0]["tokens"]) == length + 1 for hypotheses in found)

    return action


def in_ctranslate2(folder: Path, batches: list[list[list[str]]], length: int, threads: int) -> Callable:
    """An action that translates the batches with CTranslate2."""
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=threads)
    bounds = {"min_decoding_length": length, "max_decoding_length": length} if length else {"max_decoding_length": 200}

    def action() -> None:
        for batch in batches:
            found = translator.translate_batch(batch, beam_size=BEAM, **bounds)
            assert not length or all(len(result.hypotheses[0]) == length for result in found)

    return action


def sentences(args: Namespace, source: Dictionary) -> list[list[list[str]]]:
    """Batches of sentences of similar length: the first of the text, or random ones."""
    if args.text:
        lines = [line.split() for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        generator = random.Random(1)
        lengths = [generator.randint(args.length // 2, 3 * args.length // 2) for _ in range(args.sentences)]
        lines = [[source[generator.randrange(4, len(source))] for _ in range(length)] for length in lengths]
    lines = sorted(lines[: args.sentences], key=len, reverse=True)
    return [lines[first : first + args.batch] for first in range(0, len(lines), args.batch)]


def stock_twin(options: Namespace, source: Dictionary, target: Dictionary) -> Any:
    """A freshly initialised stock `transformer` of the same sizes."""
    torch.manual_seed(2)
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    return ARCH_MODEL_REGISTRY[ARCH].build_model(copy.deepcopy(options), task).eval()


def row(name: str, times: list, count: int) -> dict[str, Any]:
    """The median ratio of times, and sentences a second of both."""
    first, second = (count / statistics.median(side) for side in zip(*times))
    return {"what": name, "first": first, "second": second, **summary([a / b for a, b in times], "ratio")}


def line(found: dict[str, Any], target: float | None) -> str:
    """A row of the report."""
    verdict = "" if target is None else f"  target {target:.2f} {'met' if found['ratio'] <= target else 'missed'}"
    spread = f"{found['ratio']:6.3f}  ({found['low']:.3f} - {found['high']:.3f})"
    return f"{found['what']:38} {found['first']:9.2f} {found['second']:9.2f}  {spread}{verdict}"


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.device = "cpu"
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as place:
        path = args.checkpoint or random_checkpoint(args, Path(place))
        checkpoint = Checkpoint.read(path)
        model = prepare(checkpoint, Assets(path, args.data))
        batches = sentences(args, model.source)
        count = sum(map(len, batches))
        folded = build(model.stock)
        twin = stock_twin(model.options, model.source, model.target)
        sizes = [sum(parameter.numel() for parameter in it.parameters()) for it in (folded, twin)]
        for it in (folded, twin):
            it.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
        ours = in_fairseq(folded, model.source, model.target, batches, args.length)
        other = in_fairseq(twin, model.source, model.target, batches, args.length)
        rows = [row("fairseq: folded / stock Post-LN", paired(ours, other, args, "folded"), count)]
        del twin, other
        length = 0 if args.free else args.length
        ours = in_fairseq(folded, model.source, model.target, batches, length)
        for quantization in ("float32", "int8"):
            folder = Path(place) / quantization
            export(checkpoint, "ctranslate2", folder, Assets(path, args.data), quantization)
            quick = in_ctranslate2(folder, batches, length, args.threads)
            times = paired(quick, ours, args, f"CTranslate2 {quantization}")
            rows.append(row(f"CTranslate2 {quantization} / fairseq, folded", times, count))
    options = model.options
    units = sum(len(line) for batch in batches for line in batch) / count
    print(
        f"{options.encoder_layers}L-{options.decoder_layers}L, width {options.decoder_embed_dim}, beam {BEAM}, {count} "
        f"sentences of {units:.0f} units, batches of {args.batch}, "
        f"{args.threads} CPU threads, {args.clock} clock, {args.pairs} pairs"
    )
    print(f"translations of {args.length} units{'; in the rows of CTranslate2, of any length' if args.free else ''}")
    print(f"parameters: folded {sizes[0]}, stock {sizes[1]} {'(equal)' if sizes[0] == sizes[1] else '(NOT EQUAL)'}")
    print(f"{'sentences a second, ratio of times':38} {'first':>9} {'second':>9}  {'ratio':>6}  (pairs from - to)")
    for found, target in zip(rows, (TARGET, None, None)):
        print(line(found, target))
    given = {"layers": f"{options.encoder_layers}-{options.decoder_layers}", "width": options.decoder_embed_dim}
    given |= {"beam": BEAM, "sentences": count, "length": args.length, "weights": args.checkpoint or "random"}
    keep(args.csv, {**given, "pairs": args.pairs, **conditions(args)}, rows)
    return 0


if __name__ == "__main__":
    logging.disable(logging.INFO)
    sys.exit(main())
