"""Before a run of days: what is missing, what does it take, and how long? `make preflight RECIPE=iwslt14` prints it."""

from __future__ import annotations

import datetime
import functools
import logging
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm

from recipes import machines
from recipes.preflight.updates import run_updates, seconds
from recipes.recipe import Recipe
from recipes.steps.common import read_lines
from recipes.steps.table import read_table
from recipes.training import Run

size = functools.partial(tqdm.format_sizeof, suffix="B")
UPDATES, LIMIT = 10, 600.0
"""Updates that are timed, and seconds that they may take."""


def options(run: Run) -> list[str]:
    """fairseq-train's, as the run would have them."""
    return [*run.command_options(), *run.settings.TRAIN_ARGS]


def parameters(run: Run) -> int:
    """Of the model that would be trained, built without memory of its own."""
    import torch
    from fairseq import options as fairseq_options
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    logging.disable(logging.INFO)
    words = [str(run.model.binary), *options(run)]
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
    dictionary = Dictionary()
    there = next(run.model.binary.glob("dict*.txt"), None)
    for number in range(len(read_lines(there)) if there else run.settings.MERGES):
        dictionary.add_symbol(f"w{number}")
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary")
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, SimpleNamespace(**dict.fromkeys(names, dictionary)))
    logging.disable(logging.NOTSET)
    return sum(parameter.numel() for parameter in model.parameters())


def missing(recipe: Recipe, prepared: bool) -> list[str]:
    """The archives that would be downloaded."""
    names = {text.archive for text in recipe.file.texts.values() if text.archive}
    here = prepared or getattr(recipe.settings, "DATA", None)
    return sorted(name for name in names if not here and not (recipe.archives / name).exists())


def disk(recipe: Recipe, count: int, archives: list[str]) -> tuple[str, str | None]:
    """What the run takes of the disk against what is free, and what is wrong with that.

    The checkpoints are those to average, the newest, the best and one in writing, of fp32 weights and two moments each;
    then the average and the model.
    """
    table = read_table(Path(recipe.settings.TABLE)) if archives else {}
    downloads = sum(table[name].size or 0 for name in archives)
    checkpoints = count * 4 * (3 * (recipe.settings.AVERAGE + 3) + 2)
    folder = recipe.run
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    short = downloads + checkpoints - free
    line = f"disk: checkpoints {size(checkpoints)}, archives {size(downloads)}, text apart; {size(free)} are free"
    fault = f"the disk is too small by {size(short)}; make room, or give RUNS= elsewhere"
    return f"{line} at {recipe.run}", fault if short > 0 else None


def forecast(settings: Any, devices: int, intervals: list[dict]) -> str:
    """What some updates say of the whole run: hours, the end, the cost."""
    an_update, an_epoch = seconds(intervals), int(intervals[-1]["num_updates"]) / float(intervals[-1]["update"])
    updates = settings.EPOCHS * an_epoch if settings.EPOCHS else settings.UPDATES
    hours = updates * an_update / 3600
    end = datetime.datetime.now() + datetime.timedelta(hours=min(hours, 24 * 365 * 1000))
    text = (
        f"timed: {an_update:.2f} s an update, {an_epoch:.0f} updates an epoch, {updates:.0f} in all: {hours:.1f} hours"
        f", validations and checkpoints apart; started now, it ends on {end:%Y-%m-%d %H:%M}"
    )
    if settings.PRICE is None:
        return text
    return f"{text}\ncost: {hours * settings.PRICE * devices:.2f}, at {settings.PRICE:g} an hour and device"


def timed(run: Run, prepared: bool, device: bool) -> str:
    """The forecast from some real updates; or why there are none."""
    if not device:
        return "not timed: the recipe's device is not here"
    if run.machine.nodes > 1:
        return "not timed: the run is of several nodes"
    if not prepared:
        return "not timed: the text is not prepared yet"
    with tempfile.TemporaryDirectory() as folder:
        intervals = run_updates(options(run), run.model.binary, Path(folder), UPDATES, LIMIT)
    return forecast(run.settings, run.machine.nodes * run.machine.gpus, intervals)


def page(recipe: Recipe, run: Run) -> None:
    """Print it.

    Raises:
        ValueError: the run cannot work here; the message says why.
    """
    machine, settings = run.machine, recipe.settings
    faults = list(machines.faults(machine, settings.PRECISION))
    prepared = next(run.model.binary.glob("train*.idx"), None) is not None
    archives = missing(recipe, prepared)
    count = parameters(run)
    batches = (machine.nodes, machine.gpus, machine.update_freq, machine.max_tokens)
    room, no_room = disk(recipe, count, archives)
    where = "the CPU" if machine.cpu else "GPUs"
    print(f"{recipe.row}: {count:,} parameters, {settings.PRECISION or 'fp32'}, on {where}")
    print(f"plan: {' x '.join(map(str, batches))} = {machine.tokens} tokens an update")
    print(room)
    if archives:
        print(f"text: to download: {' '.join(archives)}")
    print(timed(run, prepared, device=not faults), flush=True)
    faults += [no_room] if no_room else []
    data = getattr(settings, "DATA", None)
    if data and not Path(data).exists():
        faults.append(f"DATA={data} is not a folder; expected one with the text")
    if faults:
        raise ValueError("It cannot work here: " + "; ".join(fault.rstrip(".") for fault in faults) + ".")
    print("It can work here.")
