"""Before a run of days: what will it take, and can it work here? One page, and exit status 2 if it cannot.

    python -m recipes.preflight.page iwslt14 --pair de-en --binary BIN --run RUN ... -- fairseq-train's options

`make preflight RECIPE=iwslt14` calls it with the recipe's own sizes, plan and options; --short is what every recipe
prints before training.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

from recipes.preflight import forecast, known_corpus, machine, trial
from recipes.preflight.batches import batches
from recipes.steps import batch, gpus
from recipes.steps.activations import Batch, Sizes
from recipes.steps.common import run
from recipes.steps.memory import gigabytes, most, need

HERE = Path(__file__).parent
ARCHIVES = HERE.parent / "archives.tsv"


def price(text: str) -> float:
    """What the user says a device costs.

    Raises:
        argparse.ArgumentTypeError: it is not a price.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        message = f"PRICE={text} is not a price; expected what a device costs an hour, as in PRICE=2.50"
        raise argparse.ArgumentTypeError(message)
    return value


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("name", help="the text's, as in recipes/preflight/corpora.tsv")
    parser.add_argument("--title", help="what the recipe is called")
    parser.add_argument("--pair", default="text-text", help="source and target language")
    parser.add_argument("--binary", type=Path, required=True, help="folder of fairseq's binary data, there or not")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--keep", type=int, required=True, help="checkpoints to average")
    parser.add_argument("--save-every", type=int, required=True, help="updates between checkpoints")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--devices", type=int, default=1, help="of a node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--memory", type=float, help="GB of a device")
    parser.add_argument("--max-tokens", type=int, required=True, help="of a batch")
    parser.add_argument("--update-freq", type=int, default=1, help="batches of a device in an update")
    parser.add_argument("--price", type=price, help="of a device an hour")
    parser.add_argument("--trial-updates", type=int, default=20)
    parser.add_argument("--trial-seconds", type=float, default=120)
    parser.add_argument("--archives", nargs="*", default=[], help="names in --table")
    parser.add_argument("--table", type=Path, default=ARCHIVES)
    parser.add_argument("--url", default="", help="where archives come from")
    parser.add_argument("--data", type=Path, help="a folder with archives, or what is in them")
    parser.add_argument("--short", action="store_true", help="only what needs no time")
    batch.add_sizes(parser)
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


def checkpoint_bytes(sizes: Sizes, keep: int) -> float:
    """Those to average, the newest, the best and one in writing: fp32 weights and two moments; average and model."""
    return sizes.parameters * 4.0 * (3 * (keep + 3) + 2)


def disk(args: argparse.Namespace, sizes: Sizes, found: known_corpus.KnownCorpus) -> tuple[str, str | None]:
    """What the run takes of the disk against what is free, and what is wrong with that."""
    archives = 0.0 if found.prepared or args.data else machine.archive_bytes(args.archives, args.table)
    parts = {"archives": archives, "text": found.text, "binary": found.binary}
    parts["checkpoints"] = checkpoint_bytes(sizes, args.keep)
    wanted, there = sum(parts.values()), machine.free_disk(args.run)
    listed = ", ".join(f"{name} {gigabytes(part)}" for name, part in parts.items() if part)
    line = f"disk: {gigabytes(wanted)} GB ({listed}) of {gigabytes(there)} GB free at {args.run}"
    fault = f"the disk is too small by {gigabytes(wanted - there)} GB; make room, or give RUNS= elsewhere"
    return line, fault if wanted > there else None


def source(args: argparse.Namespace, found: known_corpus.KnownCorpus) -> tuple[str, str | None]:
    """Where the text comes from, and what is wrong with that."""
    if found.prepared:
        return f"text: prepared, {found.corpus.pairs} pairs, {found.corpus.words} words", None
    if args.data:
        there = args.data.is_dir()
        return f"text: from {args.data}", None if there else f"DATA={args.data} is not a folder"
    if not args.archives:
        return "text: made or fetched by the recipe", None
    if machine.reachable(args.archives, args.table, args.url):
        return f"text: {len(args.archives)} archives to download; a server answers", None
    return (
        f"text: {len(args.archives)} archives to download",
        "no server of theirs answers; give DATA= with the archives",
    )


def kinds(args: argparse.Namespace, pair: tuple[str, str], found: known_corpus.KnownCorpus | None) -> set[Batch]:
    """The run's batches; of a text that is not prepared the largest that could be."""
    if found and found.prepared:
        return batches(args.binary, pair, args.max_tokens, args.length)
    return {Batch.full(args.max_tokens, args.length)}


def weights(
    args: argparse.Namespace, sizes: Sizes, found: set[Batch], memory: float | None, prepared: bool
) -> tuple[str, str | None]:
    """What a device takes of memory with such batches against what it has, and what is wrong with that."""
    wanted = most(sizes, found, accumulate=args.update_freq > 1, devices=args.devices * args.nodes)
    there = "memory not known" if memory is None else f"of {gigabytes(memory)} GB"
    short = memory is not None and wanted.peak > memory
    known = f"this text's {sizes.words} words and its own batches" if prepared else "full batches"
    line = f"memory: {'' if prepared else 'at most '}{wanted} {there}, with {known}"
    return line, "the model does not fit its device" if short else None


def short_form(args: argparse.Namespace, pair: tuple[str, str]) -> list[str]:
    """What every recipe says before it trains, besides its plan."""
    sizes, lines = batch.sizes_of(args), []
    if known_corpus.there(args.binary):
        found = known_corpus.prepared(args.binary, pair, args.length)
        sizes = dataclasses.replace(sizes, words=found.corpus.words)
        memory = machine.free_memory() if args.cpu else batch.memory_of(args, gpus.visible())
        lines.append(weights(args, sizes, kinds(args, pair, found), memory, True)[0])
    kept, there = checkpoint_bytes(sizes, args.keep), machine.free_disk(args.run)
    lines.append(
        f"checkpoints: {gigabytes(kept)} GB of {gigabytes(there)} GB free; a kill loses up to {args.save_every} updates"
    )
    return [f"# {line}" for line in lines]


def timed(
    args: argparse.Namespace, found: known_corpus.KnownCorpus, options: list[str], gpu: gpus.Gpu | None
) -> tuple[list[str], str | None]:
    """A trial's lines, and what is wrong with it."""
    here = options if gpu or args.cpu else trial.on_cpu(options, batch.sizes_of(args).parameters)
    sizes = dataclasses.replace(batch.sizes_of(args), words=found.corpus.words)
    sizes = sizes if gpu else dataclasses.replace(sizes, gpu=False, precision="fp32")
    tokens, update_freq = (int(trial.option(here, name, "1")) for name in ("--max-tokens", "--update-freq"))
    predicted = need(sizes, Batch.full(tokens, found.corpus.longest), accumulate=update_freq > 1).peak
    free = None if gpu else machine.free_memory()
    if free is not None and predicted > free:
        return (
            [],
            f"not timed: even {tokens} tokens need {gigabytes(predicted)} GB here, and {gigabytes(free)} are free",
        )
    # So small a batch may not hold a sentence of the run's own data.
    data = args.binary if found.prepared and tokens > trial.FEW_TOKENS else None
    measured = trial.measure(
        here, found.corpus, data, args.run.parent, updates=args.trial_updates, seconds=args.trial_seconds,
        total=gpu.memory if gpu else None,
    )  # fmt: skip
    if isinstance(measured, str):
        return [], f"not timed: {measured}"
    predicted = most(sizes, measured.batches, accumulate=update_freq > 1).peak
    on = gpu.name if gpu else "this CPU"
    early = f" instead of {args.trial_updates}, which took too long," if measured.updates < args.trial_updates else ""
    updates = f"{measured.updates} update{'s' if measured.updates > 1 else ''}{early}"
    text = [
        f"timed: {updates} of {measured.tokens:.0f} target tokens on {on}; "
        f"peak memory {gigabytes(measured.memory)} GB, predicted {gigabytes(predicted)}"
    ]
    if measured.batch != trial.held(options):
        text.append(
            f"an update of the run's holds {trial.held(options)} tokens, not {measured.batch}: its time is taken to be "
            "in proportion, which is rather too long"
        )
    whole = forecast.forecast(
        measured, found.corpus, tokens=trial.held(options), epochs=args.epochs, updates=args.updates,
        save_every=args.save_every,
    )  # fmt: skip
    devices = args.nodes * args.devices
    now = datetime.datetime.now()
    return text + forecast.lines(whole, now=now, price=args.price, devices=devices, save_every=args.save_every), None


def main() -> None:
    args, options = parse(sys.argv[1:])
    sizes = batch.sizes_of(args)
    source_language, _, target_language = args.pair.partition("-")
    pair = (source_language, target_language)
    if args.short:
        print("\n".join(short_form(args, pair)))
        return
    if known_corpus.there(args.binary):
        found = known_corpus.prepared(args.binary, pair, args.length)
    else:
        found = known_corpus.stated(args.name, pair, args.length, args.words, args.data)
    args.length = found.corpus.longest
    sizes = dataclasses.replace(sizes, words=found.corpus.words)
    devices: list[gpus.Gpu] = [] if args.cpu else gpus.visible()
    print(f"{args.title or args.name}: {sizes.parameters:,} parameters, {args.precision}")
    for line in machine.hardware(args.cpu):
        print(line)
    faults = []
    try:
        if not args.cpu:
            batch.check(args.devices, args.precision, devices)
    except ValueError as error:
        faults.append(str(error))
    memory = batch.memory_of(args, devices) if not args.cpu else machine.free_memory()
    twice = ", activations computed twice" if sizes.checkpoint else ""
    shape = f"{args.nodes} x {args.devices} x {args.update_freq}"
    plan = f"plan: {shape} batches of up to {args.max_tokens} tokens an update{twice}"
    weight, fault = weights(args, sizes, kinds(args, pair, found), memory, found.prepared)
    works = devices[0] if devices and not faults and not fault else None
    faults += [fault] if fault else []
    room, no_room = disk(args, sizes, found)
    fetched, no_text = source(args, found)
    print("\n".join([plan, weight, room, fetched]), flush=True)
    told, untold = timed(args, found, options, works)
    print("\n".join(told) if told else untold)
    faults += [fault for fault in (no_room, no_text, untold) if fault]
    if faults:
        raise ValueError("It cannot work here: " + "; ".join(fault.rstrip(".") for fault in faults) + ".")
    print("It can work here.")


if __name__ == "__main__":
    run(main)
