"""The report: the page shows all measurements, names missing parts, and runs no code from a run's files."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import new_layers
import pytest
import reference
import torch
from conftest import one_line_error

from fairseq_admin import cli, logs
from fairseq_admin.analysis import figure
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.method import provenance
from fairseq_admin.report import curves, runs, tables
from fairseq_admin.report.run import Sample

BETA = [[1.0], [0.6, 0.8], [0.5, 0.5, 0.7071]]
HOSTILE = "</script><script>document.title = 'hostile'</script><img src=x onerror=\"document.title = 'hostile'\">"


def log_lines(train: dict[int, float], valid: dict[int, float]) -> str:
    lines = ["num. shared model params: 1,234 (num. trained: 1,234)"]
    for update in sorted({**train, **valid}):
        number = str(update)
        if update in train:
            lines.append(json.dumps({"epoch": 1, "update": 0.5, "nll_loss": str(train[update]), "num_updates": number}))
        if update in valid:
            lines.append(json.dumps({"epoch": 1, "valid_nll_loss": str(valid[update]), "valid_num_updates": number}))
    return "\n".join(lines) + "\n"


def save(path: Path, arch: str, **options: Any) -> None:
    """Save a checkpoint of a tiny model. Admin's ω starts at 2 and is 2 to 3 by channel after training."""
    model = reference.build(arch, **reference.TINY, **options)
    state = model.state_dict()
    for key in state:
        if key.endswith("omega_init"):
            state[key] = torch.full_like(state[key], 2.0)
        elif key.endswith("omega_delta"):
            state[key] = torch.linspace(0, 1, len(state[key]))
    if provenance.KEY in state:
        state[provenance.KEY] = provenance.encode({"rule": "reference", "version": "0.1.0"})
    named = {key: value for key, value in reference.TINY.items() if "embed_dim" not in key}  # as under hydra
    args = Namespace(arch=arch, task="translation", criterion="any", lr=[0.5], seed=3, **named, **options)
    Checkpoint({"args": args, "model": state, "optimizer_history": [{"num_updates": 30}]}).write(path)


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A complete recipe run with Admin, whose text is hostile, and a bare --save-dir of stock Post-LN."""
    root = tmp_path_factory.mktemp("runs")
    recipe, bare = root / "admin-cpu-s1", root / "bare"
    write(recipe / "train.log", log_lines({10: 5.0, 20: 3.0, 30: float("nan")}, {20: 2.0, 30: 1.0}))
    save(recipe / "average.pt", "transformer_admin", admin_init="reference")
    score = {"method": "admin", "score": "27.55", "signature": "nrefs:1|tok:13a", "tokenised": "28.01"}
    write(recipe / "score.json", {**score, "params": 1234, "tokens": 4096, "commit": "abc123", "hardware": "1 x H100"})
    paper = {"bleu": "27.90", "source": "Liu et al. 2020"}
    sentence = {"source": "eins", "hypothesis": HOSTILE, "reference": "one"}
    about = {"command": "make demo", "versions": {"torch": "2.13.0"}, "paper": paper, "samples": [sentence]}
    write(recipe / "run.json", about)
    write(recipe / "settings.json", {"merges": "1000", "--lr": "0.5"})
    write(recipe / "fold.txt", "model.pt: differ by up to 8.6e-06 (bound 0.0001)\n")
    model = {"scheme": "admin", "title": "Admin", "encoder_layers": 2, "decoder_layers": 2, "width": 64, "updates": 30}
    stacks = {"encoder": {"beta": BETA, "error": 0.012}}
    shared = {"model": model, "tokens": 512, "seed": 7}
    write(recipe / "analysis/dependency.json", {"what": "dependency", **shared, "stacks": stacks})
    fits = {law: {"intercept": 0.1, "slope": 0.1, "r2": r2} for law, r2 in (("linear", 0.81), ("logarithmic", 0.9987))}
    series = {"one update": {"depths": [1, 2, 6], "change": [0.1, 0.2, 0.3], "fits": fits}}
    write(
        recipe / "analysis/output-change.json",
        {"what": "output-change", **shared, "stack": "encoder", "series": series},
    )
    write(bare / "train.log", log_lines({10: 6.0}, {20: 4.0}))
    save(bare / "checkpoint_last.pt", "transformer")
    return [recipe, bare]


class Page:
    """A parsed page: its text by section, and the rows of its tables."""

    def __init__(self, source: str) -> None:
        self.source = source
        parts = re.split(r'<section id="([a-z-]+)">', source)
        self.text = {name: html.unescape(re.sub("<[^>]*>", "", part)) for name, part in zip(parts[1::2], parts[2::2])}
        cells = (re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in source.split("<tr")[1:])
        self.rows = [[html.unescape(cell) for cell in row] for row in cells]


def report(folders: list[Path], path: Path) -> Page:
    assert cli.main(["report", *map(str, folders), "-o", str(path)]) == 0
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(folders, tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize(
    "row",
    [
        ["scheme", "Admin", "Post-LN"],
        ["rule of ω", "reference", "–"],
        ["layers", "2-2", "2-2"],
        ["parameters", "1234", "1234"],
        ["lowest validation perplexity", "2.00", "16.00"],
        ["update 30", "1.000", "–"],
        ["sacreBLEU", "27.55", "–"],
        ["the paper's BLEU of tokens", "27.90", "–"],
        ["versions", "torch 2.13.0", "–"],
        ["--arch", "transformer_admin", "transformer"],
    ],
    ids=str,
)
def test_tables_hold_both_runs(row: list[str], page: Page) -> None:
    """The tables have both runs. Unknown values are shown as a dash."""
    assert row in page.rows


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("scores", "sacreBLEU: nrefs:1|tok:13a"),
        ("omega", "bare: Post-LN has no ω."),
        ("dependency", "Dependency on each branch: Admin 2L-2L, width 64, 30 updates (512 tokens of text)"),
        ("dependency", "bare/checkpoint_last.pt --data DATA -o "),
        ("output-change", "a + b ln N, R² 0.999"),
        ("scores", "bare has no score.json, which a recipe writes."),
        ("fold", "differ by up to 8.6e-06 (bound 0.0001)"),
        ("fold", "bare: a model of fairseq's own, which needs no folding."),
    ],
    ids=str,
)
def test_every_part_is_shown_or_says_how_to_make_it(section: str, text: str, page: Page) -> None:
    assert text in page.text[section]


def test_every_run_can_be_switched_off_by_its_id(page: Page) -> None:
    """Each switch at the top hides one run's lines, by id."""
    assert [page.source.count(f'<g id="run-{number}">') for number in (0, 1)] == [2, 2]
    assert [page.source.count(f'id="show-{number}"') for number in (0, 1)] == [1, 1]
    assert page.source.count("<svg") == 4
    assert page.text["curves"].count("admin-cpu-s1") == 2  # in the legend and above the losses


def test_hostile_text_is_text(page: Page) -> None:
    """No text from a run opens a tag, and the page may run no script."""
    assert HOSTILE in page.text["translations"] and "<script" not in page.source and "<img" not in page.source
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page.source


def test_translations_of_one_sentence_stand_together(folders: list[Path], page: Page) -> None:
    """All translations of a sentence are shown together. The browser picks the reading direction from the letters."""
    one, other = runs.read_runs(folders)
    other.samples = [Sample("eins", "one", "one")]
    assert tables.translations([one, other]) == [("eins", [HOSTILE, "one"], "one")]
    assert page.source.count("<dd") == page.source.count('dir="auto"') == 3


@pytest.mark.parametrize("epochs", [5, 2000])
def test_runs_that_validate_at_other_updates_all_show_losses(epochs: int) -> None:
    """Two runs with other batches: every second of the updates is of one run. A long run shows some, and the last."""
    curves = [{step * epoch: 5.0 for epoch in range(1, epochs + 1)} for step in (1000, 1100)]
    rows = tables.losses([Namespace(log=logs.Log({}, curve, 1, 5500, 5.0, 1.0)) for curve in curves])
    shown = [sum(map(bool, cells)) for cells in zip(*(row.cells for row in rows))]
    assert min(shown) >= 5 and len(rows) <= 2 * tables.ROWS and rows[-1][0] == f"update {1100 * epochs}"


@pytest.mark.parametrize(("scheme", "layers", "title"), [("peri-ln", 2, "Peri-LN, new layers Pre-LN"),
                                                         ("post-ln", 0, "Post-LN")])  # fmt: skip
def test_a_pretrained_encoder_is_called_by_its_scheme(scheme: str, layers: int, title: str, tmp_path: Path) -> None:
    """The title names the encoder's scheme, whether the encoder has new layers or only a head.

    `make deeper` compares both kinds of model.
    """
    options = {"admin_scheme": scheme, "more_layers": layers, "more_scheme": "pre-ln" if layers else None}
    args = Namespace(arch="deeper_admin", task="any", criterion="any", **options)
    Checkpoint({"args": args, "model": new_layers.build(new_layers.Task(), **options).state_dict()}).write(
        tmp_path / "average.pt"
    )
    run = runs.read_run(tmp_path, "run")
    assert run.model["title"] == title and run.missing["fold"] == f"{title} cannot be folded."


def test_a_run_looks_alike_in_both_panels(folders: list[Path]) -> None:
    """Both panels show perplexity (2 to the bits) against updates. A loss that is not finite leaves a gap."""
    both = {run.name: run.log for run in runs.read_runs(folders) if run.log}
    looks = {name: figure.style(number) for number, name in enumerate(both)}
    train, valid = curves.draw(both, looks).axes
    drawn = [{line.get_label(): dict(zip(*line.get_data())) for line in axes.get_lines()} for axes in (train, valid)]
    assert drawn[0]["admin-cpu-s1"] == pytest.approx({10: 32.0, 20: 8.0, 30: math.nan}, nan_ok=True)
    assert drawn[1] == {"admin-cpu-s1": {20: 4.0, 30: 2.0}, "bare": {20: 16.0}} and train.get_yscale() == "log"
    colours = [[line.get_color() for line in axes.get_lines()] for axes in (train, valid)]
    assert colours[0] == colours[1] and len(set(colours[0])) == 2


def test_a_folder_without_a_log_is_shown_without_curves(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Without a log, the page shows the rest and stderr says so. Without log and checkpoint, there is no report."""
    bare = tmp_path / "a run"
    bare.mkdir()
    (bare / "checkpoint_last.pt").symlink_to(folders[0] / "average.pt")
    page = report([bare], tmp_path / "r.html")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{bare} has no log: found no train.log; expected the output of fairseq-train. Train with" in line
    assert "has no log" in page.text["curves"] and page.source.count("<svg") == 1
    commands = runs.read_run(bare, "bare").missing
    assert shlex.split(commands["fold"])[-1] == f"{bare}/fold.txt"
    assert shlex.split(commands["dependency"])[-1] == f"{bare}/analysis/dependency"
    (bare / "checkpoint_last.pt").unlink()
    message = "has neither a checkpoint (.pt) nor a log of fairseq-train (train.log)"
    assert message in one_line_error(capsys, "report", bare, "-o", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
