"""The grids of runs: the rule for how a run came out, the tables, and the chain run small from the shell."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import conftest
import pytest
from conftest import run_module
from matplotlib import pyplot

from fairseq_admin.method.schemes import SCHEMES
from recipes.compare.curves import draw as draw_curves
from recipes.compare.entropy import unigram_entropy
from recipes.compare.grid_table import outcome, read_results, read_runs, rows, spread, write_runs
from recipes.compare.outcomes import interval, still_falling, told, welch
from recipes.compare.outcomes import outcome as mean_of_last
from recipes.compare.rates import draw as draw_rates
from recipes.compare.reversed_corpus import pairs
from recipes.compare.standing import difference, judged, loss, standings
from recipes.compare.standing import table as standing_table
from recipes.compare.verdict import Verdict, left_plateau, verdict
from recipes.grid.front import read
from recipes.grid.judge import bleu, last_change
from recipes.grid.run import Run, gained
from recipes.sensitivity.heatmap import draw as draw_heatmap
from recipes.steps.common import write_lines
from recipes.steps.guard import alone
from recipes.steps.logs import Log

ROOT = Path(__file__).parents[1]
NAN, INF = math.nan, math.inf


# -- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "valid", "stopped", "expected"),
    [
        # H is 10 bits: the plateau begins above 8, and beyond 15 a run has exploded.
        ({10: 9.9, 20: 5.0}, {20: 8.0}, False, Verdict("learned")),
        ({10: 9.9, 20: 5.0}, {20: 8.01}, False, Verdict("plateau")),
        ({10: 9.9, 20: 10.2}, {20: 15.0}, False, Verdict("plateau")),
        ({10: 9.9, 20: 16.0}, {20: 15.01}, False, Verdict("diverged", 20)),
        ({10: 16.0, 20: 9.0, 30: 17.0, 40: NAN}, {40: 20.0}, False, Verdict("diverged", 30)),
        ({10: 9.0, 20: NAN}, {20: NAN}, False, Verdict("diverged", 20)),
        ({10: INF}, {10: INF}, False, Verdict("diverged", 10)),
        # It begins with a spike, as losses before the first updates do, and that is not held against it.
        ({10: 20.0, 20: 5.0}, {20: 5.0}, False, Verdict("learned")),
        ({10: 9.0, 20: 8.0}, {10: 9.0}, True, Verdict("diverged", 20)),
        ({}, {}, True, Verdict("diverged", 0)),
    ],
)
def test_verdict(train, valid, stopped, expected):
    assert verdict(Log(train, valid, 1, 1, 1.0, 0.0), 10.0, stopped) == expected


# -- the corpus ------------------------------------------------------------------------------------------------------


def test_corpus_is_reversed_and_mapped_one_to_one():
    text = pairs("train", 300, 20)
    mapped = {}
    for source, target in text:
        for word, other in zip(source.split(), reversed(target.split())):
            assert mapped.setdefault(word, other) == other
        assert len(source.split()) == len(target.split()) and 4 <= len(source.split()) <= 12
    assert len(mapped) == len(set(mapped.values())) == 20 and any(a != b for a, b in mapped.items())
    assert pairs("train", 300, 20) == text and pairs("valid", 300, 20) != text
    assert all(mapped[w] == o for s, t in pairs("test", 9, 20) for w, o in zip(s.split(), reversed(t.split())))


def test_entropy_is_that_of_the_target_with_its_end(tmp_path):
    """Words x x x y and two ends: -(3/6 log 3/6 + 1/6 log 1/6 + 2/6 log 2/6) = 0.5 + 0.430827 + 0.528321 bits."""
    for split in ("train", "valid"):
        (tmp_path / f"{split}.a").write_text("p\nq r s\n")
        (tmp_path / f"{split}.b").write_text("x\nx x y\n")
    prefixes = [f"--{split}pref={tmp_path / split}" for split in ("train", "valid")]
    options = ["-s", "a", "-t", "b", *prefixes, "--destdir", tmp_path / "bin"]
    assert run_module("fairseq_cli.preprocess", *options, log=tmp_path / "log").status == 0
    assert unigram_entropy(tmp_path / "bin", "a", "b") == pytest.approx(1.459148, abs=1e-6)
    with pytest.raises(ValueError, match="nothing.*no binarised training set there"):
        unigram_entropy(tmp_path / "nothing", "a", "b")


def test_bleu_is_of_the_tokens_in_the_order_of_the_test_set():
    lines = ["T-1\tw1 w2 w3 w4", "H-1\t-0.5\tw1 w2 w3 w4", "T-0\tw9 w8 w7 w6 w5", "H-0\t-0.1\tw9 w8 w7 w6 w5"]
    score, signature = bleu(lines)
    assert score == pytest.approx(100) and "tok:none" in signature
    assert bleu([*lines[:3], "H-0\t-0.1\tw1"])[0] < 60


def test_a_run_is_made_by_one_process_at_a_time(tmp_path):
    """The checkpoints that one translates with are gone once the other has its result."""
    folder = tmp_path / "admin-1l-s1"
    Run({"seed": "1"}, "data", [], 20, 20, 10, "translation", {"entropy": 8.0, "options": []}).write(folder)
    write_lines(folder / "trained.json", ['{"stopped": true}'])
    write_lines(folder / "train.log", ["2026-01-01 00:00:00 | INFO | fairseq_cli.train | num. shared model params: 7"])
    with alone(folder / ".guard"):
        second = subprocess.Popen(
            [sys.executable, "-m", "recipes.grid.run", folder], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert f"{folder}/.guard: taken by process {os.getpid()}" in second.stderr.readline()
        assert not (folder / "result.json").exists()
    assert second.wait(60) == 0, second.stderr.read()
    result = json.loads((folder / "result.json").read_text())
    assert (result["seed"], result["verdict"]) == ("1", "diverged")


# -- tables and figures ----------------------------------------------------------------------------------------------


def test_a_row_names_the_commit_of_the_page_that_it_was_run_under(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    page = tmp_path / "protocol.md"
    page.write_text("first")
    with pytest.raises(ValueError, match="not committed as it is"):
        last_change(page)
    git("add", ".")
    git("commit", "-qm", "the page")
    decided = git("rev-parse", "HEAD")[:12]
    git("commit", "-qm", "something else", "--allow-empty")
    assert last_change(page) == decided
    page.write_text("changed afterwards")
    with pytest.raises(ValueError, match="not committed as it is"):
        last_change(page)


def result(**values):
    row = {"scheme": "admin", "layers": "6", "lr": "1e-4", "beta2": "0.99", "seed": "1", "verdict": "learned"}
    row.update(update=None, bits=2.0, entropy=6.0, bleu=50.0, left=15.0, train={10: 6.0, 20: 2.0})
    row |= values
    return {"valid": {} if row["bits"] is None else {20: row["bits"]}, **row}


def test_table_keeps_what_went_wrong():
    bad = result(seed="3", verdict="diverged", update=130, bits=None, bleu=None)
    found = rows(
        [result(), result(seed="2", bits=3.0, bleu=70.0), bad, result(layers="12", bits=NAN)], ["scheme", "layers"]
    )
    assert found == [
        {
            "scheme": "admin",
            "layers": "6",
            "runs": "3",
            "outcome": "2 learned, 1 diverged (update 130)",
            "bits, valid": "2.500 (2.000 to 3.000)",
            "BLEU": "60.00 (50.00 to 70.00)",
        },
        {"scheme": "admin", "layers": "12", "runs": "1", "outcome": "1 learned", "bits, valid": "-", "BLEU": "50.00"},
    ]
    assert outcome([bad, result(verdict="plateau")]) == "1 plateau, 1 diverged (update 130)"
    assert spread([None], 2) == "-" and spread([1.0, 1.0], 1) == "1.0 (1.0 to 1.0)"


@pytest.fixture
def closed():
    yield
    pyplot.close("all")


def lines(axes, **look):
    """The lines of a panel with that look, as {x: y}."""
    drawn = [
        line for line in axes.lines if all(getattr(line, f"get_{name}")() == value for name, value in look.items())
    ]
    return [dict(zip(*line.get_data())) for line in drawn]


def test_curves_are_the_runs(closed):
    """Has every run at the best rate its thin line, every scheme its mean, and a diverged run its cross?"""
    losses = {"1": {10: 6.0, 20: 2.0}, "2": {10: 5.0, 20: 1.0}, "3": {10: 4.0, 20: 3.0}}
    three = [result(seed=seed, valid=valid) for seed, valid in losses.items()]
    worse = result(lr="1e-3", bits=5.0, verdict="plateau", valid={10: 6.0, 20: 5.0})
    bad = result(scheme="post-ln", layers="18", verdict="diverged", update=15, valid={10: 7.0})
    six, eighteen = draw_curves([*three, worse, bad]).axes
    admin, post_ln = "#0072B2", "#D55E00"  # theirs in every figure
    assert lines(six, linewidth=0.6, color=admin) == [*losses.values()]
    assert lines(six, linewidth=1.6, color=admin) == [{10: 5.0, 20: 2.0}]
    assert lines(eighteen, linewidth=0.6, color=post_ln) == lines(eighteen, linewidth=1.6) == [{10: 7.0}]
    assert list(lines(eighteen, marker="x")[0]) == [15]
    # A mean of two is a curve that no run followed.
    (axes,) = draw_curves(three[:2]).axes
    assert lines(axes, linewidth=1.6) == [losses["1"], losses["2"]]
    assert [text.get_text() for text in axes.get_legend().get_texts()].count("Admin, 1e-4") == 1


def test_rates_are_the_runs(closed):
    """Has every line its mean loss at every rate, the seeds' range as a bar, and a cross where a run diverged?"""
    runs = [result(seed=seed, lr=lr, bits=bits) for seed, lr, bits in
            [("1", "1e-3", 2.0), ("2", "1e-3", 3.0), ("1", "1e-4", 4.0), ("2", "1e-4", 5.0)]]  # fmt: skip
    runs += [
        result(scheme="deepnorm", lr="1e-4", bits=1.0),
        result(scheme="deepnorm", lr="1e-3", verdict="diverged", bits=None),
    ]
    (panel,) = draw_rates(runs, "6").axes
    assert panel.get_title() == SCHEMES["deepnorm"].title
    drawn = {bar.get_label(): bar.lines for bar in panel.containers}
    points, _, (bars,) = drawn[SCHEMES["admin"].title]
    assert dict(zip(*points.get_data())) == {1e-4: 4.5, 1e-3: 2.5}
    assert [bar[:, 1].tolist() for bar in bars.get_segments()] == [[4.0, 5.0], [2.0, 3.0]]
    assert dict(zip(*drawn[SCHEMES["deepnorm"].title][0].get_data())) == {1e-4: 1.0, 1e-3: 9.0}
    assert lines(panel, marker="x") == [{1e-3: 9.0}] and lines(panel, markerfacecolor="white") == [
        {1e-4: 1.0, 1e-3: 9.0}
    ]


def table(tmp_path: Path, change: tuple[str, str]) -> Path:
    """docs/compare.csv with a change."""
    path = tmp_path / "runs.csv"
    path.write_text((ROOT / "docs/compare.csv").read_text(encoding="utf-8").replace(*change, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("scheme,", "name,"), "has no scheme; expected results of a grid of scheme, layers"),
        (("\nadmin,", "\nsandwich,"), "its scheme is sandwich; expected one of admin"),
        (("\nadmin,18,", "\nadmin,"), "row 1 has other columns than the first line names. Fix it."),
        (("entropy", "enthalpy"), "has no column entropy; expected the runs.csv of a grid"),
        ((",6.4", ",six"), "row 1: could not convert string to float: .*; expected a number"),
    ],
)
def test_a_damaged_table_of_runs_is_one_line(tmp_path, change, said):
    """Whatever is wrong with it, the file is named, and the row."""
    path = table(tmp_path, change)
    with pytest.raises(ValueError, match=f"^{path}: {said}"):
        read_results([path])


WHOLE = {
    **{"scheme": "admin", "layers": "6", "lr": "1e-4", "seed": "1", "verdict": "learned", "update": None, "bits": 1.0},
    **{"left": 9.0, "entropy": 6.4, "bleu": 3.0, "signature": "s", "params": 1, "seconds": 2, "train": {"1": 2.0}},
    **{"valid": {"1": 2.0}, "hardware": "h", "commit": "c"},
}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read .*; expected the result.json of a grid's cell"),
        ("[1]", "cannot be read .found a list.; expected the result.json of a grid's cell"),
        (json.dumps({**WHOLE, "bits": "x"}), "cannot be read .its bits is 'x'."),
        (json.dumps({**WHOLE, "verdict": "fine"}), "its verdict is fine; expected one of"),
        (json.dumps({**WHOLE, "valid": {"x": 1.0}}), "cannot be read .invalid literal for int"),
        (json.dumps({**WHOLE, "lr": "x"}), "its lr is x; expected a number, as 1e-3."),
    ],
)
def test_a_damaged_result_is_one_line(tmp_path, text, said):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(WHOLE))
    assert read_results([path])[0]["valid"] == {1: 2.0}
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: {said}"):
        read_results([path])


# -- how schemes stand -----------------------------------------------------------------------------------------------


def test_interval_is_students_t():
    """1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.302653, so 4.302653 / sqrt(3) = 2.484138 to each side."""
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert (found.low, found.high) == (pytest.approx(-0.484138, abs=1e-6), pytest.approx(4.484138, abs=1e-6))
    assert f"{found:.1f}" == "2.0 (-0.5 to 4.5)"
    assert told([1.0, 2.0, 3.0], ".1f") == f"{found:.1f}"
    assert told([1.0, 2.0], ".1f") == "1.0, 2.0" and told([2.0], ".1f") == "2.0", "an interval of two says nothing"


def test_the_outcome_is_the_mean_of_the_last_validations():
    """And a run whose outcome is 2 % below the mean of the four validations before is still falling."""
    flat = dict(zip(range(100, 900, 100), [3.0] * 4 + [2.0, 1.0, 2.0, 3.0]))
    assert mean_of_last(flat) == 2.0 and mean_of_last({5: 3.0, 9: 1.0}) == 2.0 and math.isnan(mean_of_last({}))
    assert still_falling(flat) and not still_falling({update: 3.0 for update in range(7)})
    for last, falls in ((2.93, True), (2.95, False), (3.5, False)):
        assert still_falling(dict(enumerate([3.0] * 4 + [last] * 4))) == falls, last
    assert loss(result(valid=flat)) == 2.0 and loss(result(valid=flat, verdict="diverged")) == 9.0


def test_welch_compares_independent_seeds_on_the_logarithms():
    """Losses e^0.1, e^0.2, e^0.3 against 1, e^0.1, e^0.2: means 0.1 apart, variances 0.01, so four degrees of freedom;
    t(0.975, 4) = 2.776445, times 0.1 sqrt(2/3) = 0.226696; e^0.1 = 1.105171, e^-0.126696 = 0.881002, e^0.326696."""
    ours, theirs = ([math.exp(it) for it in logs] for logs in ((0.1, 0.2, 0.3), (0.0, 0.1, 0.2)))
    found = welch(ours, theirs)
    expected = (0.105171, 0.881002 - 1, 1.386380 - 1)
    assert (found.mean, found.low, found.high) == pytest.approx(expected, abs=1e-5) and found.count == 3
    assert welch(ours[:2], theirs) is None
    row = standing_table(grid("admin", "1e-3", theirs) + grid("pre-ln", "1e-3", ours))[1]
    assert row["loss vs. Admin, Welch"] == "no difference shown: +10.5% (-11.9% to +38.6%)"
    assert row["still falling"] == "0 of 3"


@pytest.mark.parametrize(
    ("valid", "expected"),
    [
        ({100: 6.0, 200: 4.0}, 160.0),  # 4.8 of 6 bits is the bound: 1.2 of the 2 bits on the way down
        ({100: 4.0, 200: 3.0}, 100.0),
        ({100: NAN, 200: 3.0}, 200.0),
        ({100: 4.81, 200: 5.0}, None),
        ({}, None),
    ],
)
def test_where_a_run_leaves_the_plateau(valid, expected):
    assert left_plateau(valid, 6.0) == pytest.approx(expected)


def grid(scheme, rate, bits, **values):
    kind = {number: "learned" if number < 4.8 else "plateau" for number in bits}
    return [
        result(scheme=scheme, lr=rate, seed=str(seed), bits=number, verdict=kind[number], **values)
        for seed, number in enumerate(bits, 1)
    ]


def test_a_scheme_is_judged_at_its_best_rate():
    """Best is the rate at which most seeds learned, then the lowest mean; the window has the rates where all did."""
    runs = (
        grid("admin", "3e-3", [1.0, 1.0, 5.0])
        + grid("admin", "3e-4", [3.0, 3.1, 3.2])
        + grid("admin", "1e-3", [2.9, 3.0, 3.1])
    )
    (found,) = standings(runs)
    assert (found.best, found.window) == ("1e-3", ["3e-4", "1e-3"])
    assert [run["bits"] for run in found.at_best.values()] == [2.9, 3.0, 3.1]


def test_a_rate_is_no_better_for_seeds_that_another_was_not_tried_with():
    """Of two rates one has three seeds and the other the first alone, which decides: that one run is the result."""
    three = grid("admin", "1e-3", [2.0, 1.0, 1.0])
    (lower,) = standings(three + grid("admin", "3e-3", [1.9]))
    (higher,) = standings(three + grid("admin", "3e-3", [2.1]))
    (failing,) = standings(grid("admin", "1e-3", [2.0, 9.0, 9.0]) + grid("admin", "3e-3", [2.1]))
    assert [it.best for it in (lower, higher, failing)] == ["3e-3", "1e-3", "1e-3"]
    admin = standings(grid("pre-ln", "1e-3", [1.0, 1.0, 1.0]))[0]
    assert judged(difference(lower, admin, loss), True) == "fewer than 3 seeds"


def test_differences_are_between_the_same_seeds():
    """Between the schemes' means are 0.5 bits, the seeds 2 bits apart: only seed by seed does the difference show."""
    admin, other = standings(grid("admin", "1e-3", [1.0, 2.0, 3.0]) + grid("pre-ln", "1e-4", [1.49, 2.5, 3.51]))
    found = difference(other, admin, loss)
    assert found.mean == pytest.approx(0.5) and 0.47 < found.low < found.high < 0.53
    assert (judged(found, True), judged(difference(admin, other, loss), True)) == ("behind", "ahead")
    assert judged(found, False) == "ahead"
    (far,) = standings(grid("pre-ln", "1e-4", [3.0, 2.0, 1.2]))
    assert judged(difference(far, admin, loss), True) == "no difference shown"
    (two,) = standings(grid("pre-ln", "1e-4", [9.0, 9.0]))
    assert judged(difference(two, admin, loss), True) == "fewer than 3 seeds"


def test_a_difference_has_to_show_at_every_rate_that_is_as_good():
    """A rate that is best by a hair decides nothing; one that is shown to be worse, or fails once, has no say."""
    admin = grid("admin", "1e-3", [1.0, 2.0, 3.0])
    best = grid("pre-ln", "3e-3", [1.2, 2.2, 3.21])
    alone = standing_table(admin + best)[1]
    assert alone["best rate"] == "3e-3" and alone["bits vs. Admin"] == "behind: +0.203 (+0.189 to +0.218)"
    other = standing_table(admin + best + grid("pre-ln", "1e-3", [0.9, 2.3, 3.5]))[1]
    assert other["best rate"] == "3e-3 (as good: 1e-3)"
    assert other["bits vs. Admin"] == "no difference shown: +0.203 (-0.526 to +0.992)"
    (more,) = standings(best + grid("pre-ln", "3e-3", [1.0] * 5)[3:] + grid("pre-ln", "1e-3", [0.9, 2.3, 3.5]))
    assert more.as_good == ["1e-3"], "of five seeds three at the other rate"
    ours = standing_table(admin + grid("admin", "3e-3", [1.3, 1.9, 2.9]) + best)
    assert ours[1]["bits vs. Admin"].startswith("no difference shown: +0.203"), "Admin's other rate counts as well"
    for worse in ([1.4, 2.4, 3.41], [1.1, 2.1, 9.0], [1.3, 2.3]):
        row = standing_table(admin + best + grid("pre-ln", "1e-3", worse))[1]
        assert row["best rate"] == "3e-3" and row["bits vs. Admin"] == alone["bits vs. Admin"], worse


def test_a_diverged_run_counts_with_the_bound():
    (found,) = standings(
        [result(bits=bits, bleu=None, verdict="diverged", seed=seed) for seed, bits in enumerate([None, INF, 40.0])]
    )
    assert [loss(run) for run in found.at_best.values()] == [9.0] * 3 and found.window == []


def test_standing_from_the_file_that_is_kept(tmp_path):
    """Does runs.csv give the same table as the results themselves, and validation's curves?"""
    runs = grid("admin", "1e-3", [1.0, 2.0, 3.0]) + grid("pre-ln", "1e-4", [1.5, 2.5, 5.0], left=None)
    runs += [
        result(scheme="post-ln", bits=None, bleu=None, left=None, verdict="diverged", update=7, seed=s) for s in "123"
    ]
    for run in runs:
        run.update(
            params=1,
            seconds=2,
            signature="s",
            hardware="h",
            commit="c",
            train={10: 9.0},
            valid=dict.fromkeys((100, 200), NAN if run["bits"] is None else run["bits"]),
        )
    write_runs(tmp_path / "runs.csv", runs)
    table, kept = standing_table(runs), read_runs(tmp_path / "runs.csv")
    assert standing_table(kept) == table
    assert [str(run["valid"]) for run in kept] == [str(run["valid"]) for run in runs]
    assert [row["scheme"] for row in table] == ["admin", "pre-ln", "post-ln"]
    assert table[0]["left the plateau at"] == "15 (15 to 15)" and table[0]["bits vs. Admin"] == ""
    assert table[1]["learned"] == "2 of 3" and table[1]["window"] == "-" and table[1]["left the plateau at"] == "-"
    assert table[1]["bits vs. Admin"].startswith("no difference shown: +1.0")
    assert (
        table[2]["bits vs. Admin"].startswith("behind: +7.000 (+4.5")
        and table[2]["BLEU vs. Admin"] == "behind: -50.00 (-50.00 to -50.00)"
    )
    tried = grid("admin", "1e-4", [1.0]) + grid("admin", "1e-3", [1.0]) + grid("pre-ln", "1e-4", [8.9])
    assert [row["window"] for row in standing_table(runs[:6], tried)] == ["1e-4 1e-3", "-"]
    (tmp_path / "runs.csv").write_text("scheme\nadmin\n")
    with pytest.raises(ValueError, match="has no column verdict; expected the runs.csv of a grid"):
        read_runs(tmp_path / "runs.csv")


@pytest.mark.parametrize(
    ("valid", "end", "expected"),
    [
        ({100: 6.0, 200: 7.0}, 200, True),  # the first leg
        ({200: 6.0, 300: 5.9, 400: 6.1}, 400, True),
        ({100: 5.0, 200: 6.0, 300: 5.0, 400: 5.5}, 400, False),
        ({200: 6.0, 300: NAN, 400: NAN}, 400, False),
    ],
)
def test_a_leg_must_gain(valid, end, expected):
    assert gained(valid, 200, end) is expected


def test_heat_map_has_its_numbers(closed):
    """Does every cell have its colour's value, its number and its mark, at its learning rate and beta2?"""
    runs = [
        result(lr="1e-3", beta2="0.999"),
        result(lr="1e-4", beta2="0.98", bits=5.0, verdict="plateau"),
        result(lr="1e-3", beta2="0.98", bits=None, verdict="diverged"),
        result(scheme="post-ln", lr="1e-4", bits=4.0, beta2="0.98"),
    ]
    axes = {it.get_title(): it for it in draw_heatmap(runs).axes}
    admin, post_ln = (axes[SCHEMES[name].title] for name in ("admin", "post-ln"))
    (image,) = admin.images
    assert image.get_array().filled(-1).tolist() == [[5.0, 9.0], [-1, 2.0]] and image.get_clim() == (2.0, 9.0)
    assert [text.get_text() for text in admin.get_xticklabels()] == ["1e-4", "1e-3"]
    assert [text.get_text() for text in admin.get_yticklabels()] == ["0.98", "0.999"]
    texts = {text.get_position(): text.get_text() for text in admin.texts}
    assert texts == {(0, 0): "5.00\n—", (1, 0): "×", (0, 1): "nan", (1, 1): "2.00"}
    assert post_ln.images[0].get_array().filled(-1).tolist() == [[4.0, -1], [-1, -1]]


# -- make ------------------------------------------------------------------------------------------------------------

TINY = "PAIRS=300 VALID_PAIRS=50 TEST_PAIRS=20 WORDS=20 WIDTH=16 FFN=16 UPDATES=20 SAVE_EVERY=10 LOG_EVERY=5".split()
WARMUP = "WARMUP=5"


def planned(target, folder, *given):
    """What a plan says of each run, by its folder below this one, in its order."""
    done = conftest.front(target, "-n", f"RUNS={folder}", *given)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    *runs, last = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    runs += [last] if last[0] == "run" else []
    return [Path(path).relative_to(folder).as_posix() for _, path in runs]


def test_rates_are_tried_on_the_first_seed(tmp_path):
    """And on real text in a folder of short runs; the others are known once there are results."""
    given = ["SCHEMES=admin", "RATES=1e-4 1e-3", "SEEDS=1 2"]
    tried = ["admin-18l-lr1e-4-s1", "admin-18l-lr1e-3-s1"]
    all_seeds = [*tried, "admin-18l-lr1e-4-s2", "admin-18l-lr1e-3-s2"]
    assert planned("compare", tmp_path, *given) == [f"compare/{name}" for name in all_seeds]
    assert planned("compare", tmp_path, *given, "SEARCH=first") == [f"compare/{name}" for name in tried]
    short = planned("compare", tmp_path, *given, "PRESET=multi30k")
    assert short == [f"compare-multi30k/search/{name}" for name in tried]


@pytest.mark.parametrize(
    ("target", "given", "first", "count"),
    [
        ("compare", "DEPTHS=6 TIED=no FFN_INIT=stock DROPOUT=0.1 MAX_TOKENS=9",
         "compare-tokens9-dropout0.1-untied-ffn-stock/admin-6l-lr1e-4-s1", 216),
        ("sensitivity", "PRESET=gpu", "sensitivity-gpu/post-ln-lr1e-4-b0.99-s1", 45),
        ("warmup", "", "warmup/post-ln-adam-w0-lr5e-4-s1", 54),
        ("warmup", "QUICK=1", "warmup/post-ln-adam-w0-lr1e-3-s1", 12),
        ("deeper", "FACTOR=0 DROPOUT=0.1", "deeper-factor0-dropout0.1/encoder", 77),
    ],
)  # fmt: skip
def test_where_the_runs_of_a_grid_are(target, given, first, count, tmp_path):
    runs = planned(target, tmp_path, *given.split())
    assert (runs[0], len(runs)) == (first, count)


@pytest.mark.parametrize(
    ("target", "given", "message"),
    [
        ("compare", ["SCHEMES=amdin"], "SCHEMES=amdin cannot be; expected some of admin post-ln pre-ln"),
        ("compare", ["RATES=1 1"], "RATES=1 1 cannot be; expected numbers of 0 or more, as 1e-3, one or more"),
        ("compare", ["RATES="], "RATES= cannot be; expected numbers of 0 or more"),
        ("compare", ["DEPTHS=0"], "DEPTHS=0 cannot be; expected whole numbers above 0"),
        ("compare", ["SEEDS=x"], "SEEDS=x cannot be; expected whole numbers of 0 or more"),
        ("compare", ["WARMUP=-5"], "WARMUP=-5 cannot be; expected a whole number of 0 or more"),
        ("compare", ["SEARCH=last"], "SEARCH=last cannot be; expected one of every first short"),
        ("compare", ["PRESET=tpu"], "PRESET=tpu is unknown; expected cpu or gpu or multi30k"),
        ("compare", ["DROPOUT=1"], "DROPOUT=1 cannot be; expected a number of 0 or more and below 1"),
        ("compare", ["WIDTH=30"], "WIDTH=30 is not a multiple of HEADS=4. Give another of them."),
        ("compare", ["UPDATES=1501"], "UPDATES=1501 is not a multiple of SAVE_EVERY=100"),
        ("compare", ["LEG=50"], "LEG=50 is not a multiple of SAVE_EVERY=100"),
        ("compare", ["LR=1"], "LR=1 is not a setting of compare. See make help TARGET=compare."),
        ("compare", ["WHERE=cloud"], "WHERE=cloud cannot be; expected one of here slurm"),
        ("sensitivity", ["BETA2S=1"], "BETA2S=1 cannot be; expected numbers below 1, as 0.98"),
        ("warmup", ["OPTIMIZERS=lion"], "OPTIMIZERS=lion cannot be; expected some of adam sgd"),
        ("deeper", ["SCHEMES=t-fixup"], "SCHEMES=t-fixup cannot be; expected some of"),
        ("deeper", ["FACTOR=-1"], "FACTOR=-1 cannot be; expected a number of 0 or more"),
    ],
)  # fmt: skip
def test_a_wrong_setting_of_a_grid_is_one_line(target, given, message):
    with pytest.raises(ValueError) as error:
        read(target, dict(one.split("=", 1) for one in given))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_a_grid_is_held_to_is_what_it_was():
    """The folders of docs/compare.csv and its like are gone on with: names, types and words of the first version."""
    record = read("compare", {}).record()
    assert record == {
        **{"updates": "1500", "leg": "500", "beam": "5", "ffn_init": "xavier"},
        **{"pairs": "20000/1000/1000", "words": "100"},
        **{"--arch": "transformer_admin", "--encoder-embed-dim": "128", "--encoder-ffn-embed-dim": "256"},
        **{"--encoder-attention-heads": "4", "--decoder-attention-heads": "4", "--share-all-embeddings": "on"},
        **{"--dropout": "0.0", "--optimizer": "radam", "--adam-betas": "(0.9, 0.98)", "--clip-norm": "0.0"},
        **{"--criterion": "label_smoothed_cross_entropy_fast", "--label-smoothing": "0.1", "--max-tokens": "192"},
        **{"--required-batch-size-multiple": "1", "--log-interval": "10", "--lr-scheduler": "inverse_sqrt"},
        **{"--warmup-updates": "100", "--warmup-init-lr": "1e-7", "--cpu": "on", "--num-workers": "0"},
    }  # fmt: skip


@pytest.mark.slow
def test_a_grid_of_two_runs(tmp_path):
    """Killed in the middle, it goes on; what is done stays; another setting is refused; a diverged run is a row."""
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e-3 1e38", "SEEDS=1", *TINY, WARMUP]
    out = tmp_path / "compare"
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "recipes", "compare", f"RUNS={tmp_path}", *grid, "UPDATES=100000"]
    running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    checkpoints = out / "admin-1l-lr1e-3-s1/checkpoints"
    try:
        until = time.monotonic() + 240
        while not list(checkpoints.glob("checkpoint_*_*0.pt")):
            assert running.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.2)
        second = conftest.front("compare", f"RUNS={tmp_path}", *grid, "UPDATES=100000")
        assert second.returncode == 2 and f"{out}: process " in second.stderr and "is at work there" in second.stderr
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert not (out / "admin-1l-lr1e-3-s1/trained.json").exists() and not (out / "table.md").exists()
    done = conftest.front("compare", f"RUNS={tmp_path}", *grid)
    assert done.returncode != 0 and "was made with other settings (updates 100000 -> 20" in done.stderr
    (out / "settings.json").unlink()
    kept = max(int(path.stem.rpartition("_")[2]) for path in checkpoints.glob("checkpoint_*_*0.pt"))
    grid += [f"RUNS={tmp_path}", f"UPDATES={kept + 20}", f"LEG={kept + 20}", "JOBS=2"]
    done = conftest.front("compare", *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"Loaded checkpoint {checkpoints}/" in (out / "admin-1l-lr1e-3-s1/train.log").read_text()
    whole, diverged = csv.DictReader((out / "runs.csv").open())
    assert whole["verdict"] in ("learned", "plateau") and 0 < float(whole["bits"]) < 20 and whole["signature"]
    assert diverged["verdict"] == "diverged" and not diverged["bleu"]
    assert re.search(r"\| Admin +\| 1 +\| 1e-3 ", done.stdout) and (out / "curves.png").exists()
    assert "2 runs, 0 of them done; 2 at a time\n" in done.stdout and "; 2 of 2 runs done\n" in done.stdout
    assert not list(out.rglob("*.part")) and not list(out.rglob("*.pt"))
    stamp = (out / "admin-1l-lr1e-3-s1/result.json").stat().st_mtime_ns
    # A folder of an earlier version has no description of a run.
    (out / "admin-1l-lr1e-3-s1/run.json").unlink()
    done = conftest.front("compare", *grid)
    assert done.returncode == 0 and "runs done" not in done.stdout
    assert (out / "admin-1l-lr1e-3-s1/result.json").stat().st_mtime_ns == stamp


@pytest.mark.nightly
def test_sensitivity_small(tmp_path):
    done = conftest.front(
        "sensitivity", f"RUNS={tmp_path}", *TINY, "SCHEMES=post-ln", "LRS=1e-3", "BETA2S=0.99", "LAYERS=1"
    )
    assert done.returncode == 0 and (tmp_path / "sensitivity/heatmap.png").exists(), done.stdout[-3000:] + done.stderr


@pytest.mark.nightly
def test_compare_on_real_text_small(tmp_path):
    """The rates are tried in short runs, all seeds run at the best; the score is of the published text."""
    served = tmp_path / "served"
    served.mkdir()
    for split, size in (("train", 300), ("val", 40), ("test_2016_flickr", 20)):
        words = [f"Wort{number % 17} f\u00fcr {number % 13}." for number in range(size)]
        (served / f"{split}.de").write_text("\n".join(words) + "\n", encoding="utf-8")
        (served / f"{split}.en").write_text("\n".join(words).replace("f\u00fcr", "isn't") + "\n", encoding="utf-8")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(served.iterdir())]
    (tmp_path / "sums").write_text("\n".join(sums) + "\n")
    given = ["PRESET=multi30k", f"DATA={served}", f"SUMS={tmp_path}/sums", "MERGES=50", "MAX_TOKENS=200", "SHORT=20"]
    grid = ["SCHEMES=admin", "DEPTHS=1", "RATES=1e-30 1e-2", "SEEDS=1 2"]
    done = conftest.front("compare", f"RUNS={tmp_path}", *TINY, WARMUP, *given, *grid)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "compare-tokens200-multi30k"
    runs, tried = (list(csv.DictReader((out / name).open())) for name in ("runs.csv", "search/runs.csv"))
    assert [(row["lr"], row["seed"]) for row in tried] == [("1e-30", "1"), ("1e-2", "1")]
    assert [(row["lr"], row["seed"]) for row in runs] == [("1e-2", "1"), ("1e-2", "2")]
    assert all("tok:13a" in row["signature"] and row["bleu"] for row in runs)
    assert "were tried in runs of 20 updates on seed 1)" in (out / "standing.md").read_text()


def test_a_crash_is_an_error_and_leaves_no_result(corpus, tmp_path):
    """A wrong option, say: one line, and the run is made again once it is right."""
    options = "--arch transformer_admin_tiny --optimizer adam --cpu --num-workers 0 --max-tokens 300 --typo".split()
    Run({}, str(corpus), options, 10, 10, 10).write(tmp_path / "run")
    done = run_module("recipes.grid.run", tmp_path / "run", log=tmp_path / "log")
    assert done.status == 2 and re.search("fairseq-train ended with status 2: .*--typo", done.output.splitlines()[-1])
    assert len(done.output.splitlines()) == 1 and not (tmp_path / "run/trained.json").exists()
