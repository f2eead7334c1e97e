"""docs/examples/omega_screen.py and cases.py at tiny sizes: their runs and methods."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from conftest import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "docs/examples"))

import cases  # noqa: E402
import omega_screen as screen  # noqa: E402


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


def test_rows_are_resumed_rates_extended_and_the_best_run_longer(monkeypatch, tmp_path):
    """The first method's best rate is near 8e-3, the second's near 1e-3. Every run is made once."""
    monkeypatch.setattr(screen, "METHODS", dict(itertools.islice(screen.METHODS.items(), 2)))
    best = dict(zip(screen.METHODS, (8e-3, 1e-3)))
    made = []

    def run(name, rate, seed, updates, train, valid):
        made.append((name, rate, seed, updates))
        if len(made) % 7 == 0:
            raise KeyboardInterrupt
        return {"method": name, "rate": rate, "seed": seed, "updates": updates, str(updates): abs(rate - best[name])}

    monkeypatch.setattr(screen, "run", run)
    path = tmp_path / "rows.csv"
    for _ in range(100):
        try:
            screen.screen(path)
            break
        except KeyboardInterrupt:
            continue
    rows = [screen.key(row) for row in screen.load(path)]
    rates = [1e-3, 2e-3, 3e-3, 5e-4, 6e-3, 12e-3]
    short = {(name, rate, seed, 300) for name in best for rate in rates for seed in (1, 2, 3)}
    assert len(rows) == len(set(rows)) and {row for row in rows if row[3] == 300} == short
    assert {row for row in rows if row[3] == 1500} == {
        (name, rate, seed, 1500) for name, rate in zip(best, (6e-3, 1e-3)) for seed in (1, 2, 3)
    }


def test_a_run_that_diverged_is_never_the_best():
    assert screen.final({"updates": "300", "300": "nan"}) == screen.final({"updates": "300", "300": ""}) == math.inf


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


def test_what_diagnose_says_is_run_with_other_seeds(monkeypatch, tmp_path):
    monkeypatch.setattr(cases, "CASES", {"masked": cases.CASES["masked"]})
    monkeypatch.setattr(cases, "LAYERS", 1)
    trained = []
    monkeypatch.setattr(cases, "train", lambda case, *run: trained.append(run) or 1.0)
    trial = type("Trial", (), {"status": "learns", "rule": "log", "rate": 3e-4, "warm_up": 7, "loss": 2.0})
    result = type("Result", (), {"trials": [trial], "advice": "log", "plateau": 3.0})
    monkeypatch.setattr(cases.admin, "diagnose", lambda *args, **options: result)
    cases.run_all(tmp_path / "rows.csv")
    cases.run_all(tmp_path / "rows.csv")
    assert len(trained) == len(cases.METHODS) * 3 + 3
    advised = [run[:4] for run in trained if run[0] in cases.OTHER_SEEDS]
    assert advised == [(seed, "log", 3e-4, 7) for seed in cases.OTHER_SEEDS]
    assert "| masked (3.47) | **1.00, 1.00, 1.00** |" in cases.table(cases.load(tmp_path / "rows.csv"))


def test_the_page_of_the_cases_has_the_table_of_its_rows():
    assert cases.table(cases.load(ROOT / "docs/rows/cases.csv")) in (ROOT / "docs/cases.md").read_text()
