"""fairseq-admin advise: are its numbers the formulas' and the recipes', and is what was not measured said?"""

from __future__ import annotations

import csv
import json
import math
import re

import pytest
from conftest import ROOT

from fairseq_admin import advice, cli
from fairseq_admin.errors import AdminError
from fairseq_admin.pytorch.omega import omega_from_variances
from recipes import recipe


def said(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert cli.main(["advise", *arguments]) == 0
    return capsys.readouterr().out


def test_sums_against_omega_from_variances() -> None:
    """Is Admin's Σ β² that of ω by the rule `paper`, and Post-LN's that of ω = 1?"""
    import torch

    branches = torch.tensor(advice.variances(20, 30)["decoder"], dtype=torch.float64)
    omega = omega_from_variances(branches, torch.ones((), dtype=torch.float64))
    for scheme, scales in (("admin", omega), ("post-ln", torch.ones_like(omega))):
        expected = (branches / (scales**2 + branches)).sum().item()
        assert advice.output_change(scheme, "decoder", branches.tolist()) == pytest.approx(expected)


def test_the_profile_gives_the_published_omega() -> None:
    """Do the branch variances add up to ω at the end of the stacks of the published profile, 8.84 and 11.25?"""
    encoder, decoder = (advice.variances(100, 100)[side] for side in ("encoder", "decoder"))
    found = [math.sqrt(1 + sum(them[:-1])) for them in (encoder, decoder)]
    assert found == pytest.approx([8.84, 11.25], rel=0.01)  # the variances are means over the layers


def test_growth_with_depth() -> None:
    """From 12 to 96 layers, is Post-LN's sum 8 times as large, and Admin's and Pre-LN's larger by about ln 8?"""
    shallow, deep = advice.variances(12, 0)["encoder"], advice.variances(96, 0)["encoder"]
    change = {
        name: [advice.output_change(name, "encoder", them) for them in (shallow, deep)]
        for name in ("post-ln", "admin", "pre-ln")
    }
    assert change["post-ln"][1] == pytest.approx(8 * change["post-ln"][0])
    for name in ("admin", "pre-ln"):
        assert change[name][1] - change[name][0] == pytest.approx(math.log(8), rel=0.1)
    assert advice.output_change("post-ln-pre-ln", "decoder", deep) == change["pre-ln"][1]
    assert advice.output_change("post-ln-pre-ln", "encoder", deep) == change["post-ln"][1]
    assert advice.output_change("deepnorm", "encoder", deep) is None


@pytest.mark.parametrize("experiment", advice.EXPERIMENTS, ids=lambda it: it.target)
def test_settings_are_the_recipes(experiment: advice.Experiment) -> None:
    """Does the recipe's plan train the depths, rate, warm-up and tokens of the table?"""
    settings = recipe.read(experiment.target, {"GPUS": "1", "MEMORY": "80"}).settings
    stacks = [settings.ENCODER_LAYERS or settings.LAYERS, settings.DECODER_LAYERS or settings.LAYERS]
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
    assert plain.count("not measured") == 4 and max(map(len, plain.splitlines())) <= 100
