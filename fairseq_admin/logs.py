"""Read the losses in fairseq's log, in any of its formats.

--log-format json writes objects; --log-format simple writes pairs of names and numbers. --log-file leaves out time,
level and tag, and repeats some lines, so a line is recognised by its content and not by its beginning. This file
imports the standard library only: recipes need not wait for torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A kill may cut a line short, and the log then continues on the same line: the last object on a line counts.
OBJECT = re.compile(r"({[^{}]*})\s*$")
INTERVAL = re.compile(r".*epoch (?P<epoch>\d+):\s+(?P<done>\d+) / (?P<all>\d+) (?P<pairs>\w+=.+)$")
END = re.compile(r".*epoch (?P<epoch>\d+) \| (?:valid on '(?P<subset>[^']+)' subset \| )?(?P<pairs>\w+ \S+ \| .+)$")
UPDATES = re.compile(r"(?:(.+)_)?num_updates")
PARAMS = re.compile(r"num\. shared model params: ([\d,]+)")
START = re.compile(r"No existing checkpoint found |Loaded checkpoint .+ @ (\d+) updates\)")
GPU = re.compile(r"rank +(\d+): capabilities = .*; name = (.+?)\s*$")


@dataclass(frozen=True)
class Record:
    """One interval of training ("train_inner"), an epoch's mean ("train"), or one validation ("valid") on a subset.

    `epochs` includes fractions; in a record that ends an epoch, it is the number of epochs begun. `bits` is the loss
    without label smoothing, in bits per token. `seconds` is the interval's time in training.
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
    """A run's curves and totals.

    `train` and `valid` are {updates: bits per token}, and `params` is the number of parameters. `hours` is the time of
    the updates. `gpus` has the GPU of each process, or is empty if the log names none.
    """

    train: dict[int, float]
    valid: dict[int, float]
    params: int
    updates: int
    epochs: float
    hours: float
    gpus: tuple[str, ...] = ()


def perplexity(bits: float) -> float:
    """The perplexity of a loss.

    Args:
        bits: the loss, in bits per token.

    Returns:
        2 to the power of the bits, or infinity from 1,000 bits on.
    """
    return 2.0**bits if bits < 1000 else math.inf


def stats(line: str) -> tuple[str, dict[str, Any]] | None:
    """Read the values in a line.

    Args:
        line: a line of fairseq's log.

    Returns:
        The line's tag (see `Record`), and its values by fairseq's names, with the subset of a validation. None: the
        line has no values.
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


def parse_line(line: str) -> Record | None:
    """Read the record in a line.

    Args:
        line: a line of fairseq's log.

    Returns:
        The record. None: the line has none, or a kill cut it short.
    """
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


def read_log(path: Path) -> Log:
    """Read a run's log from its file.

    Args:
        path: the file. Bytes that are not UTF-8 do not matter.

    Returns:
        The curves and totals, as `parse_log` reads them.
    """
    with path.open(encoding="utf-8", errors="replace") as lines:
        return parse_log(lines)


def parse_log(lines: Iterable[str]) -> Log:
    """Read a run's log.

    A run that was killed and resumed goes back to its last checkpoint, so later records are dropped. If a log holds
    several runs, only the last one counts. If several subsets are validated, the first counts, as in fairseq's choice
    of the best checkpoint. A resumed run may name other subsets. So "first" is the first of the validations at the same
    number of updates, with no training between them. The training curve has a point per interval, or per epoch if the
    log has no intervals (--log-format tqdm, a long --log-interval).

    Args:
        lines: the lines of the log.

    Returns:
        The curves and totals.
    """
    curves: dict[str, dict[int, Record]] = {"train_inner": {}, "train": {}, "valid": {}}
    gpus: dict[int, str] = {}
    params, subset, last_updates, begun = 0, "", 0, math.inf
    for line in lines:
        if match := PARAMS.search(line):
            params = int(match[1].replace(",", ""))
        elif match := GPU.search(line):
            if int(match[1]) == 0:  # at a start, fairseq lists every rank in order
                gpus.clear()
            gpus[int(match[1])] = match[2]
        elif match := START.search(line):
            begun = int(match[1] or 0)
        elif record := parse_line(line):
            if record.tag != "valid" or record.updates != last_updates:
                subset, last_updates = "", record.updates
            if record.tag == "valid":
                subset = subset or record.subset
                if record.subset != subset:
                    continue
            for curve in curves.values():
                while curve and next(reversed(curve)) > min(record.updates, begun):
                    curve.popitem()
            begun = math.inf
            curves[record.tag][record.updates] = record
    train, valid = curves["train_inner"] or curves["train"], curves["valid"]
    # The last interval may be incomplete; the validation after it gives the number of updates.
    updates = max([*train, *valid], default=0)
    last = train.get(max(train, default=0))
    # fairseq rounds to whole seconds: an epoch's time is more accurate than its intervals', which may all be 0.
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
