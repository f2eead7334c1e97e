"""One GPU for one cell of a grid."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from recipes.steps import gpus


@contextmanager
def one_gpu(folder: Path, jobs: int) -> Iterator[dict[str, str]]:
    """The environment for a command that may use one GPU: the one that the fewest of `jobs` cells use.

    There are as many places as jobs, place k on GPU k modulo the number of GPUs; a job takes one. The kernel frees a
    killed job's place. Without GPUs, or with all of them hidden, the environment is as it is.

    Args:
        folder: the grid's, where the places are files.
    """
    there = gpus.visible()
    if not there:
        yield dict(os.environ)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for place in range(max(1, jobs)):
            try:
                held.enter_context(FileLock(folder / f".gpu-{place}.guard").acquire(timeout=0))
                break
            except Timeout:
                # This place is taken. If all are, another make is running too, and the last place is shared.
                continue
        yield {**os.environ, "CUDA_VISIBLE_DEVICES": there[place % len(there)].index}
