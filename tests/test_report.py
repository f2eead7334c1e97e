"""The report: does the page show what was measured, say what is lacking, and run nothing that it was not given?"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import deeper
import pytest
import reference
import torch
from test_moving_average import Task

from fairseq_admin import cli
from fairseq_admin.analysis import curves
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.method import provenance
from fairseq_admin.report import charts, runs, samples, tables

BETA = [[1.0], [0.6, 0.8], [0.5, 0.5, 0.7071]]
HOSTILE = "</script><script>document.title = 'hostile'</script><img src=x onerror=\"document.title = 'hostile'\">"


def log_lines(train: dict[int, float], valid: dict[int, float]) -> str:
    lines = ["num. shared model params: 1,234 (num. trained: 1,234)"]
    for it in sorted({**train, **valid}):
        if it in train:
            lines.append(json.dumps({"epoch": 1, "update": 0.5, "nll_loss": str(train[it]), "num_updates": str(it)}))
        if it in valid:
            lines.append(json.dumps({"epoch": 1, "valid_nll_loss": str(valid[it]), "valid_num_updates": str(it)}))
    return "\n".join(lines) + "\n"


def save(path: Path, arch: str, **options: Any) -> None:
    """A checkpoint of a tiny model; of Admin with ω = 2 at first, and from 2 to 3 by channel after training."""
    model = reference.build(arch, **reference.TINY, **options)
    state = model.state_dict()
    for key in state:
        if key.endswith("omega_init"):
            state[key] = torch.full_like(state[key], 2.0)
        elif key.endswith("omega_delta"):
            state[key] = torch.linspace(0, 1, len(state[key]))
    if provenance.KEY in state:
        state[provenance.KEY] = provenance.encode({"rule": "reference", "version": "0.1.0"})
    args = Namespace(arch=arch, task="translation", criterion="any", lr=[0.5], seed=3, **reference.TINY, **options)
    Checkpoint({"args": args, "model": state, "optimizer_history": [{"num_updates": 30}]}).write(path)


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A recipe's run with Admin, all parts there, hostile text among them; and a bare --save-dir of stock Post-LN."""
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
    model = {"scheme": "admin", "title": "Admin", "updates": 30}
    stacks = {"encoder": {"beta": BETA, "error": 0.012}}
    shared = {"model": model, "tokens": 512, "seed": 7}
    write(recipe / "analysis/dependency.json", {"what": "dependency", **shared, "stacks": stacks})
    fits = {"linear": {"r2": 0.81}, "logarithmic": {"r2": 0.9987}}
    series = {"one update": {"depths": [1, 2, 6], "change": [0.1, 0.2, 0.3], "fits": fits}}
    write(recipe / "analysis/output-change.json", {"what": "output-change", **shared, "series": series})
    write(bare / "train.log", log_lines({10: 6.0}, {20: 4.0}))
    save(bare / "checkpoint_last.pt", "transformer")
    write(bare / "generate-test.txt", "S-0\teins\nT-0\to@@ ne\nH-0\t-0.5\to@@ ne\nD-0\t-0.5\to@@ ne\n")
    return [recipe, bare]


class Page(HTMLParser):
    """A page taken apart: its tags, its text by the section that it is in, its specifications."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.scripts: list[str] = []
        self.cells: list[list[str]] = []
        self._section, self._in = "", ""
        self.feed(text)
        self.specs = json.loads(next(it for it in self.scripts if it.startswith("{")))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "section":
            self._section = str(dict(attrs)["id"])
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in in ("td", "th"):
            self.cells[-1][-1] += data
        elif self._in != "style":
            self.text[self._section] = self.text.get(self._section, "") + data

    def rows(self, title: str) -> list[list[str]]:
        return [row[1:] for row in self.cells if row[0] == title]

    def data(self, section_title: str) -> list[dict[str, Any]]:
        """The rows of the chart whose label begins so."""
        labels = {attrs["id"]: attrs["aria-label"] for tag, attrs in self.tags if attrs.get("class") == "chart"}
        (found,) = (name for name, label in labels.items() if str(label).startswith(section_title))
        return self.specs[found]["data"]["values"]


@pytest.fixture(scope="module")
def written(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert cli.main(["report", *map(str, folders), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text(encoding="utf-8"))


def test_curves_are_perplexities(page: Page) -> None:
    """2 to the bits, a row a point; what is not a number is a gap."""
    train = [(row["run"], row["update"], row["perplexity"]) for row in page.data("Training")]
    assert train == [
        ("admin-cpu-s1", 10, 32.0),
        ("admin-cpu-s1", 20, 8.0),
        ("admin-cpu-s1", 30, None),
        ("bare", 10, 64),
    ]
    valid = [(row["run"], row["update"], row["perplexity"]) for row in page.data("Validation")]
    assert valid == [("admin-cpu-s1", 20, 4.0), ("admin-cpu-s1", 30, 2.0), ("bare", 20, 16.0)]


def test_omega_by_sub_layer(page: Page) -> None:
    """Two sub-layers a layer of the encoder, three of the decoder; the first ω is not trained."""
    encoder, decoder = page.data("Encoder"), page.data("Decoder")
    assert [(row["sub-layer"], row["layer"], row["kind"]) for row in encoder] == [
        *((1, 1, "self-attention"), (2, 1, "feed-forward"), (3, 2, "self-attention"), (4, 2, "feed-forward"))
    ]
    assert len(decoder) == 6 and decoder[4]["kind"] == "encoder attention"
    assert [(row["min"], row["ω"], row["max"], row["profiled"]) for row in encoder[:2]] == [
        (2, 2, 2, 2),
        (2, 2.5, 3, 2),
    ]
    assert "bare: Post-LN has no ω." in page.text["omega"]


def test_dependency_and_change(page: Page) -> None:
    shares = {(row["i"], row["j"]): row["share"] for row in page.data("Admin, 30 updates: encoder")}
    assert shares == pytest.approx(
        {(0, 0): 1, (1, 0): 0.36, (1, 1): 0.64, (2, 0): 0.25, (2, 1): 0.25, (2, 2): 0.5}, 1e-3
    )
    assert "512 tokens, seed 7. Largest |Σβ² − 1| of a row: 0.012." in page.text["dependency"]
    assert [(row["layers"], row["change"]) for row in page.data("One update")] == [(1, 0.1), (2, 0.2), (6, 0.3)]
    assert "logarithmic 0.9987" in page.text["change"]


def test_tables_hold_both_runs(page: Page) -> None:
    """A dash for what is not known; the two runs' options side by side, marked where they differ."""
    assert page.rows("scheme") == [["Admin", "Post-LN"]] and page.rows("layers") == [["2-2", "2-2"]]
    assert page.rows("lowest validation perplexity") == [["2.00", "16.00"]] and page.rows("at update") == [["30", "20"]]
    assert page.rows("sacreBLEU") == [["27.55", "–"]] * 2 and page.rows("BLEU of tokens") == [["28.01", "–"]]
    assert page.rows("the paper's BLEU of tokens") == [["27.90", "–"]] and page.rows("parameters") == [
        ["1,234", "1,234"]
    ]
    assert page.rows("versions") == [["torch 2.13.0", "–"]] and page.rows("command") == [["make demo", "–"]]
    assert page.rows("--arch") == [["transformer_admin", "transformer"]] and page.rows("--lr") == [["0.5", "0.5"]]
    assert page.rows("merges") == [["1000", "–"]]
    assert "nrefs:1|tok:13a" in page.text["scores"] and "8.6e-06 (bound 0.0001)" in page.text["fold"]


def test_what_is_lacking_is_said_with_how_to_make_it(page: Page) -> None:
    for section, said in {
        "dependency": "bare/checkpoint_last.pt --data DATA -o ",
        "change": "fairseq-admin analyze output-change ",
        "scores": "bare has no score.json, which a recipe writes.",
        "fold": "bare: a model of fairseq's own, which needs no folding.",
    }.items():
        (line,) = (line for line in page.text[section].splitlines() if line.startswith("bare: "))
        assert said in line, section


def test_hostile_text_is_text(page: Page) -> None:
    """Nothing that a run holds opens a tag; the page's own scripts are the only ones that their checksums let run."""
    assert HOSTILE in page.text["translations"]
    assert [tag for tag, _ in page.tags].count("script") == 3 and "img" not in [tag for tag, _ in page.tags]
    (policy,) = (attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and policy.count("'sha256-") == 2
    assert "unsafe" not in policy.partition("script-src")[2]


def test_translations_of_one_sentence_stand_together(folders: list[Path]) -> None:
    (sample,) = tables.translations(runs.read_all(folders))
    assert sample == {"source": "eins", "reference": "one", "hypotheses": [HOSTILE, "one"]}


def test_translations_run_either_way(page: Page) -> None:
    """Does the browser tell by a sentence's letters whether it is read from right to left?"""
    assert [attrs.get("dir") for tag, attrs in page.tags if tag == "dd"] == ["auto"] * 4


def test_an_architecture_of_another_kind_is_called_by_its_name(tmp_path: Path) -> None:
    """Not by a scheme of Transformers; what has no layers has none of them counted."""
    weights = {"encoder.lstm.weight_ih_l0": torch.zeros(2, 2), "decoder.embed_tokens.weight": torch.zeros(3, 2)}
    state = {"args": Namespace(arch="lstm", task="translation", criterion="any"), "model": weights}
    (tmp_path / "run").mkdir()
    Checkpoint(state).write(tmp_path / "run/average.pt")
    run = runs.read(tmp_path / "run", "run")
    assert (run.scheme, run.layers) == ("lstm", {})
    assert run.lacking[runs.OMEGA] == "lstm has no ω." and run.lacking[runs.FOLD] == "lstm cannot be folded."


@pytest.mark.parametrize(("scheme", "title"), [("peri-ln", "Peri-LN"), ("post-ln", "Post-LN")])
@pytest.mark.parametrize("layers", [0, 2])
def test_a_pretrained_encoder_is_called_by_its_scheme(layers: int, scheme: str, title: str, tmp_path: Path) -> None:
    """With new layers on top, and with a head alone, as `make deeper` compares them."""
    options = {"admin_scheme": scheme, "more_layers": layers, "more_scheme": "pre-ln" if layers else None}
    args = Namespace(arch="deeper_admin", task="any", criterion="any", **options)
    (tmp_path / "run").mkdir()
    weights = deeper.build(Task(), **options).state_dict()
    Checkpoint({"args": args, "model": weights}).write(tmp_path / "run/average.pt")
    run = runs.read(tmp_path / "run", "run")
    assert run.scheme == title + ", new layers Pre-LN" * (layers > 0)
    assert run.lacking[runs.FOLD] == f"{run.scheme} cannot be folded."


def test_samples_are_from_all_over_the_test_set(tmp_path: Path) -> None:
    """fairseq gives the longest first; of several hypotheses the first is the best."""
    lines = [f"S-{n}\ts{n}\nH-{n}\t-0.1\th{n}\nH-{n}\t-0.2\tworse" for n in reversed(range(10))]
    write(tmp_path / "generate.txt", "\n".join(lines))
    assert samples.read(tmp_path, []) == [samples.Sample(f"s{n}", f"h{n}", "") for n in (0, 2, 4, 6, 8)]


def test_names_tell_runs_apart() -> None:
    assert curves.names([Path("/a/x/s1"), Path("/a/y/s1")]) == ["x/s1", "y/s1"]
    assert curves.names([Path("/a/x/s1"), Path("/a/y/s2")]) == ["s1", "s2"]


def test_long_curves_and_deep_stacks_are_averaged() -> None:
    curve = {update: float(update) for update in range(1, 2 * charts.POINTS + 1)}
    thinned = list(charts.thinned(curve))
    assert len(thinned) == charts.POINTS and thinned[0] == (2, 1.5) and thinned[-1] == (800, 799.5)
    beta = [[float(i == j) for j in range(i + 1)] for i in range(2 * charts.CELLS)]
    rows = charts.dependency(beta, "encoder")["data"]["values"]
    assert len(rows) == charts.CELLS * (charts.CELLS + 1) / 2
    # A block on the diagonal has three cells, two of them 1.
    assert {row["share"] for row in rows if row["i"] == row["j"]} == {0.66667}
    assert {row["share"] for row in rows if row["i"] != row["j"]} == {0.0}


def test_ticks_of_a_logarithmic_axis() -> None:
    assert charts.ticks([1.5, 60.0]) == [2, 5, 10, 20, 50] and charts.ticks([1.5, 2e5]) == [10, 100, 1e3, 1e4, 1e5]


def test_curves_as_numbers_and_a_figure(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """analyze curves: 2 to the bits, in the file and in what is drawn; a run without a log is refused."""
    out = str(tmp_path / "curves")
    assert cli.main(["analyze", "curves", *map(str, folders), "-o", out]) == 0
    found = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))
    assert {path.name for path in tmp_path.iterdir()} == {"curves.json", "curves.png", "curves.svg"}
    assert found["runs"]["admin-cpu-s1"]["train"] == {"updates": [10, 20, 30], "perplexity": [32.0, 8.0, None]}
    assert found["runs"]["bare"]["valid"] == {"updates": [20], "perplexity": [16.0]}
    train, valid = curves.draw(found).axes
    drawn = {line.get_label(): dict(zip(*line.get_data())) for line in valid.get_lines()}
    assert drawn == {"admin-cpu-s1": {20: 4.0, 30: 2.0}, "bare": {20: 16.0}} and train.get_yscale() == "log"
    colours = [[line.get_color() for line in axes.get_lines()] for axes in (train, valid)]
    assert colours[0] == colours[1] and len(set(colours[0])) == 2
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    assert cli.main(["analyze", "curves", str(tmp_path / "empty"), "-o", out]) == 2
    assert "empty has no log: found no train.log; expected" in capsys.readouterr().err


def test_names_that_a_figure_could_take_for_something_else(tmp_path: Path) -> None:
    """Mathematics between $, labels that begin with _, which a legend leaves out, and bytes that are no UTF-8."""
    names = ["a$b_{$", "_base", os.fsdecode(b"caf\xe9")]
    for name in names:
        write(tmp_path / name / "train.log", log_lines({10: 5.0}, {10: 4.0}))
    given = [str(tmp_path / name) for name in names]
    assert cli.main(["analyze", "curves", *given, "-o", str(tmp_path / "curves")]) == 0
    found = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))
    assert list(found["runs"]) == names
    drawn = "".join(ElementTree.parse(tmp_path / "curves.svg").getroot().itertext())
    assert all(name in drawn for name in ("a$b_{$", "_base", r"caf\udce9"))
    assert cli.main(["report", *given, "-o", str(tmp_path / "r.html")]) == 0
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert {row["run"] for row in page.data("Training")} == set(names)


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert cli.main(["report", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_without_a_log(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With a checkpoint the page is made of the rest, and a line says so; without one there is nothing to report on."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "checkpoint_last.pt").symlink_to(folders[0] / "average.pt")
    assert cli.main(["report", str(bare), "-o", str(tmp_path / "r.html")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{bare} has no log: found no train.log; expected the output of fairseq-train. Train with" in line
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "has no log" in page.text["curves"] and len(page.specs) == 2
    (bare / "checkpoint_last.pt").unlink()
    said = "has neither a checkpoint (.pt) nor a log of fairseq-train (train.log)"
    assert said in refused(capsys, bare, "-o", tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda run: write(run / "train.log", "no losses\n"), "train.log holds no losses"),
        (
            lambda run: (run / "train.log").rename(run / "a.log") and write(run / "b.log", ""),
            "several logs (a.log, b.log)",
        ),
        (lambda run: write(run / "score.json", "{"), "score.json: cannot be read"),
        (lambda run: write(run / "score.json", "[]"), "found a list, expected a JSON object"),
        (lambda run: write(run / "analysis/x.json", {"what": "dependency"}), "holds dependency without stacks"),
        (lambda run: write(run / "average.pt", "text"), "not a torch file"),
    ],
    ids=["log", "logs", "json", "list", "analysis", "checkpoint"],
)
def test_bad_input_is_one_line(break_it: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    write(run / "train.log", log_lines({10: 5.0}, {10: 5.0}))
    break_it(run)
    assert said in refused(capsys, run, "-o", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def analysis(what: str, **content: Any) -> tuple[str, dict[str, Any], str]:
    said = f"/analysis holds {what} that cannot be shown ("
    return f"analysis/{what}.json", {"what": what, **content}, said


EDITED = [
    ("run.json", {"samples": 3}, "run.json: found a int as 'samples', expected a list. "),
    ("run.json", {"samples": [3]}, "run.json: found other samples than objects with a source. "),
    ("run.json", {"versions": ["1"]}, "run.json: found a list as 'versions', expected a dict. "),
    ("run.json", {"paper": "Liu"}, "run.json: found a str as 'paper', expected a dict. "),
    ("run.json", {"paper": {"source": ["Liu"]}}, "run.json: found a list as 'source', expected a text or a number. "),
    ("score.json", {"score": "27.1", "params": "many"}, "score.json: found a str as 'params', expected a int. "),
    ("score.json", {"score": {}}, "score.json: found a dict as 'score', expected a text or a number. "),
    ("score.json", {"signature": ["x"]}, "score.json: found a list as 'signature', expected a text or a number. "),
    analysis("dependency", stacks={"encoder": 3}),
    analysis("dependency", stacks={"encoder": {}}),
    analysis("dependency", stacks={"encoder": {"beta": [["x"]]}}),
    analysis("dependency", stacks={"encoder": {"beta": BETA}}, model="x"),
    analysis("output-change", series={"noise": 3}),
    analysis("output-change", series={"noise": {"depths": 3, "change": 4}}),
    analysis("output-change", series={"noise": {"depths": [1], "change": ["x"]}}),
    analysis("output-change", series={"noise": {"fits": {"linear": {"r2": "x"}}}}),
]


@pytest.mark.parametrize(("name", "content", "said"), EDITED, ids=str)
def test_what_somebody_has_edited_is_one_line(
    name: str, content: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    write(run / "train.log", log_lines({10: 5.0}, {10: 5.0}))
    write(run / name, content)
    message = refused(capsys, run, "-o", tmp_path / "report.html")
    assert message.startswith(f"fairseq-admin: {run}/") and said in message and "Make it again" in message


def test_a_paper_without_a_source_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "run/train.log", log_lines({10: 5.0}, {10: 5.0}))
    write(tmp_path / "run/run.json", {"paper": {"bleu": 27}})
    write(tmp_path / "run/score.json", {"score": "27.1"})
    assert cli.main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.rows("the paper's BLEU of tokens") == [["27"]] and "Paper:" not in page.text["scores"]


def test_arguments_that_cannot_be(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    output = ["-o", tmp_path / "report.html"]
    assert "no such folder; a run's folder was expected" in refused(capsys, tmp_path / "nowhere", *output)
    assert "train.log: is a file" in refused(capsys, folders[0] / "train.log", *output)
    assert "are one folder; each run counts once" in refused(
        capsys, folders[0], folders[0] / "." / "analysis/..", *output
    )
    assert "no folder" in refused(capsys, folders[1], "-o", tmp_path / "nowhere/report.html")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "vl_convert, which the report is made with, is not installed" in refused(capsys, folders[1], *output)
    assert list(tmp_path.iterdir()) == []
