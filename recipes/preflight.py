"""The time and space that a run will take, and what it lacks here. `make preflight RECIPE=iwslt14` prints them."""

from __future__ import annotations

import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairseq_admin.logs import stats
from recipes import machines
from recipes.recipe import Recipe
from recipes.steps.common import read_lines
from recipes.steps.download import disk_space, size
from recipes.steps.table import Archive, read_table
from recipes.training import Pipeline

UPDATES, WARM_UP = 10, 3
"""Number of updates to try. The first ones profile, allocate and compile, so they are not timed."""


def parameters(run: Pipeline) -> int:
    """Number of parameters of the model, which is built on torch's meta device."""
    import torch
    from fairseq import options as fairseq_options
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    import fairseq_admin

    fairseq_admin.register()  # --user-dir does not register a package that is loaded already
    logging.disable(logging.INFO)
    words = [str(run.text.binary), *run.command_options(), *run.settings.TRAIN_ARGS]
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
    dictionary = Dictionary()
    dictionary_file = next(run.text.binary.glob("dict*.txt"), None)
    for number in range(len(read_lines(dictionary_file)) if dictionary_file else run.settings.MERGES):
        dictionary.add_symbol(f"w{number}")
    names = ("source_dictionary", "target_dictionary", "dictionary", "output_dictionary")
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, SimpleNamespace(**dict.fromkeys(names, dictionary)))
    logging.disable(logging.NOTSET)
    return sum(parameter.numel() for parameter in model.parameters())


def archives_of(run: Pipeline) -> list[Archive]:
    """The archives from which the text will be made. They may be there already."""
    reads = {path for step in run.chain().plan(run.text.goals) for path in step.reads}
    names = {path.name for path in reads if path.parent == run.recipe.archives}
    return [row for name, row in read_table(Path(run.settings.TABLE)).items() if name in names] if names else []


def disk(recipe: Recipe, count: int, archives: list[Archive]) -> tuple[str, str]:
    """A line on the space that the run needs and has; and a fault if the space is too small.

    A checkpoint has fp32 weights and two moments. The run has AVERAGE checkpoints and four more: the newest, the best,
    one of an early stop, and one that is being written. The average and the model have weights only.

    Args:
        count: number of parameters.
        archives: see `archives_of`.
    """
    downloads, text = disk_space(archives, recipe.archives, recipe.file.needs.text)
    checkpoints = count * 4 * (3 * (recipe.settings.AVERAGE + 4) + 2)
    folder = next(path for path in recipe.run.absolute().parents if path.exists())
    free = shutil.disk_usage(folder).free
    line = (
        f"disk: archives {size(downloads)}, text {size(text)}, checkpoints {size(checkpoints)}; {size(free)} are free"
    )
    short = downloads + text + checkpoints - free
    fault = f"the disk is too small by {size(short)}; make room, or give RUNS= elsewhere"
    return f"{line} at {recipe.run}", fault if short > 0 else ""


def updates(run: Pipeline) -> list[dict[str, Any]]:
    """Run a few real updates. Returns fairseq's statistics of each.

    Raises:
        ValueError: there were too few updates to time them.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.steps.train", str(run.text.binary), *run.command_options()]
        command += ["--max-update", str(UPDATES), "--no-save", "--disable-validation", "--save-dir", folder]
        command += ["--log-format", "json", "--log-interval", "1", *run.settings.TRAIN_ARGS]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    intervals = [values for values in map(stats, done.stdout.splitlines()) if values]
    inner = [values for tag, values in intervals if tag == "train_inner"]
    if len(inner) <= WARM_UP:
        last_line = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "nothing said")
        raise ValueError(f"{len(inner)} updates of {UPDATES}; the last line: {last_line}")
    return inner


def epoch_tokens(run: Pipeline) -> int:
    """Tokens of the training set, on the side that the model writes."""
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    side = run.text.binarised.name.removeprefix("dict").removesuffix("txt")
    (index,) = run.text.binary.glob(f"train*{side}idx")
    data = MMapIndexedDataset(str(index.with_suffix("")))  # its sizes are unmapped with it
    return int(data.sizes.sum())


def forecast(settings: Any, devices: int, tokens: int, intervals: list[dict[str, Any]]) -> str:
    """Hours and cost of the whole run, from a few updates. (fairseq rounds times to seconds, but not its speed.)

    Args:
        tokens: see `epoch_tokens`. (fairseq rounds the part of the epoch, which is too coarse for a large text.)
    """
    an_update = statistics.mean(float(values["wpb"]) / float(values["wps"]) for values in intervals[WARM_UP:])
    an_epoch = tokens / statistics.mean(float(values["wpb"]) for values in intervals)
    count = settings.EPOCHS * an_epoch if settings.EPOCHS else settings.UPDATES
    hours = count * an_update / 3600
    text = (
        f"timed: {an_update:.2f} s an update, {an_epoch:.0f} updates an epoch, {count:.0f} in all: {hours:.1f} hours"
        ", validations and checkpoints apart"
    )
    if settings.PRICE is None:
        return text
    return f"{text}\ncost: {hours * settings.PRICE * devices:.2f}, at {settings.PRICE:g} an hour and device"


def page(run: Pipeline) -> None:
    """Print the page.

    Raises:
        ValueError: the run cannot work here; the message says why.
    """
    recipe, m, settings = run.recipe, run.machine, run.settings
    faults = machines.faults(m, settings.PRECISION, recipe.file.presets)
    prepared, count = next(run.text.binary.glob("train*.idx"), None) is not None, parameters(run)
    archives = [] if prepared else archives_of(run)
    missing = [row.name for row in archives if not (recipe.archives / row.name).exists()]
    room, no_room = disk(recipe, count, archives)
    on = "the CPU" if m.cpu else "GPUs"
    print(f"{recipe.row}: {count:,} parameters, {settings.PRECISION or 'fp32'}, on {on}")
    print(f"plan: an update of {m.tokens} tokens: {m} (nodes x devices x batches)")
    print(room)
    if missing:
        print(f"text: to download: {' '.join(missing)}")
    if faults:
        print("not timed: the recipe's device is not here")
    elif m.nodes > 1:
        print("not timed: the run has several nodes")
    elif not prepared:
        print("not timed: the text is not prepared yet")
    else:
        print(forecast(settings, m.nodes * m.gpus, epoch_tokens(run), updates(run)), flush=True)
    if wrong := [fault.rstrip(".") for fault in (faults, no_room) if fault]:
        raise ValueError(f"It cannot work here: {'; '.join(wrong)}.")
    print("It can work here.")
