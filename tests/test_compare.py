"""The comparison of schemes: outcomes of runs, rankings, and figures."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from fairseq_admin.logs import Log
from recipes.research import drawing
from recipes.research.drawing import draw_accuracies, draw_losses, draw_rates
from recipes.research.intervals import contrast, with_interval
from recipes.research.outcome import loss, mean_of_last, still_falling, verdict
from recipes.research.ranking import rankings, table
from recipes.research.rows import read_results
from recipes.research.runs import unigram_entropy
from recipes.research.texts import reversed_pairs
from recipes.steps.results import write_runs

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("train", "valid", "stopped", "expected"),
    [
        # H is 10 bits: the plateau starts above 8, and above 15 a run has exploded.
        ({10: 9.9, 20: 5.0}, {20: 8.0}, False, ("learned", None)),
        ({10: 9.9, 20: 10.2}, {20: 15.0}, False, ("plateau", None)),
        ({10: 16.0, 20: 9.0, 30: 17.0, 40: NAN}, {40: 20.0}, False, ("diverged", 30)),
        ({10: 9.0, 20: 5.0}, {20: NAN}, False, ("diverged", 20)),
        ({10: 9.0, 20: NAN}, {20: 5.0}, False, ("diverged", 20)),
        ({10: INF}, {10: INF}, False, ("diverged", 10)),
        # A spike at the start, as before the first updates, does not count.
        ({10: 20.0, 20: 5.0}, {20: 5.0}, False, ("learned", None)),
        ({10: 9.0, 20: 8.0}, {10: 9.0}, True, ("diverged", 20)),
        ({}, {}, True, ("diverged", 0)),
    ],
)
def test_verdict(train, valid, stopped, expected):
    assert verdict(Log(train, valid, 1, 1, 1.0, 0.0), 10.0, stopped) == expected


def test_corpus_is_reversed_and_mapped_one_to_one():
    text = reversed_pairs("train", 300, 20)
    mapped = {}
    for source, target in [*text, *reversed_pairs("test", 9, 20)]:
        for word, other in zip(source.split(), reversed(target.split()), strict=True):
            assert mapped.setdefault(word, other) == other
    assert len(mapped) == len(set(mapped.values())) == 20 and reversed_pairs("valid", 300, 20) != text


def test_entropy_is_that_of_a_token_with_ends_of_sentences(tmp_path):
    """By hand, for words x x x y and two ends: H = -(3/6 log 3/6 + 1/6 log 1/6 + 2/6 log 2/6) = 1.459148 bits."""
    (tmp_path / "train.b").write_text("x\nx x y\n")
    assert unigram_entropy(tmp_path / "train.b") == pytest.approx(1.459148, abs=1e-6)


# -- rows ------------------------------------------------------------------------------------------------------------


def result(**values):
    row = {"scheme": "admin", "layers": "6", "lr": "1e-4", "seed": "1", "verdict": "learned", "update": None}
    row |= {"bits": 2.0, "entropy": 6.0, "bleu": 50.0, "signature": "s", "params": 1, "seconds": 2}
    return row | {"valid": {20: values.get("bits", 2.0)}, "hardware": "h", "commit": "c", **values}


def seeds(scheme, rate, bits, **values):
    row = {"scheme": scheme, "lr": rate, **values}
    return [
        result(**row, seed=str(seed), bits=number, verdict="learned" if number < 4.8 else "plateau")
        for seed, number in enumerate(bits, 1)
    ]


DIVERGED = {"verdict": "diverged", "update": 130, "bits": None, "bleu": None, "signature": None, "valid": {}}


def test_rows_are_kept_as_they_are(tmp_path):
    """Rows are copied unchanged from the runs' tables to the common table, which gives the same table and figures."""
    rows = [*seeds("admin", "1e-3", [1.0, 2.0]), result(scheme="pre-ln", **DIVERGED)]
    files = [tmp_path / f"{number}.csv" for number in range(3)]
    for file, row in zip(files, rows):
        write_runs(file, [row])
    outcomes = []
    for name, given in (("a", files), ("b", [tmp_path / "a/runs.csv"])):
        drawing.write(tmp_path / name, read_results(given))
        outcomes.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert outcomes[0] == outcomes[1] and len(outcomes[0]) == 4
    assert read_results([tmp_path / "a/runs.csv"]) == rows
    text = (tmp_path / "a/table.md").read_text()
    assert "| Pre-LN   | 6        | 1e-4        | 0 of 1 " in text
    assert "Commit c; h; 0.00 hours of updates in 3 runs." in text
    broken = tmp_path / "b/runs.csv"
    broken.write_text(broken.read_text().replace(",6.0,", ",six,", 1))
    with pytest.raises(ValueError, match=f"^{broken}: could not .* 'six'; expected the rows of a grid"):
        read_results([broken])


# -- statistics ------------------------------------------------------------------------------------------------------


def test_intervals_are_students_welchs_and_satterthwaites():
    """By hand, for 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.302653, so ± 4.302653 / sqrt(3) = 2.484138."""
    one, two = [1.0, 2.0, 3.0], [2.0, 2.5, 2.6, 4.0]
    found = contrast([(1, one)])
    assert (found.low, found.high) == (pytest.approx(-0.484138, abs=1e-6), pytest.approx(4.484138, abs=1e-6))
    assert with_interval(one, ".1f") == "2.0 (-0.5 to 4.5)" and with_interval(one[:2], ".1f") == "1.0, 2.0"
    assert f"{contrast([(1, [9.6] * 3)]):.3f}" == "9.600 (9.600 to 9.600)"
    for level in (0.9, 0.95):
        found = contrast([(1, one), (-1, two)], level)
        interval = stats.ttest_ind(one, two, equal_var=False).confidence_interval(level)
        assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    # Four groups of variance 1 and size 3 have 4 x 2 degrees of freedom: t(0.975, 8) = 2.306004, times sqrt(4/3).
    found = contrast([(1, one), (-1, one), (-1, one), (1, [2.0, 3.0, 4.0])])
    assert found.mean == 1 and found.high - 1 == pytest.approx(2.306004 * math.sqrt(4 / 3), abs=1e-6)


def test_the_outcome_is_the_mean_of_the_last_validations():
    """The outcome is the mean of the last validations.

    A run is still falling if its outcome is 2 % below the mean of the four validations before.
    """
    flat = dict(zip(range(100, 900, 100), [3.0] * 4 + [2.0, 1.0, 2.0, 3.0]))
    assert mean_of_last(flat) == 2.0 and mean_of_last({5: 3.0, 9: 1.0}) == 2.0 and math.isnan(mean_of_last({}))
    assert still_falling(flat) and not still_falling({update: 3.0 for update in range(7)})
    for last, falls in ((2.93, True), (2.95, False), (3.5, False)):
        assert still_falling(dict(enumerate([3.0] * 4 + [last] * 4))) == falls, last
    assert loss(result(valid=flat)) == 2.0
    assert [loss(result(**DIVERGED)), loss(result(bits=40.0)), loss(result(bits=INF))] == [9.0] * 3


@pytest.mark.parametrize(
    ("others", "best", "window"),
    [
        # The rate at which most seeds learned wins, then the lowest mean.
        ({"3e-3": [1.0, 1.0, 5.0], "3e-4": [3.0, 3.1, 3.2], "1e-3": [2.9, 3.0, 3.1]}, "1e-3", ["3e-4", "1e-3"]),
        # Only the seeds that were tried with both rates count.
        ({"1e-3": [2.0, 1.0, 1.0], "3e-3": [1.9]}, "3e-3", ["1e-3", "3e-3"]),
        ({"1e-3": [2.0, 9.0, 9.0], "3e-3": [2.1]}, "1e-3", ["3e-3"]),
    ],
)
def test_a_scheme_is_judged_at_its_best_rate(others, best, window):
    (found,) = rankings([row for rate, bits in others.items() for row in seeds("admin", rate, bits)])
    assert (found.best, found.window) == (best, window)


def test_a_difference_has_to_show_at_every_rate_that_is_as_good():
    """A difference must show at every rate that is as good as the best, seed by seed.

    A slightly better rate decides nothing. A rate that is shown to be worse, or fails once, does not count.
    """
    admin = seeds("admin", "1e-3", [1.0, 2.0, 3.0])
    best = seeds("pre-ln", "3e-3", [1.2, 2.2, 3.21])
    alone = table(admin + best)[1]
    assert alone["best rate"] == "3e-3" and alone["bits vs. Admin"] == "behind: +0.203 (+0.189 to +0.218)"
    rounded = table(admin + seeds("pre-ln", "3e-3", [0.0] * 3))[1]
    assert rounded["loss vs. Admin, Welch"].startswith("ahead: -100.0%"), "fairseq rounds a loss to 0"
    other = table(admin + best + seeds("pre-ln", "1e-3", [0.9, 2.3, 3.5]))[1]
    assert other["best rate"] == "3e-3 (as good: 1e-3)"
    assert other["bits vs. Admin"] == "no difference shown: +0.203 (-0.526 to +0.992)"
    ours = table(admin + seeds("admin", "3e-3", [1.3, 1.9, 2.9]) + best)
    assert ours[1]["bits vs. Admin"].startswith("no difference shown: +0.203"), "Admin's other rate counts as well"
    for worse in ([1.4, 2.4, 3.41], [1.1, 2.1, 9.0], [1.3, 2.3]):
        row = table(admin + best + seeds("pre-ln", "1e-3", worse))[1]
        assert row["best rate"] == "3e-3" and row["bits vs. Admin"] == alone["bits vs. Admin"], worse


# -- figures ---------------------------------------------------------------------------------------------------------


def lines(axes, **look):
    """A panel's lines with the given look, as {x: y}."""
    drawn = [
        line for line in axes.lines if all(getattr(line, f"get_{name}")() == value for name, value in look.items())
    ]
    return [dict(zip(*line.get_data())) for line in drawn]


def test_losses_are_the_runs():
    """Every run has a thin line, every group its mean, and a diverged run a cross."""
    losses = {"1": {10: 6.0, 20: 2.0}, "2": {10: 5.0, 20: 1.0}, "3": {10: 4.0, 20: 3.0}}
    three = [result(seed=seed, valid=valid) for seed, valid in losses.items()]
    bad = result(scheme="post-ln", verdict="diverged", update=15, valid={10: 7.0})
    six, eighteen = draw_losses([("6L-6L", "Admin", three), ("18L-18L", "Post-LN", [bad])], 6.0).axes
    admin, post_ln = "#0072B2", "#D55E00"  # the schemes' colours in every figure
    assert lines(six, linewidth=0.6, color=admin) == [*losses.values()]
    assert lines(six, linewidth=1.6, color=admin, label="Admin") == [{10: 5.0, 20: 2.0}]
    assert lines(eighteen, linewidth=0.6, color=post_ln) == lines(eighteen, linewidth=1.6) == [{10: 7.0}]
    assert list(lines(eighteen, marker="x")[0]) == [15]
    # A mean of two curves is a curve that no run followed.
    (axes,) = draw_losses([("", "Admin", three[:2])], 6.0).axes
    assert lines(axes, linewidth=1.6) == [losses["1"], losses["2"]]


def test_rates_are_the_runs():
    """Every scheme has its means at its rates, every run a dot, and a diverged run a cross."""
    rows = seeds("admin", "1e-3", [2.0, 3.0]) + seeds("admin", "1e-4", [4.0]) + seeds("deepnorm", "1e-4", [1.0])
    (panel,) = draw_rates([*rows, result(scheme="deepnorm", lr="1e-3", **DIVERGED)]).axes
    assert panel.get_title() == "DeepNorm" and [text.get_text() for text in panel.get_xticklabels()] == ["1e-4", "1e-3"]
    assert lines(panel, label="Admin") == [{0: 4.0, 1: 2.5}] and lines(panel, label="DeepNorm") == [{0: 1.0, 1: 9.0}]
    assert lines(panel, marker="o", color="#0072B2") == [{1: 2.0}, {1: 3.0}, {0: 4.0}]
    assert lines(panel, marker="x") == [{1: 9.0}]


def test_rates_of_a_grid_with_another_axis():
    """A grid with another axis has one panel per optimizer and scheme. A line joins the last losses of each level."""
    at = {"scheme": "admin", "optimizer": "sgd", "warmup": "0", "lr": "1"}
    how = {name: it for name, it in result(valid={10: 9.0, 20: 2.0}).items() if name not in ("scheme", "layers", "lr")}
    rows = [{**at, **how}, {**at, **how, "warmup": "9", "bits": 3.0}, {**at, **how, "optimizer": "adam"}]
    adam, sgd = draw_rates(rows).axes
    assert (sgd.get_title(), adam.get_title()) == ("Admin, SGD", "Admin, Adam")
    assert lines(sgd, label="warm-up 0") == [{0: 2.0}] and lines(sgd, label="warm-up 9") == [{0: 3.0}]


def test_accuracies_are_the_seeds():
    rows = [
        {"scheme": scheme, "layers": layers, "lr": "1", "seed": seed, "diverged": False, "valid": 0.5, "test": test}
        for scheme, layers in (("none", "0"), ("admin", "8"))
        for seed, test in (("1", 0.6), ("2", 0.8))
    ]
    (axes,) = draw_accuracies(rows).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "8"]
    assert lines(axes, label="head alone") == [{0: pytest.approx(0.7)}]
    assert lines(axes, marker="o") == [{0: 0.6}, {0: 0.8}, {1: 0.6}, {1: 0.8}]
