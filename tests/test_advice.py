"""fairseq-admin advise: are its settings the recipes', and does it say what was not measured?"""

from __future__ import annotations

import csv
import json
import re

import pytest
from conftest import ROOT

from fairseq_admin import advice, cli
from fairseq_admin.errors import AdminError
from recipes import recipe


def said(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert cli.main(["advise", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("experiment", advice.EXPERIMENTS, ids=lambda it: it.target)
def test_settings_are_the_recipes(experiment: advice.Experiment) -> None:
    """Does the recipe's plan train the depths, rate, warm-up and tokens of the table?"""
    settings = recipe.read(experiment.target, {"GPUS": "1", "MEMORY": "80"}).settings
    encoder, _, decoder = settings.LAYERS.partition("-")
    stacks = [int(encoder), int(decoder or encoder)]
    trained = [*stacks, settings.LR, settings.WARMUP, settings.TOKENS, settings.WIDTH]
    assert trained == [*experiment[2:], advice.WIDTH]


def test_outcomes_are_the_papers() -> None:
    """Has Admin the best score of every row of WMT'14, and failed just what is said to have?"""
    rows = list(csv.DictReader((ROOT / "recipes/papers.csv").open(encoding="utf-8")))
    depths = {"6l": (6, 6), "12l": (12, 12), "18l": (18, 18), "60l": (60, 12)}
    failed: dict[str, list] = {}
    for target in sorted({row["recipe"] for row in rows if re.fullmatch(r"wmt14-en..-\d+l", row["recipe"])}):
        scores = {row["method"]: row["bleu"] for row in rows if row["recipe"] == target}
        assert tuple(sorted(scores)) == tuple(sorted(advice.COMPARED))
        for method in [name for name, score in scores.items() if score == "failed"]:
            failed.setdefault(method, []).append(depths[target.rpartition("-")[2]])
        others = [float(score) for name, score in scores.items() if name != "admin" and score != "failed"]
        assert float(scores["admin"]) > max(others)
    assert {name: tuple(sorted(places)) for name, places in failed.items()} == advice.FAILED


def test_nearest_experiment() -> None:
    """Is the depth asked for met where there is an experiment of it, and a deep encoder's where that is nearer?"""
    for it in advice.EXPERIMENTS:
        assert advice.nearest(it.encoder_layers, it.decoder_layers) is it
    assert advice.nearest(48, 6).target == "wmt14-enfr-60l" and advice.nearest(0, 12) is None


def test_command(capsys: pytest.CaptureFixture) -> None:
    """Is the rate that of the experiment, halved at twice its width, and has every line its basis?"""
    told = json.loads(said(capsys, "--encoder-layers", "100", "--decoder-layers", "100", "--json"))
    assert told["learning rate"]["advice"].split()[3] == "0.001" and "wmt14-ende-100l" in told["batch"]["basis"]
    assert all(line["advice"] and line["basis"] for line in told.values())
    wide = json.loads(said(capsys, "--encoder-layers", "100", "--decoder-layers", "100", "--width", "1024", "--json"))
    assert wide["learning rate"]["advice"].split()[3] == "0.0005"
    assert "admin-torch, issue 1" in wide["learning rate"]["basis"]
    assert "admin-torch" not in told["learning rate"]["basis"]
    refused = json.loads(
        said(capsys, "--encoder-layers", "12", "--decoder-layers", "6", "--scheme", "post-ln", "--json")
    )
    assert refused["scheme"]["advice"] == "not post-ln: give --admin-scheme admin" and "rule" not in refused
    with pytest.raises(AdminError, match="at least 1 layer is needed"):
        advice.advise(0, 0)
    plain = said(capsys, "--encoder-layers", "0", "--decoder-layers", "24", "--scheme", "t-fixup")
    assert plain.count("not measured") == 3 and max(map(len, plain.splitlines())) <= 100
