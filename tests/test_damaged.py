"""Damaged checkpoints: every command names the file and the damage in one line, and writes nothing."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import needs, one_line_error
from reference import dictionary
from test_export import state_of

from fairseq_admin import cli
from fairseq_admin.method import provenance
from fairseq_admin.text.tokens import Text

WEIGHT = "decoder.layers.1.fc2.weight"


DAMAGES = {
    "a missing weight": (lambda state: state["model"].pop(WEIGHT), f'Missing key(s) in state_dict: "{WEIGHT}"'),
    "a weight of another shape": (
        lambda state: state["model"].update({WEIGHT: torch.ones(64, 3)}),
        f"size mismatch for {WEIGHT}: ",
    ),
    "a weight too many": (lambda state: state["model"].update({"decoder.adapter": torch.ones(3)}), "decoder.adapter"),
    "another number of layers": (
        lambda state: state["cfg"]["model"].update(decoder_layers=3),
        "the checkpoint's decoder has 2 layers and the model's",
    ),
    "an unknown activation": (
        lambda state: state["cfg"]["model"].update(activation_fn="sigmoidal"),
        "no model can be built from its options (--activation-fn sigmoidal not supported)",
    ),
    "a diverged run": (
        lambda state: state["model"][WEIGHT][0, 3:5].fill_(math.nan),
        f"{WEIGHT} holds NaN or infinity, 2 of 8192 values: the run had diverged",
    ),
}
"""For each damage: how to change a checkpoint's state, and the message."""


@pytest.fixture(scope="module")
def whole():
    some = dictionary(60)
    state = state_of(some, some)
    state["model"][provenance.KEY] = provenance.encode({"rule": "reference", "seed": 1})
    return some, state


@pytest.fixture
def damaged(tmp_path, whole):
    """damaged(name) -> a checkpoint with that damage, next to the files for translating; None: an intact one."""
    some, state = whole
    for language in ("de", "en"):
        some.save(str(tmp_path / f"dict.{language}.txt"))
    Text("de", "en").write(tmp_path / "text.json")
    (tmp_path / "codes").write_text("a b 1\n")

    def make(name):
        path = tmp_path / "model.pt"
        torch.save({**state, "model": dict(state["model"])}, path)
        shutil.copy(path, tmp_path / "whole.pt")
        if name:
            changed = torch.load(path, weights_only=True)
            DAMAGES[name][0](changed)
            torch.save(changed, path)
        return path

    return make


def arguments(verb, path):
    """A command line that does all of a verb's work on an intact checkpoint."""
    folder = path.parent
    if verb == "average":
        other = torch.load(folder / "whole.pt", weights_only=True)
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


CASES = [("fold", name) for name in DAMAGES]
CASES += [(verb, "a diverged run") for verb in ("export", "translate", "average")]


@pytest.mark.parametrize(("verb", "name"), CASES)
def test_damage_is_one_line(damaged, capsys, verb, name):
    if verb == "export":
        needs("ctranslate2")
    path = damaged(name)
    err = one_line_error(capsys, *arguments(verb, path))
    assert err.startswith(f"fairseq-admin: {path}") and DAMAGES[name][1] in err, err
    assert not (path.parent / "out").exists()


def test_another_dictionary_of_the_same_size_is_one_line(damaged, capsys):
    """fairseq refuses shared embeddings with different dictionaries. The error is one line long, not a traceback."""
    path = damaged(None)
    dictionary(60, 7).save(str(path.parent / "dict.en.txt"))
    err = one_line_error(capsys, *arguments("translate", path))
    assert err.startswith(f"fairseq-admin: {path}: no model can be built"), err


# Without read permission ----------------------------------------------------------------------------------------------

LINES = {
    "omega RUN/model.pt": "model.pt",
    "translate RUN/model.pt RUN/text --tokenised --device cpu -o OUT": "dict.de.txt",
    "average RUN/model.pt RUN/other.pt --data RUN -o OUT": "codes",
    "average RUN --last 1 -o OUT": "",
    "report RUN -o OUT": "",
}


@pytest.mark.parametrize("line", LINES)
def test_a_file_without_read_permission_is_not_called_damaged(damaged, capsys, line):
    path = damaged(None)
    for verb in ("average", "translate"):
        arguments(verb, path)
    folder = Path(tempfile.mkdtemp())  # every user may read this folder
    run = shutil.copytree(path.parent, folder / "run")
    shutil.copy(path, run / "checkpoint1.pt")
    for place, mode in ((folder, 0o755), (run, 0o755), (folder / "out", 0o777)):
        place.mkdir(exist_ok=True)
        place.chmod(mode)
    words = line.replace("RUN", str(run)).split(" ")
    assert cli.main([word.replace("OUT", f"{folder}/out/out") for word in words]) == 0, capsys.readouterr().err
    user, target = os.geteuid(), run / LINES[line]
    target.chmod((0o700 if target == run else 0o600) if user == 0 else 0)
    capsys.readouterr()
    if user == 0:
        os.seteuid(65534)  # root could read everything; imports are done, which another user could not do
    status = cli.main([word.replace("OUT", f"{folder}/out/again") for word in words])
    os.seteuid(user)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1, err
    assert err.startswith(f"fairseq-admin: {target}") and ": cannot be read (Permission denied)." in err, err
    assert not list((folder / "out").glob("again*"))
    run.chmod(0o755)
    shutil.rmtree(folder)
