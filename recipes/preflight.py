"""The space that a run will take, and what it lacks here: `make preflight RECIPE=iwslt14` prints them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

from recipes.steps.common import read_lines
from recipes.steps.download import disk_space, size
from recipes.steps.table import Archive
from recipes.training import Run


def parameters(run: Run) -> int:
    """Number of parameters of the model, which is built on torch's meta device."""
    import torch
    from fairseq import options as fairseq_options
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_admin

    fairseq_admin.register()  # --user-dir does not register a package that is loaded already
    logging.disable(logging.INFO)
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), run.train_words())
    dictionary = Dictionary()
    dictionary_file = next(run.text.binary.glob("dict*.txt"), None)
    for number in range(len(read_lines(dictionary_file)) if dictionary_file else run.text.options.merges):
        dictionary.add_symbol(f"w{number}")
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary")
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, SimpleNamespace(**dict.fromkeys(names, dictionary)))
    logging.disable(logging.NOTSET)
    return sum(parameter.numel() for parameter in model.parameters())


def disk(run: Run, count: int, archives: list[Archive]) -> tuple[str, str]:
    """A line on the space that the run needs and has; and a fault if the space is too small.

    A checkpoint has fp32 weights and two moments. The run has the checkpoints that are averaged and four more: the
    newest, the best, one of an early stop, and one that is being written. The average and the model have weights only.

    Args:
        count: number of parameters.
        archives: the archives of a text that is not made yet.
    """
    recipe = run.recipe
    downloads, text = disk_space(archives, recipe.archives, recipe.file.needs.text)
    checkpoints = count * 4 * (3 * (int(recipe.options["average"]["--last"]) + 4) + 2)
    folder = next(path for path in recipe.run.absolute().parents if path.exists())
    free = shutil.disk_usage(folder).free
    line = (
        f"disk: archives {size(downloads)}, text {size(text)}, checkpoints {size(checkpoints)}; {size(free)} are free"
    )
    short = downloads + text + checkpoints - free
    fault = f"the disk is too small by {size(short)}; make room, or give RUNS= elsewhere"
    return f"{line} at {recipe.run}", fault if short > 0 else ""


def page(run: Run) -> None:
    """Print the page.

    Raises:
        ValueError: the run cannot work here; the message says why.
    """
    recipe, machine = run.recipe, run.machine
    archives = [] if run.is_done("prepare") else run.text.archives()
    missing = [row.name for row in archives if not Path(recipe.archives, row.name).exists()]
    room, no_room = disk(run, count := parameters(run), archives)
    print(f"{recipe.target}: {count:,} parameters, on {'the CPU' if machine.cpu else 'GPUs'}")
    print(f"plan: an update of {recipe.tokens} tokens: {machine} (nodes x devices x batches)")
    print(room)
    if missing:
        print(f"text: to download: {' '.join(missing)}")
    if wrong := [fault.rstrip(".") for fault in (run.device_fault(), no_room) if fault]:
        raise ValueError(f"It cannot work here: {'; '.join(wrong)}.")
    print("It can work here.")
