"""Draw the figures of docs/analysis.md again: `make figures`.

    python -m recipes.figures.analysis --runs runs --kept docs -o docs/images

The output changes are drawn from the numbers in docs/output-change-*.json, which take an hour at width 512; they and
the gradients have several schemes in one figure, to compare. All other fresh models have the sizes of the demo's.
Sentences are the demo's where it has been run, else random words, as the figure then says. A figure of a trained model
is drawn where its run is at hand.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from fairseq_admin import cli
from fairseq_admin.analysis import figure
from recipes.figures import together
from recipes.steps.common import replacing, run

FRESH = [
    *("--arch", "transformer_admin_18l", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--dropout", "0", "--share-all-embeddings"),
    *("--admin-ffn-init", "xavier"),
]
RUN = "admin-cpu-s1"
KEPT = ("post-ln", "pre-ln", "admin")
"""The schemes whose output changes are kept."""


def fresh(what: str, scheme: str, *options: str) -> list[str]:
    return [what, *FRESH, "--admin-scheme", scheme, *options]


def figures(demo: Path) -> dict[str, list[str]]:
    """The arguments of every figure that can be drawn, by its name."""
    found = {f"dependency-{scheme}": fresh("dependency", scheme) for scheme in ("post-ln", "pre-ln", "admin")}
    folder = demo / RUN
    if (folder / "average.pt").exists():
        average = str(folder / "average.pt")
        found["dependency-trained"] = ["dependency", average]
        found["omega"] = ["omega", average]
        last = sorted((folder / "checkpoints").glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
        if len(last) > 1:
            found["updates"] = ["updates", str(last[0]), str(last[-1])]
    return found


def gradients() -> list[list[str]]:
    """The arguments of the figure of gradients, by scheme."""
    return [fresh("gradients", scheme, "--tokens", "512", "--repeats", "8") for scheme in ("post-ln", "pre-ln")]


def analyzed(arguments: list[str]) -> None:
    """fairseq-admin analyze; it has said what is wrong if it fails."""
    if status := cli.main(["analyze", *arguments]):
        raise SystemExit(status)


def draw_together(draw: Callable[[list[dict]], Figure], numbers: list[Path], png: Path) -> None:
    """Draw the numbers of several schemes in one figure."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in numbers]
    with replacing(png) as part, tempfile.TemporaryDirectory() as folder:
        figure.save(draw, results, part, Path(folder, "figure.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, required=True, help="the folder with demo/ in it, if it has been run")
    parser.add_argument("--kept", type=Path, required=True, help="the folder with output-change-SCHEME.json")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    demo = args.runs / "demo"
    data = demo / "data" / "bin"
    sentences = ["--data", str(data)] if (data / "dict.de.txt").exists() else ["--random-tokens"]
    for library in ("matplotlib", "PIL"):  # fairseq lets every library tell all
        logging.getLogger(library).setLevel(logging.WARNING)
    kept = [args.kept / f"output-change-{scheme}.json" for scheme in KEPT]
    draw_together(together.output_changes, kept, args.output / "analysis-output-change.png")
    with tempfile.TemporaryDirectory() as folder:
        found = [Path(folder, f"gradients-{number}.json") for number in range(len(gradients()))]
        for arguments, path in zip(gradients(), found):
            analyzed([*arguments, *sentences, "--json", "-o", str(path)])
        draw_together(together.all_gradients, found, args.output / "analysis-gradients.png")
        for name, arguments in figures(demo).items():
            analyzed([*arguments, *sentences, "-o", str(Path(folder, name))])
            with replacing(args.output / f"analysis-{name}.png") as part:
                shutil.copyfile(Path(folder, f"{name}.png"), part)


if __name__ == "__main__":
    run(main)
