"""The figures of docs/analysis.md: does each that is shown come from `make figures`, and with commands that parse? And
does docs/results.md say what its kept numbers are?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("scheme, title", [("post-ln", "Post-LN"), ("pre-ln", "Pre-LN"), ("admin", "Admin")])
def test_the_table_of_depths_is_of_the_kept_numbers(scheme: str, title: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    series = json.loads((ROOT / "docs" / f"output-change-{scheme}.json").read_text(encoding="utf-8"))["series"]
    noise, update = series["random perturbation"], series["one update"]
    assert [noise["depths"][i] for i in (0, -1)] == [update["depths"][i] for i in (0, -1)] == [6, 48]
    changes = ", ".join(f"{change:.1e}".replace("e-0", "e-") for change in (noise["change"][0], noise["change"][-1]))
    fits = " | ".join(f"{noise['fits'][law]['r2']:.3f}" for law in ("linear", "logarithmic"))
    error = noise["theorem 2"]["largest relative error"]
    assert f"| {title}, noise of 1 % | {changes} | {fits} | {100 * error:.0f} % |" in page
    fits = " | ".join(f"{update['fits'][law]['r2']:.3f}" for law in ("linear", "logarithmic"))
    changes = ", ".join(f"{change:.2f}" for change in (update["change"][0], update["change"][-1]))
    assert f"| {title}, one update by Adam | {changes} | {fits} | |" in page
