"""A sentence that sets one scheme above another needs runs that show it; do README.md and docs/ keep to that?"""

from __future__ import annotations

import csv

import pytest
from conftest import ROOT

from recipes.compare.claims import COLUMNS, PAGES, faults, sentences

AHEAD = "At 18 layers Admin is ahead of Post-LN."


def test_claims_of_the_docs():
    assert list(faults(ROOT / "docs" / "claims.csv", ROOT)) == []


@pytest.fixture
def docs(tmp_path):
    """A README with one claim, and runs that support it: three seeds, 2 bits apart."""
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        (tmp_path / page).write_text("# A page\n\nNothing is compared.\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("# Ahead of all\n\nIt works. At 18 layers\nAdmin is ahead of Post-LN.\n")
    runs = [
        {"scheme": scheme, "layers": "18", "lr": "1e-3", "seed": str(seed), "verdict": "learned", "update": "",
         "bits": str(bits + seed), "left": "9", "entropy": "9.0", "bleu": "50", "params": "1", "seconds": "1",
         "valid": "100:5.75"}
        for scheme, bits in (("admin", 1), ("post-ln", 3)) for seed in (1, 2, 3)
    ]  # fmt: skip
    write(tmp_path / "docs/compare.csv", runs)
    claim = ["README.md", AHEAD, "compare.csv", "18", "admin", "post-ln", "bits", "ahead"]
    write(tmp_path / "docs/claims.csv", [dict(zip(COLUMNS, claim))])
    return tmp_path / "docs"


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def edit(path, old, new):
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")


def test_a_claim_that_is_supported(docs):
    assert list(faults(docs / "claims.csv", docs.parent)) == []


def test_a_claim_that_the_runs_do_not_support(docs):
    edit(docs / "compare.csv", "admin,18,1e-3,3", "admin,18,1e-3,4")  # two seeds are left in common
    (fault,) = faults(docs / "claims.csv", docs.parent)
    assert fault == f"{AHEAD} compare.csv shows: admin against post-ln, fewer than 3 seeds"
    edit(docs / "claims.csv", "bits,ahead", "bleu,ahead")
    assert "fewer than 3 seeds" in next(faults(docs / "claims.csv", docs.parent))
    edit(docs / "compare.csv", "admin,18,1e-3,4", "admin,18,1e-3,3")
    assert "admin against post-ln, no difference shown" in next(faults(docs / "claims.csv", docs.parent))


def test_a_sentence_that_is_no_claim(docs):
    edit(docs.parent / "README.md", "ahead of Post-LN", "ahead of Pre-LN")
    one, other = faults(docs / "claims.csv", docs.parent)
    assert one == f"README.md does not say: {AHEAD}"
    assert other == "README.md compares, and claims.csv has no such claim: At 18 layers Admin is ahead of Pre-LN."


def test_a_cell_of_a_table_is_a_sentence(docs):
    """A comparison in the README's table of results was held to no runs."""
    page = docs.parent / "README.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n| runs | verdict |\n|---|---|\n| 3 | behind: +0.1 |\n")
    assert list(faults(docs / "claims.csv", docs.parent)) == [], "a verdict is held to its runs elsewhere"
    edit(page, "behind: +0.1", "It works. Post-LN is behind Admin")
    (found,) = faults(docs / "claims.csv", docs.parent)
    assert found == "README.md compares, and claims.csv has no such claim: Post-LN is behind Admin"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("post-ln", "rezero", "found no run of rezero at 18 layers"),
        ("bits", "loss", "measure is loss; expected bits, bleu, accuracy"),
        ("measure", "unit", "found the columns .*; expected page, sentence"),
    ],
)
def test_a_table_that_is_wrong_is_one_line(docs, old, new, message):
    edit(docs / "claims.csv", old, new)
    with pytest.raises(ValueError, match=message):
        list(faults(docs / "claims.csv", docs.parent))


def test_sentences_are_those_that_one_reads():
    text = "# Ahead of all\n\nOne is\nhere. Two!\n\n    code is ahead of\n\n| better than | a table |\n"
    assert list(sentences(text)) == ["One is here.", "Two!", "better than", "a table"]


def test_a_claim_of_an_accuracy(docs):
    """Is it judged at the rate that the first seed's validation chose, by the test set?"""
    runs = [
        {"scheme": scheme, "layers": "18", "lr": rate, "seed": str(seed), "diverged": "False", "valid": valid,
         "test": test + seed / 1000, "params": "1", "seconds": "1", "hardware": "h", "commit": "c"}
        for scheme, rate, valid, test in (
            ("admin", "1e-3", 0.6, 0.7), ("admin", "1e-4", 0.5, 0.1), ("post-ln", "1e-3", 0.9, 0.5)
        )
        for seed in (1, 2, 3)
    ]  # fmt: skip
    write(docs / "deeper.csv", runs)
    edit(docs / "claims.csv", "compare.csv,18,admin,post-ln,bits", "deeper.csv,18,admin,post-ln,accuracy")
    assert list(faults(docs / "claims.csv", docs.parent)) == []
    edit(docs / "claims.csv", "ahead\n", "behind\n")
    assert "deeper.csv shows: admin against post-ln, ahead" in next(faults(docs / "claims.csv", docs.parent))
