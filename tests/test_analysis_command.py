"""`fairseq-admin analyze`: its three files, their content, and its refusals."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reference
import torch
from conftest import one_line_error
from test_fold import state_of

from fairseq_admin import cli
from fairseq_admin.analysis import figure
from fairseq_admin.analysis.registry import MEASURES
from fairseq_admin.checkpoints import files
from fairseq_admin.checkpoints.checkpoint import Checkpoint

TASK = {"dataset_impl": None, "train_subset": "train", "required_seq_len_multiple": 1}
FRESH = ["--arch", "transformer_admin_tiny", "--encoder-layers", "2", "--decoder-layers", "1", "--random-tokens"]
QUICK = ["--tokens", "64", "--depths", "1,2,3", "--repeats", "1", "--updates", "2"]


def checkpoint(
    path: Path, arch: str = "transformer_admin_tiny", updates: int = 7, words: int = 42, seed: int = 1, **options
) -> Path:
    """A checkpoint of a run whose ω is profiled. The corpus' dictionary has about 46 words."""
    model = reference.build(arch, words=words, seed=seed, **options)
    if arch.startswith("transformer_admin"):
        model(*reference.batch(words=words))
    torch.manual_seed(updates)
    for p in model.parameters():
        if p.dim() > 1:
            p.data += 0.01 * torch.randn_like(p)
    state = state_of(model, arch, **options)
    state["cfg"]["task"] = {"_name": "translation", "source_lang": "a", "target_lang": "b", "data": "gone", **TASK}
    state["model"] = dict(state["model"])  # drop the fingerprints: the dictionary is not that of the corpus
    torch.save({**state, "optimizer_history": [{"num_updates": updates}]}, path)
    return path


@pytest.fixture(scope="module")
def words(corpus: Path) -> int:
    return len((corpus / "dict.a.txt").read_text().splitlines())


def analyzed(*arguments: object) -> dict:
    """Run the command. Returns the content of its JSON file."""
    assert cli.main(["analyze", *map(str, arguments)]) == 0
    (path,) = (Path(after) for option, after in zip(arguments, arguments[1:]) if option == "-o")
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def test_sentences_that_the_model_cannot_read_are_left_out(corpus: Path, words: int, tmp_path: Path) -> None:
    """Are sentences skipped if they are longer than the model's learned positions?"""
    learned = {f"{side}_learned_pos": True for side in ("encoder", "decoder")}
    path = checkpoint(tmp_path / "a.pt", words=words, max_source_positions=12, max_target_positions=12, **learned)
    state = files.read(path)
    state["cfg"]["task"] |= {"max_source_positions": 12, "max_target_positions": 12}
    torch.save(state, tmp_path / "b.pt")
    assert (
        analyzed("gradients", tmp_path / "b.pt", "--data", corpus, "--tokens", "100", "-o", tmp_path / "out")["tokens"]
        >= 100
    )


@pytest.mark.parametrize("what", MEASURES)
def test_a_fresh_model_has_facts_and_two_figures(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Does it write a JSON file with the facts, a PNG at double resolution, and an SVG whose labels are text?"""
    assert cli.main(["analyze", what, *FRESH, *QUICK, "--seed", "3", "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / f"out.{kind}") for kind in ("json", "png", "svg")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png", "out.svg"]
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["what"], result["seed"], result["data"], result["tokens"]) == (what, 3, "random tokens", 64)
    model = result["model"]
    assert (model["scheme"], model["encoder_layers"], model["decoder_layers"], model["updates"]) == ("admin", 2, 1, 0)
    assert set(result["versions"]) == {"fairseq_admin", "fairseq", "torch", "python"}
    png = (tmp_path / "out.png").read_bytes()
    assert int.from_bytes(png[16:20], "big") in (int(figure.WIDTH * figure.DPI), int(figure.WIDTH * 0.7 * figure.DPI))
    text = "".join(ElementTree.parse(tmp_path / "out.svg").getroot().itertext())
    depth = "" if what == "output-change" else " 2L-1L"  # this figure has several depths
    assert f"Admin{depth}, width 64, at initialisation" in text


@pytest.mark.parametrize(
    "scheme, what",
    [
        *itertools.product(["fixup", "rezero"], ["dependency", "output-change", "gradients", "updates"]),
        *itertools.product(["residual"], ["dependency", "gradients", "updates"]),
    ],
)
def test_branches_of_zero_give_no_nan(scheme: str, what: str, tmp_path: Path) -> None:
    """If branches are 0 at first, so that nothing moves and gradients are 0, are there still figures, without NaN?"""
    options = ["--admin-scheme", scheme, *FRESH, *QUICK, "-o", str(tmp_path / "out")]
    assert cli.main(["analyze", what, *options]) == 0
    text = (tmp_path / "out.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert "nan" not in "".join(ElementTree.parse(tmp_path / "out.svg").getroot().itertext())


ONE_STACK = {"transformer_lm_admin_tiny": "decoder", "masked_lm_admin_tiny": "encoder"}
ONE_STACK["transformer_lm_admin_tiny --adaptive-softmax-cutoff 9,99"] = "decoder"


@pytest.mark.parametrize("what", ["dependency", "gradients"])
@pytest.mark.parametrize("arch", ONE_STACK)
def test_a_missing_stack_is_left_out(what: str, arch: str, tmp_path: Path) -> None:
    """Does it measure models of one stack, with 2 layers of 2 sub-layers, and leave out the missing stack?"""
    options = ["--arch", *arch.split(), "--random-tokens", *QUICK, "--json", "-o", tmp_path / "out"]
    sublayers = {name: len(result["sublayers"]) for name, result in analyzed(what, *options)["stacks"].items()}
    assert sublayers == {ONE_STACK[arch]: 4 + (what == "dependency")}


@pytest.mark.parametrize("what, arch, title", [("dependency", "transformer", "Pre-LN"),
                                               ("output-change", "transformer", "Pre-LN"),
                                               ("dependency", "transformer_admin_tiny", "Admin, folded"),
                                               ("gradients", "transformer_admin_tiny", "Admin")])  # fmt: skip
def test_checkpoints_of_every_kind_are_measured_on_data(
    what: str, arch: str, title: str, corpus: Path, words: int, tmp_path: Path
) -> None:
    """Does it accept our checkpoints and stock ones, with real sentences?"""
    pre_ln = {**reference.TINY, "encoder_normalize_before": True, "decoder_normalize_before": True}
    path = checkpoint(tmp_path / "c.pt", arch, words=words, **(pre_ln if title == "Pre-LN" else {}))
    if title == "Admin, folded":
        assert cli.main(["fold", str(path), "-o", str(tmp_path / "folded.pt")]) == 0
        path = tmp_path / "folded.pt"
    result = analyzed(what, path, "--data", corpus, "--tokens", 100, "--json", "-o", tmp_path / "out.json")
    assert result["model"]["title"] == title and result["model"]["updates"] == 7
    assert (result["data"], result["split"]) == (str(corpus), "valid") and 100 <= result["tokens"] < 612
    assert not (tmp_path / "out.png").exists()


def test_numbers_depend_on_the_seed_alone(tmp_path: Path) -> None:
    """Do the numbers depend on the seed alone?"""
    options = ["dependency", *FRESH, "--tokens", "64", "--json", "-o", tmp_path / "out", "--seed"]
    first, again, other = (analyzed(*options, seed) for seed in (1, 1, 2))
    assert first == again and first["stacks"] != other["stacks"]


def test_every_pair_of_checkpoints_is_an_interval(words: int, corpus: Path, tmp_path: Path) -> None:
    """Does each pair of successive checkpoints give an interval, with its change and the gradient at its start?"""
    paths = [checkpoint(tmp_path / f"checkpoint{n}.pt", words=words, updates=n) for n in (1, 2, 3)]
    options = ["--data", corpus, "--tokens", 64, "--json", "-o", tmp_path / "out"]
    intervals = analyzed("updates", *paths, *options)["intervals"]
    ends = [(interval["from"], interval["to"]) for interval in intervals]
    assert ends == [(str(a), str(b)) for a, b in zip(paths, paths[1:])]
    one, other = (files.read(path)["model"]["encoder.layers.1.fc1.weight"] for path in paths[1:])
    assert intervals[1]["update"]["encoder"]["fc1"][1] == pytest.approx((other - one).norm().item(), rel=1e-6)
    (whole,) = analyzed("updates", paths[0], paths[2], *options)["intervals"]
    assert whole["gradient"] == intervals[0]["gradient"] != intervals[1]["gradient"]


def test_omega_of_a_checkpoint_needs_no_data(tmp_path: Path) -> None:
    """Are three kinds of ω right: profiled, trained, and computed from the depth alone?

    For four sub-layers, the depth alone gives (5 / ln 5 - 1)^0.5 = 1.4514, and 2.
    """
    path = checkpoint(tmp_path / "c.pt")
    state = files.read(path)
    state["model"]["encoder.layers.1.final_layer_norm.omega_delta"][:32] += 0.5
    Checkpoint(state).write(path)
    result = analyzed("omega", path, "--json", "-o", tmp_path / "out")
    encoder = result["stacks"]["encoder"]
    assert encoder["sublayers"][-1] == "layers.1.ffn" and "tokens" not in result
    last = encoder["profiled"][-1]
    assert encoder["trained"][-1] == pytest.approx({"min": last, "mean": last + 0.25, "max": last + 0.5})
    assert encoder["closed form"] == pytest.approx({"log": 1.4514, "constant": 2.0, "linear": 1.0}, abs=1e-4)


def test_json_needs_no_matplotlib(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """A missing matplotlib is named, and --json works without it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = one_line_error(capsys, "analyze", "dependency", *FRESH, "-o", tmp_path / "out")
    assert "Run pip install matplotlib" in message and "--json" in message and not list(tmp_path.iterdir())
    assert cli.main(["analyze", "dependency", *FRESH, "--tokens", "64", "--json", "-o", str(tmp_path / "out")]) == 0
