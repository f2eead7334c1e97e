"""What the card does at best: copies in GB/s, read and written, and products of square matrices in TFLOP/s.

python -m recipes.gpu_trial.ceilings     # --cpu: tiny
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from recipes.gpu_trial.rows import seconds, spread, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    device, size = ("cpu", 256) if parser.parse_args().cpu else ("cuda", 8192)
    source = torch.ones(16 * size**2, device=device)
    target = torch.empty_like(source)
    times = [seconds(partial(target.copy_, source)) for _ in range(12)][2:]
    write(what="copy", precision="fp32", gb_s=2 * source.nbytes / min(times) / 1e9, **spread(times))
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        times = [seconds(partial(torch.mm, a, b)) for _ in range(12)][2:]
        write(what="product", precision=name, tflops=2 * size**3 / min(times) / 1e12, **spread(times))


if __name__ == "__main__":
    main()
