"""A short form of fairseq's output: a line per interval, for a terminal or a log.

Warnings, errors, and lines that are not fairseq's own log pass unchanged, so a traceback is never hidden.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tqdm import tqdm

from fairseq_admin.bar import bar
from fairseq_admin.logs import Record, parse_line

# The head of a log line: in fairseq's format, or in Python's if a library set up logging first.
LOG = re.compile(r"(\S+ \S+ \| (?P<level>[A-Z]+) \| (?P<logger>\S+) \| |(?P<early>INFO|DEBUG):[\w.]+:)")
# The following lines of a long message, such as the model that fairseq prints.
CONTINUED = re.compile(r"\s|\)")
# fairseq-generate's lines for a sentence: the hypothesis, and all others.
HYPOTHESIS = re.compile(r"H-\d+\t")
DETAIL = re.compile(r"[STDPAEI]-\d+(_\d+)?\t")
BEGIN = "begin training epoch"
MEET, MET = "| distributed init (rank ", "| initialized host "
"""fairseq's messages before and after a process waits for all others."""
MEET_SECONDS = 30
"""Seconds to wait for the others before a line says for whom."""
OUT_OF_MEMORY = "OOM: Ran out of memory"
"""fairseq's message when a GPU runs out of memory. fairseq then skips the batch."""


def position(record: Record, updates: int, epochs: int, interval: Record | None = None) -> str:
    """The run's epoch and update, in a constant width.

    Args:
        record: an interval of training, or a validation, for which fairseq logs only the epoch that it is in.
        interval: for a validation, the last interval of training before it.
    """
    if not epochs:
        return f"update {record.updates:>6}/{updates}"
    epoch = f"{record.epochs:.2f}" if record.tag == "train_inner" else f"in {record.epochs:.0f}"
    if interval:
        epoch = f"{interval.epochs * record.updates / interval.updates:.2f}"
    return f"epoch {epoch:>6}/{epochs}  update {record.updates:>6}"


def progress(
    lines: Iterable[str],
    updates: int = 0,
    epochs: int = 0,
    smaller_batch: int = 0,
    every: int = 0,
    sentences: int = 0,
    missing: Callable[[], str] | None = None,
    clock=time.monotonic,
) -> Iterator[str]:
    """The lines to show for fairseq's output.

    The time left is computed from the first interval seen, so it is right for a resumed run, too.

    Args:
        updates, epochs: length of the run; one of them is 0.
        smaller_batch: tokens of the batch to recommend if a GPU runs out of memory.
        every: updates from one interval to the next, for a line before the first interval.
        sentences: number of sentences to translate, for a bar on stderr.
        missing: makes a line that says which machines are missing; it is printed if they do not come.
    """
    first: tuple[float, float] | None = None
    translated = bar("translate", sentences, " sentences", hidden=not sentences, prefix="")
    interval: Record | None = None
    hidden = warned = False
    late = threading.Timer(MEET_SECONDS, lambda: print(missing(), flush=True)) if missing else None
    for line in lines:
        if late and MEET in line and not late.ident:
            late.daemon = True
            late.start()
        elif late and MET in line:
            late.cancel()
        if OUT_OF_MEMORY in line and not warned:
            warned = True
            advice = f"stop this, and give ARGS='--max-tokens {smaller_batch or 'less'}'"
            yield f"Out of memory: {advice}; an update holds as many tokens as before."
        record = parse_line(line)
        if record and record.tag == "train_inner":
            now, interval = clock(), record
            done, whole = (record.epochs, epochs) if epochs else (record.updates, updates)
            first = first or (done, now)
            text = f"{position(record, updates, epochs)}  train {record.bits:6.3f} bits/token  lr {record.lr:.2e}"
            if done > first[0]:
                pace = (now - first[1]) / (done - first[0])
                text += f"  {pace:.2f} s/{'epoch' if epochs else 'update'}"
                text += f"  {tqdm.format_interval(pace * max(0, whole - done))} left"
            yield text
        elif record and record.tag == "valid":
            yield f"{position(record, updates, epochs, interval)}  valid {record.bits:6.3f} bits/token"
        elif HYPOTHESIS.match(line):
            translated.update()
        elif every and BEGIN in line:
            yield f"The first {every} updates take a while: no line comes before."
            every = 0
        elif log := LOG.match(line):
            hidden = bool(log["early"]) or (log["level"] == "INFO" and not log["logger"].startswith("fairseq_admin"))
            if not hidden:
                yield line.rstrip("\n")
        elif not DETAIL.match(line) and not (hidden and CONTINUED.match(line)):
            hidden = False
            yield line.rstrip("\n")
    if late:
        late.cancel()
    translated.close()
