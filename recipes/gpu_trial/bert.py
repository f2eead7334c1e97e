"""A training step of Hugging Face's BERT-base in bf16: stock, with Admin attached, and attached and compiled.

python -m recipes.gpu_trial.bert attached     # --cpu: tiny
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
import transformers

from recipes.gpu_trial.rows import on_device, seconds, spread, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["stock", "attached", "compiled"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    device, sentences, length = ("cpu", 2, 16) if args.cpu else ("cuda", 32, 512)
    torch.manual_seed(1)
    config: Any = transformers.BertConfig(**tiny if args.cpu else {})  # type: ignore[arg-type]
    model: Any = transformers.BertForMaskedLM(config)
    model.to(device)
    words = torch.randint(1000, 30000, (sentences, length), device=device)
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
    if args.method != "stock":
        importlib.import_module("fairseq_admin.pytorch").attach(model, batch)
    if args.method == "compiled":
        for layer in model.bert.encoder.layer:
            layer.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = [seconds(step) for _ in range(13)][3:]
    where = on_device(step, 1000 * sum(times) / len(times))
    write(what=f"bert {args.method}", precision="bf16", tokens=words.numel(), **spread(times), **where)


if __name__ == "__main__":
    main()
