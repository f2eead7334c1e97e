"""How the classifiers of `make deeper` came out: each scheme at its best rate, a table and a figure.

    python -m recipes.deeper.summary OUT OUT/*/result.json

writes OUT/table.md, OUT/table.csv and OUT/accuracy.png. The best rate is the one with the highest mean accuracy on
validation; the accuracy shown is the test set's, which chose nothing. Intervals are Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from tabulate import tabulate

from recipes.compare.grid_table import places, write_csv
from recipes.compare.standing import Interval, interval
from recipes.steps.common import read_lines, replacing, run, write_lines
from recipes.steps.plugin import EVERY


def best(results: list[dict]) -> dict[tuple[str, int], tuple[str, list[dict]]]:
    """The best rate of every scheme and number of layers, with its runs."""
    found = {}
    for (scheme, layers), them in places(results, ["scheme", "layers"]).items():
        rates = {rate: runs for (rate,), runs in places(them, ["lr"]).items()}
        rate = max(rates, key=lambda it: interval([run["valid"] for run in rates[it]]).mean)
        found[scheme, int(layers)] = rate, rates[rate]
    return found


def rows(results: list[dict]) -> list[dict[str, str]]:
    return [
        {
            "scheme": scheme,
            "new layers": str(layers),
            "best rate": rate,
            "diverged": f"{sum(it['diverged'] for it in runs)} of {len(runs)}",
            "accuracy, test": f"{interval([it['test'] for it in runs]):.3f}",
        }
        for (scheme, layers), (rate, runs) in best(results).items()
    ]


def draw(results: list[dict], path: Path) -> None:
    """Accuracy against layers, a line a scheme."""
    lines: dict[str, dict[int, Interval]] = {}
    for (scheme, layers), (_, runs) in best(results).items():
        lines.setdefault(scheme, {})[layers] = interval([it["test"] for it in runs])
    figure, axes = pyplot.subplots(figsize=(5.5, 3.6), layout="constrained")
    for (scheme, points), marker in zip(lines.items(), "osD^v<>pPX*hH8d"):
        points = dict(sorted(points.items()))
        axes.plot(list(points), [it.mean for it in points.values()], marker=marker, label=EVERY[scheme].title)
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle=":", label="a guess")
    axes.set(
        xlabel="new layers", ylabel="accuracy, test (mean of the seeds)", xticks=sorted({n for _, n in best(results)})
    )
    axes.legend(fontsize="small")
    with replacing(path) as part:
        figure.savefig(part, dpi=120, format="png")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    results = [json.loads("\n".join(read_lines(path))) for path in args.results]
    table = rows(results)
    write_csv(args.folder / "table.csv", table)
    titled = [{**row, "scheme": EVERY[row["scheme"]].title} for row in table]
    lines = tabulate(titled, headers="keys", tablefmt="github", disable_numparse=True).splitlines()
    rates = sorted({result["lr"] for result in results}, key=float)
    rule = f"Each at its best of the rates {', '.join(rates)} by validation; brackets: Student's t over the seeds, 95%."
    write_lines(args.folder / "table.md", [*lines, "", rule])
    draw(results, args.folder / "accuracy.png")


if __name__ == "__main__":
    run(main)
