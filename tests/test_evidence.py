"""The screens and cases of recipes/research: do the pages have their tables?"""

from __future__ import annotations

from conftest import ROOT

from recipes.research import cases
from recipes.research import omega_screen as screen


def test_a_method_leaves_the_plateau_in_every_seed_of_the_protocol():
    """At most 0.9 of 10 bits, with all three seeds: a seed that has not run yet, or diverged, shows nothing."""

    def leaves(*bits):
        return screen.leaves([{"updates": "300", "frequencies": "10", "300": value} for value in bits])

    assert leaves("8", "9", "9")
    assert not (leaves("8", "9") or leaves("8", "9.01", "9") or leaves("8", "9", "nan"))


def test_a_missing_run_ends_the_range_of_its_method():
    rows = screen.load(screen.DOCS / "rows/omega-screen.csv")
    shorter = [row for row in rows if (row["method"], row["rate"], row["seed"]) != ("pre-ln", "0.001", "3")]
    assert [row["methods"].startswith("Pre-LN; Admin") for row in screen.limits(shorter)] == [False, True, *[False] * 3]


def test_the_page_of_the_cases_has_the_table_of_its_rows():
    rows, page = screen.load(ROOT / "docs/rows/cases.csv"), (ROOT / "docs/cases.md").read_text()
    assert cases.table(rows) in page and cases.followed(rows) in page
