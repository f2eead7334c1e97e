"""Read the losses out of fairseq's log (--log-format json)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.steps.common import read_lines

LINE = re.compile(r"\| INFO \| (?P<tag>train_inner|valid) \| (?P<json>{.*})\s*$")
PARAMS = re.compile(r"num\. shared model params: ([\d,]+)")


@dataclass(frozen=True)
class Record:
    """One interval of training, or one validation.

    `epochs` counts fractions too (for a validation: epochs begun); `bits` is the loss without label smoothing, in
    bits a token; `seconds` is what the interval took.
    """

    tag: str
    updates: int
    epochs: float
    bits: float
    lr: float
    seconds: float


def parse(line: str) -> Record | None:
    """The record a log line holds, or None. A line cut short by a kill holds none."""
    found = LINE.search(line)
    if not found:
        return None
    try:
        values = json.loads(found["json"])
    except json.JSONDecodeError:
        return None
    prefix = "valid_" if found["tag"] == "valid" else ""
    return Record(
        tag=found["tag"],
        updates=int(values[f"{prefix}num_updates"]),
        epochs=float(values.get("update", values["epoch"])),
        bits=float(values[f"{prefix}nll_loss"]),
        lr=float(values.get("lr", "nan")),
        seconds=float(values.get("train_wall", "nan")),
    )


@dataclass(frozen=True)
class Log:
    """A run's curves, each {updates: bits a token}; its parameters, updates and epochs; the hours its updates took."""

    train: dict[int, float]
    valid: dict[int, float]
    params: int
    updates: int
    epochs: float
    hours: float


def read_log(path: str | Path, unfinished: bool = False) -> Log:
    """Read a run's log. A run killed and resumed goes back to its last checkpoint; what came after that is dropped.

    Args:
        unfinished: also take a run that ended before its first training interval or validation.

    Raises:
        ValueError: the log is missing, or has no training interval, no validation or no parameter count.
    """
    train: dict[int, Record] = {}
    valid: dict[int, Record] = {}
    params = 0
    for line in read_lines(path):
        if found := PARAMS.search(line):
            params = int(found[1].replace(",", ""))
        elif record := parse(line):
            for curve in (train, valid):
                for taken_back in [updates for updates in curve if updates > record.updates]:
                    del curve[taken_back]
            (train if record.tag == "train_inner" else valid)[record.updates] = record
    if not (params and (unfinished or (train and valid))):
        raise ValueError(
            f"{path}: found {len(train)} training intervals, {len(valid)} validations and "
            f"{'a' if params else 'no'} parameter count; expected at least one of each. "
            "Is it the log of fairseq-train --log-format json? Remove the run's folder and train again."
        )
    # The last updates may fall short of an interval; the validation after them gives their number.
    updates = max([*train, *valid], default=0)
    last = train.get(max(train, default=0))
    return Log(
        train={updates: record.bits for updates, record in sorted(train.items())},
        valid={updates: record.bits for updates, record in sorted(valid.items())},
        params=params,
        updates=updates,
        epochs=last.epochs * updates / last.updates if last else 0.0,
        hours=sum(record.seconds for record in train.values()) / 3600,
    )
