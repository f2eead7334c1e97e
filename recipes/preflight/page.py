"""Before a run of days: what is missing, what does it take, and how long? Exit status 2 if it cannot work here.

    python -m recipes.preflight.page iwslt14 --binary BIN --run RUN ... -- fairseq-train's options

`make preflight RECIPE=iwslt14` calls it with the recipe's own plan and options.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from recipes.preflight.updates import run_updates, seconds
from recipes.steps import batch, gpus
from recipes.steps.common import read_lines, run
from recipes.steps.table import read_table

TABLE = Path(__file__).parents[1] / "archives.tsv"
size = functools.partial(tqdm.format_sizeof, suffix="B")
UPDATES, LIMIT = 10, 600.0
"""Updates that are timed, and seconds that they may take."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("name", help="what the recipe is called")
    parser.add_argument("--binary", type=Path, required=True, help="folder of fairseq's binary data, there or not")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--words", type=int, required=True, help="of the dictionary, while it is not there")
    parser.add_argument("--keep", type=int, required=True, help="checkpoints to average")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--updates", type=int)
    for name in ("max-tokens", "update-freq", "devices", "nodes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--cpu", action="store_true", help="train on a CPU")
    parser.add_argument("--price", type=float, help="of a device an hour")
    parser.add_argument("--archives", nargs="*", default=[], help="names in --table")
    parser.add_argument("--downloads", type=Path, help="the folder of downloads")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--data", type=Path, help="a folder with archives, or what is in them")
    args = parser.parse_args(arguments[:split])
    args.prepared = next(args.binary.glob("train*.idx"), None) is not None
    here = args.data or args.prepared
    args.missing = [name for name in args.archives if not here and not (args.downloads / name).exists()]
    return args, arguments[split + 1 :]


def parameters(args: argparse.Namespace, options: list[str]) -> int:
    """Of the model that would be trained, built without memory of its own."""
    import torch
    from fairseq import options as fairseq_options
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    logging.disable(logging.INFO)
    given = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [str(args.binary), *options])
    words = Dictionary()
    dictionary = next(args.binary.glob("dict*.txt"), None)
    for number in range(len(read_lines(dictionary)) if dictionary else args.words):
        words.add_symbol(f"w{number}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words, output_dictionary=words)
    with torch.device("meta"):
        model = ARCH_MODEL_REGISTRY[given.arch].build_model(given, task)
    logging.disable(logging.NOTSET)
    return sum(parameter.numel() for parameter in model.parameters())


def disk(args: argparse.Namespace, count: int) -> tuple[str, str | None]:
    """What the run takes of the disk against what is free, and what is wrong with that.

    The checkpoints are those to average, the newest, the best and one in writing, of fp32 weights and two moments each;
    then the average and the model.
    """
    rows = read_table(args.table)
    archives = sum(rows[name].size or 0 for name in args.missing)
    checkpoints = count * 4 * (3 * (args.keep + 3) + 2)
    folder = args.run
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    short = archives + checkpoints - free
    line = f"disk: checkpoints {size(checkpoints)}, archives {size(archives)}, text apart; {size(free)} are free"
    fault = f"the disk is too small by {size(short)}; make room, or give RUNS= elsewhere"
    return f"{line} at {args.run}", fault if short > 0 else None


def forecast(args: argparse.Namespace, found: list[dict]) -> str:
    """What some updates say of the whole run: hours, the end, the cost."""
    an_update, an_epoch = seconds(found), int(found[-1]["num_updates"]) / float(found[-1]["update"])
    updates = args.epochs * an_epoch if args.epochs else args.updates
    hours = updates * an_update / 3600
    end = datetime.datetime.now() + datetime.timedelta(hours=min(hours, 24 * 365 * 1000))
    text = (
        f"timed: {an_update:.2f} s an update, {an_epoch:.0f} updates an epoch, {updates:.0f} in all: {hours:.1f} hours"
        f", validations and checkpoints apart; started now, it ends on {end:%Y-%m-%d %H:%M}"
    )
    if args.price is None:
        return text
    return f"{text}\ncost: {hours * args.price * args.devices * args.nodes:.2f}, at {args.price:g} an hour and device"


def timed(args: argparse.Namespace, options: list[str], device: bool) -> str:
    """The forecast from some real updates; or why there are none."""
    if not device:
        return "not timed: the recipe's device is not here"
    if args.nodes > 1:
        return "not timed: the run is of several nodes"
    if not args.prepared:
        return "not timed: the text is not prepared yet"
    with tempfile.TemporaryDirectory() as folder:
        return forecast(args, run_updates(options, args.binary, Path(folder), UPDATES, LIMIT))


def main() -> None:
    args, options = parse(sys.argv[1:])
    faults = []
    try:
        if not args.cpu:
            batch.check(args.devices, args.precision, gpus.visible())
    except ValueError as error:
        faults.append(str(error))
    count = parameters(args, options)
    batches = (args.nodes, args.devices, args.update_freq, args.max_tokens)
    tokens = args.nodes * args.devices * args.update_freq * args.max_tokens
    room, no_room = disk(args, count)
    print(f"{args.name}: {count:,} parameters, {args.precision}, on {'the CPU' if args.cpu else 'GPUs'}")
    print(f"plan: {' x '.join(map(str, batches))} = {tokens} tokens an update")
    print(room)
    if args.missing:
        print(f"text: to download: {' '.join(args.missing)}")
    print(timed(args, options, device=not faults), flush=True)
    faults += [no_room] if no_room else []
    if args.data and not args.data.exists():
        faults.append(f"DATA={args.data} is not a folder; expected one with the text")
    if faults:
        raise ValueError("It cannot work here: " + "; ".join(fault.rstrip(".") for fault in faults) + ".")
    print("It can work here.")


if __name__ == "__main__":
    run(main)
