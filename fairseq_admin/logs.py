"""The losses in fairseq's log, whichever way it was written.

--log-format json writes objects and --log-format simple pairs of names and numbers; --log-file leaves out time, level
and tag, and has every line once or several times. So a line is read by what it holds, not by how it begins. This file
needs the standard library only, so that recipes can read it without waiting for torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# A kill may cut a line short, and the log then goes on in mid-line: the last on a line counts.
OBJECT = re.compile(r"({[^{}]*})\s*$")
INTERVAL = re.compile(r".*epoch (?P<epoch>\d+):\s+(?P<done>\d+) / (?P<all>\d+) (?P<pairs>\w+=.+)$")
END = re.compile(r".*epoch (?P<epoch>\d+) \| (?:valid on '(?P<subset>[^']+)' subset \| )?(?P<pairs>\w+ \S+ \| .+)$")
UPDATES = re.compile(r"(?:(.+)_)?num_updates")
PARAMS = re.compile(r"num\. shared model params: ([\d,]+)")
GPU = re.compile(r"rank +(\d+): capabilities = .*; name = (.+?)\s*$")


@dataclass(frozen=True)
class Record:
    """One interval of training ("train_inner"), an epoch's mean ("train"), or one validation ("valid") on a subset.

    `epochs` counts fractions too (at the end of an epoch: epochs begun); `bits` is the loss without label smoothing, in
    bits per token; `seconds` is what the interval took.
    """

    tag: str
    subset: str
    updates: int
    epochs: float
    bits: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class Log:
    """A run's curves, each {updates: bits per token}; its parameters, updates and epochs; the hours its updates took;
    its GPUs, each once a process, as far as the log names them."""

    train: dict[int, float]
    valid: dict[int, float]
    params: int
    updates: int
    epochs: float
    hours: float
    gpus: tuple[str, ...] = ()


def perplexity(bits: float) -> float:
    """Of a loss in bits per token."""
    return 2.0**bits if bits < 1000 else math.inf


def stats(line: str) -> tuple[str, dict[str, Any]] | None:
    """What a line tells: its tag, as `Record` has it, and values by fairseq's names; None if it tells nothing.

    Of a validation the subset is among the values.
    """
    values: dict[str, Any]
    if match := OBJECT.search(line):
        try:
            values = json.loads(match[1])
        except ValueError:
            return None
        subset = next((match[1] for name in values if (match := UPDATES.fullmatch(name))), None)
        head = f"{subset}_" if subset else ""
        values = {name[len(head) :] if name.startswith(head) else name: value for name, value in values.items()}
        tag = "train_inner" if subset is None else "train" if subset == "train" else "valid"
        values["subset"] = subset
    elif match := INTERVAL.match(line):
        values = {"update": int(match["epoch"]) - 1 + int(match["done"]) / int(match["all"])}
        values.update(tuple(pair.split("=", 1)) for pair in match["pairs"].strip().split(", ") if "=" in pair)
        tag = "train_inner"
    elif match := END.match(line):
        values = {"epoch": int(match["epoch"]), "subset": match["subset"]}
        values.update(tuple(pair.split(" ", 1)) for pair in match["pairs"].strip().split(" | ") if " " in pair)
        tag = "valid" if match["subset"] else "train"
    else:
        return None
    return (tag, values) if "num_updates" in values else None


def parse(line: str) -> Record | None:
    """The record a log line holds, or None. A line cut short by a kill holds none."""
    line_stats = stats(line)
    if line_stats is None:
        return None
    tag, values = line_stats
    try:
        return Record(
            tag=tag,
            subset=str(values.get("subset") or ""),
            updates=int(values["num_updates"]),
            epochs=float(values.get("update", values.get("epoch", "nan"))),
            bits=float(values["nll_loss"] if "nll_loss" in values else values["loss"]),
            lr=float(values.get("lr", "nan")),
            seconds=float(values.get("train_wall", "nan")),
        )
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


def read(lines: Iterable[str]) -> Log:
    """A run's log. A run killed and resumed goes back to its last checkpoint; what came after that is dropped.

    Of several validation subsets the first counts: by that one fairseq chooses its best checkpoint. A resumed run may
    name others, so that is the first of those reported together, after one number of updates and with no training
    between.
    Training is told by intervals, or where there are none (--log-format tqdm, a long --log-interval) by epochs.
    """
    curves: dict[str, dict[int, Record]] = {"train_inner": {}, "train": {}, "valid": {}}
    gpus: dict[int, str] = {}
    params, subset, last_updates = 0, "", 0
    for line in lines:
        if match := PARAMS.search(line):
            params = int(match[1].replace(",", ""))
        elif match := GPU.search(line):
            if int(match[1]) == 0:  # a start, of which fairseq tells every rank in order
                gpus.clear()
            gpus[int(match[1])] = match[2]
        elif record := parse(line):
            if record.tag != "valid" or record.updates != last_updates:
                subset, last_updates = "", record.updates
            if record.tag == "valid":
                subset = subset or record.subset
                if record.subset != subset:
                    continue
            for curve in curves.values():
                for taken_back in [updates for updates in curve if updates > record.updates]:
                    del curve[taken_back]
            curves[record.tag][record.updates] = record
    train, valid = curves["train_inner"] or curves["train"], curves["valid"]
    # The last updates may fall short of an interval; the validation after them gives their number.
    updates = max([*train, *valid], default=0)
    last = train.get(max(train, default=0))
    # fairseq rounds to whole seconds: an epoch's sum is nearer than those of its intervals, which may all be 0.
    ended = max(curves["train"], default=0)
    timed = [*curves["train"].values(), *(it for at, it in curves["train_inner"].items() if at > ended)]
    return Log(
        train={updates: record.bits for updates, record in sorted(train.items())},
        valid={updates: record.bits for updates, record in sorted(valid.items())},
        params=params,
        updates=updates,
        epochs=last.epochs * updates / last.updates if last and last.updates else 0.0,
        hours=sum(record.seconds for record in timed) / 3600,
        gpus=tuple(gpus[rank] for rank in sorted(gpus)),
    )
