"""The screens and cases of recipes/research at tiny sizes: their runs and methods."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import ROOT
from torch import nn

from recipes.research import cases
from recipes.research import omega_screen as screen


@pytest.fixture(scope="module")
def texts():
    train, valid = screen.read()
    return train, valid[:4]


@pytest.fixture
def two_layers(monkeypatch):
    monkeypatch.setattr(screen, "LAYERS", 2)
    monkeypatch.setattr(screen, "VALIDATED", [1, 2])


def start(name, train):
    """A method's model before its first update, and its first batch."""
    _, model, batch = next(screen.training(screen.METHODS[name], 1e-3, 1, 2, train))
    return model, batch


def omegas(name, train):
    return [norm.omega_init[0].item() for norm in screen.norms_with_omega(start(name, train)[0])]


def test_each_method_is_what_its_row_says(two_layers, texts):
    train, _ = texts
    reference, constant = omegas("reference", train), omegas("constant", train)
    assert reference[0] == 1 and reference == sorted(reference) and constant == [2.0] * 4
    assert omegas("reference-x3", train) == pytest.approx([3 * omega for omega in reference])
    assert omegas("uniform", train) == [reference[-1]] * 4
    assert omegas("ahead", train)[0] == 1 and omegas("ahead", train)[-1] > reference[-1]
    assert omegas("deepnorm", train) == pytest.approx([4**0.25] * 4)
    assert omegas("post-ln", train) == omegas("pre-ln", train) == omegas("constant-folded", train) == []
    (stock, batch), (folded, _), (attached, _) = (start(n, train) for n in ("post-ln", "constant-folded", "constant"))
    words = batch[:, :-1]
    torch.testing.assert_close(folded(words), attached(words))
    assert not torch.allclose(folded(words), stock(words), atol=0.01)
    frozen = [norm.omega_delta.requires_grad for norm in screen.norms_with_omega(start("constant-frozen", train)[0])]
    assert frozen == [False] * 4
    deep = start("deepnorm", train)[0].encoder.layers[1]  # (8 · 2)^(-1/4) = 0.5
    assert torch.equal(deep.linear1.weight, stock.encoder.layers[1].linear1.weight / 2)
    halved = deep.self_attn.in_proj_weight / stock.encoder.layers[1].self_attn.in_proj_weight
    assert [rows.unique().item() for rows in halved.chunk(3)] == [1.0, 1.0, 0.5]  # queries, keys, values
    (divided, _), (pre, _) = start("pre-ln-divided", train), start("pre-ln", train)
    assert torch.equal(divided.encoder.layers[1].linear2.weight, pre.encoder.layers[1].linear2.weight / 2)


def test_a_longer_run_begins_as_a_shorter_one(two_layers, texts):
    short, long = (screen.run("constant", 1e-3, 1, updates, *texts) for updates in (1, 2))
    assert short["1"] == long["1"] and float(long["2"]) < float(long["1"])


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


def test_only_a_method_with_its_best_at_the_edge_runs_at_a_further_rate():
    def rows(bits, rates=screen.RATES, methods=screen.METHODS):
        return [
            {"method": name, "rate": str(rate), "seed": seed, "updates": "300", "300": str(bits(name, rate))}
            for name in methods
            for rate in rates
            for seed in "123"
        ]

    short = rows(lambda name, rate: rate if name == "post-ln" else abs(rate - 1e-3))
    assert screen.missing(short[1:]) == [("post-ln", 5e-4, 1, 300)]
    assert screen.missing(short) == [("post-ln", 2.5e-4, seed, 300) for seed in screen.SEEDS]
    longer = screen.missing(short + rows(lambda name, rate: 1, [2.5e-4], ["post-ln"]))
    assert len(longer) == 48 and longer[:2] == [("post-ln", 5e-4, 1, 1500), ("pre-ln", 1e-3, 1, 1500)]


def test_own_share_is_the_branchs_part_of_the_output():
    torch.manual_seed(1)
    x, f, norm = torch.randn(2, 3, 64), 0.5 * torch.randn(2, 3, 64), nn.LayerNorm(64)
    output = norm(x + f)
    share = screen.own_share(f, x + f, norm.weight, output)
    assert share == pytest.approx(0.25 / 1.25, abs=0.03)  # independent parts
    assert screen.own_share(f, f, norm.weight, norm(f)) == pytest.approx(1, abs=1e-3)


def test_the_best_constant_answer_of_a_case_has_the_loss_of_its_plateau(monkeypatch):
    monkeypatch.setattr(cases, "BATCH", 4000)

    class Constant(nn.Module):
        def __init__(self, answer):
            super().__init__()
            self.answer = answer

        def forward(self, x, mask=None):
            return self.answer.expand(*x.shape[:2], len(self.answer))

    ones = torch.tensor([math.log(math.comb(cases.LENGTH, k)) for k in range(cases.LENGTH + 1)])
    for name, answer in (("counting", ones), ("time series", torch.zeros(1)), ("masked", torch.zeros(32))):
        case = cases.CASES[name]
        (batch,) = cases.batches(case, 1, 1)
        assert case.loss(Constant(answer), batch).item() == pytest.approx(case.plateau, rel=0.03)


def test_the_page_of_the_cases_has_the_table_of_its_rows():
    assert cases.table(cases.load(ROOT / "docs/rows/cases.csv")) in (ROOT / "docs/cases.md").read_text()
