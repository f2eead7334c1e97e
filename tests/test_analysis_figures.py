"""The figures of docs/analysis.md: does each that is shown come from `make figures`, and with commands that parse?"""

from __future__ import annotations

from pathlib import Path

from conftest import ROOT

from fairseq_admin import cli
from recipes.figures import analysis


def test_every_figure_has_its_command(tmp_path: Path) -> None:
    """Of a demo that has been run, all of them; of none, those of fresh models."""
    folder = tmp_path / analysis.RUN
    fresh = analysis.figures(tmp_path)
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("average.pt", "checkpoints/checkpoint_3_900.pt", "checkpoints/checkpoint_10_1000.pt"):
        (folder / name).touch()
    found = analysis.figures(tmp_path)
    assert found["updates"][1:] == [str(folder / "checkpoints" / f"checkpoint_{n}.pt") for n in ("3_900", "10_1000")]
    assert set(found) - set(fresh) == {"dependency-trained", "omega", "updates"}
    drawn = {path.name for path in (ROOT / "docs" / "images").glob("analysis-*")}
    kept = {path.stem for path in (ROOT / "docs").glob("output-change-*.json")}
    assert kept and drawn == {f"analysis-{name}.png" for name in {*found, *kept}}
    for arguments in found.values():
        cli.parse(["analyze", *arguments, "--random-tokens", "-o", "x"])  # exits if it cannot
