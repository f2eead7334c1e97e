"""Are the numbers that README.md and docs/ take from the benches those of the rows that are kept, docs/bench?"""

from __future__ import annotations

import csv

import pytest
from conftest import ROOT
from pages import README, docs, section

Row = dict[str, str]
FAST, PLAIN, PRE_LN, STOCK = "admin", "admin-plain", "pre-ln", "post-ln"


def kept(bench: str) -> list[Row]:
    with (ROOT / "docs/bench" / f"{bench}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(len(row["commit"]) == 40 and row["device"] for row in rows)
    return rows


def page(title: str) -> str:
    """A section of the results, on one line."""
    return " ".join(section(docs("results.md"), title).split())


def of_each_size() -> list[dict[str, Row]]:
    """The rows of the speed bench: of each size, by method."""
    sizes: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in kept("speed"):
        size = tuple(row[name] for name in ("layers", "decoder_layers", "width", "tokens"))
        sizes.setdefault(size, {})[row["method"]] = row
    assert list(sizes) == [
        ("18", "18", "16", "512"),
        ("18", "18", "256", "1024"),
        ("18", "18", "512", "1024"),
        ("60", "12", "256", "1024"),
    ]
    return list(sizes.values())


def spread(row: Row, low: str = "low", high: str = "high") -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*(float(row[name]) for name in ("ratio", low, high)))


def ratio(row: Row) -> str:
    return spread(row, "ratio_low", "ratio_high")


def over_stock(name: str) -> list[str]:
    return [f"{float(size[FAST][name]) / float(size[STOCK][name]):.2f}" for size in of_each_size()]


def counted(name: str) -> list[str]:
    return [f"{int(size[FAST][name]):,}, {int(size[STOCK][name]):,}" for size in of_each_size()]


def profiled(row: Row) -> str:
    return f"{float(row['profile_steps']):.2f} ({float(row['profile_forwards']):.2f})"


def test_speed() -> None:
    cells = {
        "Admin, fast": [ratio(size[FAST]) for size in of_each_size()],
        "Admin, plain": [ratio(size[PLAIN]) for size in of_each_size()],
        "Pre-LN": [ratio(size[PRE_LN]) for size in of_each_size()],
        "operations in forward and backward, stock's": counted("operations"),
        "synchronisations, stock's": counted("waits"),
        "bytes saved for the backward": over_stock("kept_mib"),
        "peak memory of the process": over_stock("peak_mib"),
        "the same above the libraries": over_stock("model_mib"),
        "profiling pass, over stock's step (over its forward)": [profiled(size[FAST]) for size in of_each_size()],
        "optimizer alone, over fairseq's Adam": over_stock("optimizer_ms"),
    }
    text = section(docs("results.md"), "The fast layers")
    for title, values in cells.items():
        assert f"\n| {title} | {' | '.join(values)} |\n" in text, title


def test_what_is_said_of_the_speed() -> None:
    """Where every pair is below stock, and where not."""
    highest = [float(size[FAST]["ratio_high"]) for size in of_each_size()]
    assert [high < 1 for high in highest] == [True, True, False, False]
    assert "At widths 16 and 256 fast takes less time than stock in every pair." in page("The fast layers")


def test_readme() -> None:
    """What a step and the profile take, in the README."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    sizes = of_each_size()
    low, high = min(times := [float(size[FAST]["profile_steps"]) for size in sizes]), max(times)
    assert f"one pass over the first batch, {low:.1f} to {high:.1f} of a step on a CPU" in text
    fast, plain = (f"{float(sizes[1][method]['ratio']):.2f}" for method in (FAST, PLAIN))
    lowest, highest = (f"{float(sizes[1][FAST][name]):.2f}" for name in ("ratio_low", "ratio_high"))
    assert f"{fast} of the time on an Intel CPU (seven pairs, {lowest} to {highest}; plain layers {plain})" in text
    wide, deep = (f"{float(size[FAST]['ratio']):.2f}" for size in sizes[2:])
    assert f"{wide} at width 512 and {deep} with 60L-12L, where pairs differ by more than is won." in text
    assert f"Peak memory {over_stock('peak_mib')[1]}" in text


def test_attention() -> None:
    found = {row["what"]: float(row["ratio"]) for row in kept("attention")}
    for channels, told in ((16, "4 heads of 16 channels"), (64, "with 4 heads of 64 channels")):
        *first, last = (f"{found[f'4 heads of {channels}, {keys} keys']:.2f}" for keys in (13, 25, 32, 96, 512))
        assert f"{told} {', '.join(first)} and {last}" in page("The fast layers")
    softmax = found["4056 rows of 13"]
    told = f"of 4,056 rows of 13 numbers takes {softmax:.2f} of the time if they are padded to 16"
    assert told in page("The fast layers")


def test_engines() -> None:
    folded, whole, int8 = kept("engines")
    text = page("After training")
    assert f"takes {spread(folded)} of the time: the same" in text
    assert f"CTranslate2 takes {spread(whole)} of fairseq's time in float32, {spread(int8)} in int8." in text
    short = "{:.2f} of fairseq's time in float32, {:.2f} in int8".format(
        *(float(row["ratio"]) for row in (whole, int8))
    )
    assert short in README.read_text(encoding="utf-8")


def test_average() -> None:
    model, plain, time, _ = (float(row["ratio"]) for row in kept("average"))
    told = f"peaks at {model:.2f} of one model, imports included, and takes {time:.2f} of the time of a plain average"
    assert f"{told} that loads each file whole, which peaks at {model / plain:.1f} models." in page("After training")


def test_text_steps() -> None:
    ratios = [float(row["ratio"]) for row in kept("text_steps") if row["beside"]]
    told = "tokenising {:.2f} of sacremoses' (WMT's way {:.2f}), "
    told += "learning BPE {:.2f} of subword-nmt's and applying it {:.2f}."
    assert told.format(*ratios) in page("Text")


def test_pages() -> None:
    first, second = map(spread, kept("pages"))
    assert f"{first} of the time with pages of 4 kB at width 64, and {second} at width 256" in page("The fast layers")


@pytest.mark.parametrize("row", kept("process"), ids=lambda row: f"{row['layers']}-{row['width']}-{row['updates']}")
def test_a_training_process(row: Row) -> None:
    layers, measured, formula = row["layers"], float(row["largest_mb"]), float(row["predicted_mb"])
    sizes = [f"{layers}L-{layers}L", row["width"], f"{int(row['words']):,}", f"{int(row['tokens']):,}"]
    code = {"fast": "fast", "plain": "fairseq's"}[row["code"]]
    line = f"| {', '.join([*sizes, code])} | {row['updates']} | {measured:,.0f} MB | {formula:,.0f} |"
    assert line in page("The memory formula")
    assert formula == pytest.approx(measured, rel=0.1)
    assert int(row["ffn"]) == int(row["width"]) * (4 if row["width"] == "256" else 2)
