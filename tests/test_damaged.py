"""Damaged checkpoints: every command says in one line what is wrong, with the file's name, and writes nothing."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from test_export import state_of, words

from fairseq_admin import cli
from fairseq_admin.method import provenance
from fairseq_admin.text.tokens import Text

CTRANSLATE2 = importlib.util.find_spec("ctranslate2")
OMEGA = "decoder.layers.1.final_layer_norm.omega_delta"
WEIGHT = "decoder.layers.1.fc2.weight"


def changed(key, value):
    return lambda weights: weights[key].view(-1)[3:5].fill_(value)


DAMAGES = {
    "no record": (lambda weights: weights.pop(provenance.KEY), f"has omega but no {provenance.KEY}"),
    "NaN in the record": (changed(provenance.KEY, math.nan), "holds no record of where omega came from"),
    "omega of another shape": (
        lambda weights: weights.update({OMEGA: torch.ones(3)}),
        f"{OMEGA} has shape (3,); (64,) was expected",
    ),
    "a missing weight": (lambda weights: weights.pop(WEIGHT), f"has no {WEIGHT}, which its architecture"),
    "a weight of another shape": (
        lambda weights: weights.update({WEIGHT: torch.ones(64, 3)}),
        f"{WEIGHT} has shape (64, 3); (64, 128) was expected",
    ),
    "NaN": (changed(WEIGHT, math.nan), f"{WEIGHT} holds NaN or infinity, 2 of 8192 values: the run had diverged"),
    "infinity": (changed(OMEGA, math.inf), f"{OMEGA} holds NaN or infinity, 2 of 64 values"),
}
DAMAGES["a weight that is a number"] = (lambda weights: weights.update({WEIGHT: 3}), DAMAGES["a missing weight"][1])
DAMAGES["omega that is a list"] = (lambda weights: weights.update({OMEGA: [1.0]}), f"{OMEGA} is not a tensor")
OF_OMEGA = ("no record", "NaN in the record", "omega of another shape", "omega that is a list")


@pytest.fixture(scope="module")
def whole():
    some = words(60)
    state = state_of(some, some)
    state["model"][provenance.KEY] = provenance.encode({"rule": "reference", "seed": 1})
    return some, state


@pytest.fixture
def damaged(tmp_path, whole):
    """damaged(name) -> a checkpoint with that damage, next to what translating needs; damaged(None): a whole one."""
    some, state = whole
    for language in ("de", "en"):
        some.save(str(tmp_path / f"dict.{language}.txt"))
    Text("de", "en").write(tmp_path / "text.json")
    (tmp_path / "codes").write_text("a b 1\n")

    def make(name):
        weights = {key: tensor.clone() for key, tensor in state["model"].items()}
        if name:
            DAMAGES[name][0](weights)
        torch.save({**state, "model": weights}, tmp_path / "model.pt")
        return tmp_path / "model.pt"

    return make


def arguments(verb, path):
    """A command line that does all of a verb's work on a whole checkpoint."""
    folder = path.parent
    if verb == "average":
        other = torch.load(path, weights_only=True)
        other["model"]["decoder.layers.0.fc1.bias"] += 1
        torch.save(other, folder / "other.pt")
        return ["average", path, folder / "other.pt", "-o", folder / "out"]
    if verb == "translate":
        (folder / "text").write_text("w1 w2\n")
        return ["translate", path, folder / "text", "--tokenised", "--device", "cpu", "-o", folder / "out"]
    return {
        "omega": ["omega", path],
        "fold": ["fold", path, "-o", folder / "out"],
        "export": ["export", path, "--to", "ctranslate2", "-o", folder / "out"],
    }[verb]


CASES = [(verb, name) for verb in ("fold", "export", "translate") for name in DAMAGES]
CASES += [(verb, name) for verb in ("omega", "average") for name in OF_OMEGA]
CASES += [("average", "NaN"), ("average", "infinity")]


@pytest.mark.parametrize(("verb", "name"), CASES)
def test_damage_is_one_line(damaged, capsys, verb, name):
    if verb == "export" and not CTRANSLATE2:
        pytest.skip("ctranslate2 is not installed")
    path = damaged(name)
    assert cli.main([str(argument) for argument in arguments(verb, path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert err.startswith(f"fairseq-admin: {path}") and DAMAGES[name][1] in err, err
    assert not (path.parent / "out").exists()


def test_another_dictionary_of_the_same_size_is_one_line(damaged, capsys):
    """fairseq refuses shared embeddings with different dictionaries; that is not shown as a traceback."""
    path = damaged(None)
    words(60, 7).save(str(path.parent / "dict.en.txt"))
    assert cli.main([str(argument) for argument in arguments("translate", path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"fairseq-admin: {path}: no model can be built"), err


MALFORMED = {
    "7 of its model": lambda state: state["model"].update({7: torch.ones(1)}),
    "its 'task_state'": lambda state: state.update(task_state=[1]),
    "its 'extra_state'": lambda state: state.update(extra_state="x"),
    "its 'cfg'": lambda state: state.update(cfg=[1]),
    "its 'optimizer_history'": lambda state: state.update(optimizer_history=[None]),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_fairseq_does_not_save_is_one_line(damaged, whole, capsys, what):
    path = damaged(None)
    state = {**whole[1], "model": dict(whole[1]["model"])}
    MALFORMED[what](state)
    torch.save(state, path)
    for verb in ("omega", "average", "fold", "translate"):
        assert cli.main([str(argument) for argument in arguments(verb, path)]) == 2, verb
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, err
        assert err.startswith(f"fairseq-admin: {path}: {what} is not what fairseq-train saves there"), err


OPTIONS = {
    "'args'": lambda state: state.update(args={"arch": "transformer_admin"}),
    "'args' ": lambda state: state.update(args=3),
    "'cfg.model'": lambda state: state.update(args=None, cfg={"model": "resnet50"}),
    "'cfg.task'": lambda state: state.update(args=None, cfg={"model": {}, "task": 7}),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_are_not_fairseqs_are_one_line(damaged, whole, capsys, what):
    path = damaged(None)
    state = {**whole[1]}
    OPTIONS[what](state)
    torch.save(state, path)
    given = [arguments(verb, path) for verb in ("fold", *(["export"] if CTRANSLATE2 else []), "translate")]
    given += [["analyze", "omega", path, "-o", path.parent / "out"], ["report", path.parent, "-o", path.parent / "out"]]
    path.rename(path.parent / "average.pt")  # what a report reads
    (path.parent / "model.pt").symlink_to("average.pt")
    for command in given:
        assert cli.main([str(argument) for argument in command]) == 2, command
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith(f"fairseq-admin: {path.parent}"), err
        assert f": its {what.strip()} is not what fairseq-train saves there" in err, err


@pytest.fixture
def unprivileged():
    """A function that runs another without the right to read all; root's would do otherwise."""

    def run(work):
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            return work()
        finally:
            os.seteuid(user)

    return run


@pytest.fixture
def open_folder(damaged):
    """A folder that every user can look into, with a whole model, another and what translates with them."""
    folder = Path(tempfile.mkdtemp())
    path = damaged(None)
    arguments("average", path), arguments("translate", path)
    shutil.copytree(path.parent, folder / "run")
    loss = '{"epoch": 1, "update": 0.5, "nll_loss": "5", "num_updates": "10"}'
    (folder / "run/train.log").write_text(f"num. shared model params: 7\n{loss}\n")
    for path in (folder, folder / "run"):
        path.chmod(0o755)
    for path in (folder / "run").iterdir():
        path.chmod(0o644)
    (folder / "out").mkdir()
    (folder / "out").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


TRANSLATE = "translate RUN/model.pt RUN/text --tokenised --device cpu -o OUT"
EXPORT = "export RUN/model.pt --to ctranslate2 -o OUT"
NEEDS = pytest.mark.skipif(not CTRANSLATE2, reason="ctranslate2 is not installed")
OF_A_MODEL = [
    "omega RUN/model.pt",
    "average RUN/model.pt RUN/other.pt -o OUT",
    "fold RUN/model.pt -o OUT",
    "analyze omega RUN/model.pt -o OUT",
    TRANSLATE,
]
UNREADABLE = [*((line, "model.pt") for line in OF_A_MODEL), (TRANSLATE, "dict.de.txt")]
UNREADABLE += [pytest.param(EXPORT, name, marks=NEEDS) for name in ("model.pt", "dict.en.txt", "codes")]


@pytest.mark.parametrize(("line", "name"), UNREADABLE)
def test_a_file_without_the_right_to_read_is_not_called_damaged(open_folder, unprivileged, capsys, line, name):
    line, path = line.replace("RUN", f"{open_folder}/run"), open_folder / "run" / name
    given = line.replace("OUT", f"{open_folder}/out/out").split(" ")
    assert cli.main(given) == 0, capsys.readouterr().err  # all is imported, which another user could not
    path.chmod(0o600 if os.geteuid() == 0 else 0)
    capsys.readouterr()
    given = line.replace("OUT", f"{open_folder}/out/again").split(" ")
    assert unprivileged(lambda: cli.main(given)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert err.startswith(f"fairseq-admin: {path}: cannot be read (Permission denied)."), err
    assert not list((open_folder / "out").glob("again*"))


@pytest.mark.parametrize("mode", [0o600, 0o744], ids=["nothing", "its names alone"])
@pytest.mark.parametrize(
    "line",
    [
        *OF_A_MODEL,
        pytest.param(EXPORT, marks=NEEDS),
        "average RUN --last 1 -o OUT",
        "analyze curves RUN --json -o OUT",
        "report RUN -o OUT",
        "average TOP/run/../model.pt TOP/other.pt --data RUN -o OUT",
    ],
)
def test_a_folder_without_rights_is_one_line(open_folder, unprivileged, capsys, line, mode):
    for name in ("model", "other"):
        shutil.copy(open_folder / f"run/{name}.pt", open_folder)
    shutil.copy(open_folder / "run/model.pt", open_folder / "run/checkpoint1.pt")
    line = line.replace("RUN", f"{open_folder}/run").replace("TOP", str(open_folder))
    given = line.replace("/run/..", "").replace("OUT", f"{open_folder}/out/out").split(" ")
    assert cli.main(given) == 0, capsys.readouterr().err
    given = line.replace("/run/..", "").replace("OUT", f"{open_folder}/out/again").split(" ")
    (open_folder / "run").chmod(mode if os.geteuid() == 0 else mode & 0o077)
    capsys.readouterr()
    assert unprivileged(lambda: cli.main(given)) == 2
    (open_folder / "run").chmod(0o755)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert err.startswith(f"fairseq-admin: {open_folder}/run") and ": cannot be read (Permission denied)." in err, err


def test_codes_without_the_right_to_read(open_folder, unprivileged, capsys):
    run = open_folder / "run"
    given = ["average", run / "model.pt", run / "other.pt", "--data", run, "-o", open_folder / "out/out"]
    assert cli.main([*map(str, given)]) == 0
    (run / "codes").chmod(0)
    assert unprivileged(lambda: cli.main([*map(str, given)])) == 2
    assert f"fairseq-admin: {run}/codes: cannot be read (Permission denied)." in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["omega", "fold", "average", "translate"])
def test_the_whole_one_is_taken(damaged, capsys, verb):
    path = damaged(None)
    assert cli.main([str(argument) for argument in arguments(verb, path)]) == 0, capsys.readouterr().err
