"""Record the perplexity that fairseq-eval-lm found.

    python -m recipes.lm.perplexity runs/lm-demo/admin-cpu-s1 --results runs/results.csv ...

reads RUN/eval.txt and RUN/train.log; writes RUN/score.json and a row of results.csv.
"""

from __future__ import annotations

import argparse
import re

from recipes.steps import results
from recipes.steps.common import read_lines, run

RESULT = re.compile(r"(?:^|[:| ])Loss \(base 2\): ([0-9.]+), Perplexity: ([0-9.]+|inf)$")
SIGNATURE = "perplexity a word, test set, as fairseq-eval-lm counts words with BPE joined"


def perplexity(lines: list[str]) -> str:
    """What fairseq-eval-lm printed.

    Raises:
        ValueError: it printed none, or more than one.
    """
    found = [match[2] for line in lines if (match := RESULT.search(line))]
    if len(found) != 1:
        raise ValueError(
            f"found {len(found)} perplexities in fairseq-eval-lm's output; expected one. Remove it and evaluate again."
        )
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results.add_arguments(parser)
    args = parser.parse_args()
    found = perplexity(read_lines(args.run / "eval.txt"))
    results.record(args, {"perplexity": found, "signature": SIGNATURE})


if __name__ == "__main__":
    run(main)
