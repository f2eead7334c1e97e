"""A deep BERT of transformers from scratch, masked language modelling: stock and with Admin, from the same weights.

    OMP_NUM_THREADS=1 python docs/examples/bert_from_scratch.py                              # both methods, one core
    python docs/examples/bert_from_scratch.py --layers 36 --rate 1e-3 5e-4 2e-4 --text book.txt

The text is a file, or the docstrings of Python's standard library; a character is a token. What hides a character has
to be learnt from its neighbours alone, so every method first stays on the plateau of the frequencies for a while.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import fairseq_admin.pytorch as admin

WIDTH, LENGTH, BATCH, CHARACTERS = 96, 12, 32, 96
RARE, MASK = 0, 1
"""The ids of all rare characters, and of what is to be guessed."""
SHARE = 0.25
"""How many characters are masked."""
WARM_UP = 100
METHODS = ["post-ln", "admin"]


def docstrings() -> str:
    """Those of the standard library, a text at a time."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    return "\n\n".join(texts)


def read(text: str) -> list[Tensor]:
    """Rows of LENGTH characters to train on and held out; a paragraph is only in one."""
    paragraphs = list(dict.fromkeys(re.split(r"\n\s*\n", text)))
    held_out = paragraphs[::20]
    del paragraphs[::20]
    texts = [" ".join("\n".join(split).split()) for split in (paragraphs, held_out)]
    ids = {character: i for i, (character, _) in enumerate(Counter(texts[0]).most_common(CHARACTERS - 2), 2)}
    return [torch.tensor([ids.get(c, RARE) for c in text]).unfold(0, LENGTH, LENGTH) for text in texts]


def frequencies_alone(train: Tensor, valid: Tensor) -> float:
    """Bits a character of the best model that reads nothing: the plateau."""
    counts = torch.bincount(train.flatten(), minlength=CHARACTERS) + 1.0
    return -(counts / counts.sum()).log2()[valid].mean().item()


def masked(rows: Tensor) -> dict[str, Tensor]:
    """A batch of which some characters are to be guessed."""
    chosen = torch.rand(rows.shape) < SHARE
    return {"input_ids": rows.masked_fill(chosen, MASK), "labels": rows.masked_fill(~chosen, -100)}


def bits(model: BertForMaskedLM, valid: dict[str, Tensor]) -> float:
    """Bits a masked character held out."""
    model.eval()
    with torch.no_grad():
        loss: float = model(**valid).loss.item()
    model.train()
    return loss / math.log(2)


def run(method: str, rate: float, args: argparse.Namespace, train: Tensor, valid: dict[str, Tensor]) -> str:
    """Train one model; its bits along the way and, with Admin, how far the folded model's outputs are from its."""
    torch.manual_seed(args.seed)
    config = BertConfig(vocab_size=CHARACTERS, hidden_size=WIDTH, num_hidden_layers=args.layers, num_attention_heads=4)
    config.update({"intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH, "initializer_range": args.std})
    config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    model = BertForMaskedLM(config)
    batches = [masked(train[torch.randint(len(train), (BATCH,))]) for _ in range(args.updates)]
    if method == "admin":
        admin.attach(model, batches[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1, (update + 1) / WARM_UP))
    curve = []
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        if number % max(1, args.updates // 5) == 0:
            curve.append(f"{bits(model, valid):5.2f}")
    if method == "admin":
        model.eval()
        with torch.no_grad():
            before = model(**valid).logits
            admin.fold(model, batches[0])  # the stock model again
            curve.append(f"   folded: outputs differ by {(model(**valid).logits - before).abs().max():.0e}")
    return " ".join(curve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rate", nargs="+", type=float, default=[5e-4])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument(
        "--std", type=float, default=0.1, help="of initial matrices (default: Xavier's; BERT's is 0.02)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, help="a file to read (default: the standard library's docstrings)")
    args = parser.parse_args()
    train, held_out = read(args.text.read_text() if args.text else docstrings())
    torch.manual_seed(0)
    valid = masked(held_out[:1000])
    print(f"character frequencies alone: {frequencies_alone(train, held_out[:1000]):.2f} bits a character")
    print(f"{'method':8} {'rate':>7} bits a masked character after each fifth of {args.updates} updates")
    for method in args.method:
        for rate in args.rate:
            print(f"{method:8} {rate:7g} {run(method, rate, args, train, valid)}", flush=True)


if __name__ == "__main__":
    main()
