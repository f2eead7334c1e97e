"""Pass fairseq's output on as one short line an interval, for a terminal and a log alike.

    fairseq-train ... 2>&1 | tee -a train.log | python -m recipes.steps.progress --updates 900

Warnings, errors and whatever is not fairseq's own log go through unchanged, so a traceback is never hidden.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator

from recipes.steps.logs import parse

# The head of a log line: fairseq's own format, or Python's where a library set logging up first.
LOG = re.compile(r"(\S+ \S+ \| (?P<level>[A-Z]+) \| (?P<logger>\S+) \| |(?P<early>INFO|DEBUG):[\w.]+:)")
# The further lines of a long message, as of the model that fairseq prints.
CONTINUED = re.compile(r"\s|\)")
# What fairseq-generate says of a sentence: its hypothesis, and the lines that come with it.
HYPOTHESIS = re.compile(r"H-\d+\t")
DETAIL = re.compile(r"[STDPAEI]-\d+(_\d+)?\t")
SENTENCES = 100


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def progress(lines: Iterable[str], updates: int, clock=time.monotonic) -> Iterator[str]:
    """What to show for each line of fairseq's output, if anything.

    The time left counts from the first interval seen, so it is right for a resumed run too.
    """
    first: tuple[int, float] | None = None
    hypotheses = 0
    hidden = False
    for line in lines:
        record = parse(line)
        if record and record.tag == "train_inner":
            now = clock()
            first = first or (record.updates, now)
            text = f"update {record.updates:>6}/{updates}  train {record.bits:6.3f} bits/token  lr {record.lr:.2e}"
            if record.updates > first[0]:
                pace = (now - first[1]) / (record.updates - first[0])
                text += f"  {pace:.2f} s/update  {duration(pace * max(0, updates - record.updates))} left"
            yield text
        elif record and record.tag == "valid":
            yield f"update {record.updates:>6}/{updates}  valid {record.bits:6.3f} bits/token"
        elif HYPOTHESIS.match(line):
            hypotheses += 1
            if hypotheses % SENTENCES == 0:
                yield f"translated {hypotheses} sentences"
        elif log := LOG.match(line):
            hidden = bool(log["early"]) or (log["level"] == "INFO" and not log["logger"].startswith("fairseq_admin"))
            if not hidden:
                yield line.rstrip("\n")
        elif not DETAIL.match(line) and not (hidden and CONTINUED.match(line)):
            hidden = False
            yield line.rstrip("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=0, help="updates the run will make")
    args = parser.parse_args()
    try:
        for text in progress(sys.stdin, args.updates):
            print(text, flush=True)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
