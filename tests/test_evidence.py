"""The screens and cases of recipes/research: do the pages have their tables?"""

from __future__ import annotations

from conftest import ROOT

from recipes.research import cases
from recipes.research import omega_screen as screen


def test_a_method_leaves_the_plateau_in_every_seed_of_the_protocol():
    """At most 0.9 of 10 bits, with all three seeds: a seed that has not run yet, or diverged, shows nothing."""

    def cell(*bits):
        row = {"method": "paper", "rate": "0.001", "updates": "300", "frequencies": "10"}
        rows = [{**row, "seed": str(seed), "300": value} for seed, value in enumerate(bits, 1)]
        (line,) = [line for line in screen.table(rows).splitlines() if "`paper`" in line]
        return line.split(" | ")[1]

    assert cell("8", "9", "9") == "**8.00, 9.00, 9.00**"
    assert cell("8", "9") == "8.00, 9.00"
    assert cell("8", "9.01", "9") == "8.00, 9.01, 9.00"
    assert cell("8", "9", "nan") == "8.00, 9.00, inf"


def test_the_results_have_the_table_of_the_screen():
    rows = screen.load(screen.DOCS / "rows/omega-screen.csv")
    assert screen.limits(rows) in (ROOT / "docs/results.md").read_text()
    shorter = [row for row in rows if (row["method"], row["rate"], row["seed"]) != ("pre-ln", "0.001", "3")]
    assert "| 0.0005 | Pre-LN; Admin" in screen.limits(shorter)  # a missing run ends the range


def test_the_page_of_the_cases_has_the_table_of_its_rows():
    assert cases.table(screen.load(ROOT / "docs/rows/cases.csv")) in (ROOT / "docs/cases.md").read_text()
