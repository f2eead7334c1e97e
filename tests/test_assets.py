"""A model's languages and units, if fairseq-train's options lack them: from options, text.json or file names."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from reference import dictionary
from test_export import state_of

from fairseq_admin import cli
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.text.assets import Assets, binarised, folders
from fairseq_admin.text.tokens import Text


@pytest.mark.parametrize(
    ("names", "pair"),
    [
        (["test.de-en.de.idx"], ("de", "en")),
        (["valid1.en-zh-CN.zh-CN.idx", "train.en-zh-CN.en.idx"], ("en", "zh-CN")),
        (["train.pt-br-en.pt-br.idx"], ("pt-br", "en")),
    ],
)
def test_languages_are_in_the_names_of_binarised_data(names: list[str], pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in [*names, "dict.xx.txt", "test.fr-it.fr.bin", "corpus.de.idx"]:
        (tmp_path / "bin" / name).touch()
    assert Assets(tmp_path / "model.pt", tmp_path).languages(None, None) == pair


def test_a_text_is_in_two_folders_and_either_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's folder and its `bin` belong to one text. The data may be in either of them, or in the given folder."""
    text, bin_ = tmp_path / "text", tmp_path / "text" / "bin"
    bin_.mkdir(parents=True)
    assert folders(text) == [text, bin_]
    assert folders(bin_) == [bin_, text]
    assert binarised(str(text)) == binarised(str(bin_)) == bin_, "which is where it should be"
    (text / "train.de-en.de.idx").touch()
    assert binarised(str(text)) == binarised(str(bin_)) == text
    monkeypatch.chdir(bin_)
    assert folders(Path(".")) == [Path("."), Path("..")]


def test_languages_come_from_the_first_that_names_them(tmp_path: Path) -> None:
    """Languages come from the user, the model, text.json or the data's file names, in this order, and must agree."""
    (tmp_path / "train.de-en.de.idx").touch()
    model = tmp_path / "model.pt"
    assert Assets(model).languages("fr", "it") == ("fr", "it")  # the data may have several language pairs
    assert Assets(model, languages=("de", None)).languages(None, "en") == ("de", "en")
    with pytest.raises(AdminError, match="model.pt is for fr-it and the command line for de-[?]. Give the model's own"):
        Assets(model, languages=("de", None)).languages("fr", "it")
    (tmp_path / "train.en-fr.en.idx").touch()
    with pytest.raises(AdminError, match="has data of de-en, en-fr, and .*model.pt does not tell which"):
        Assets(model).languages(None, None)
    assert Assets(model, languages=("en", "fr")).languages(None, None) == ("en", "fr")
    Text("de", "en").write(tmp_path / "text.json")
    assert Assets(model).languages(None, None) == ("de", "en")
    with pytest.raises(AdminError, match="text.json is for de-en and the command line for en-fr. Give"):
        Assets(model, languages=("en", "fr")).languages(None, None)
    with pytest.raises(AdminError, match="does not tell its languages, and .*Give the folder as --data or, to"):
        Assets(model, tmp_path / "nowhere").languages(None, None)


@pytest.mark.parametrize("pieces", [False, True])
def test_pieces_of_words_need_the_merges(pieces: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Without text.json and codes, translating tokens needs the merges, if the dictionary has pieces of words."""
    some = dictionary(50)
    for number in range(10):
        some.add_symbol(f"p{number}{'@@' * pieces}")
    state = state_of(some, some)
    state["cfg"]["task"] |= {"source_lang": None, "target_lang": None}
    data, model = tmp_path / "data-bin", tmp_path / "model.pt"
    data.mkdir()
    Checkpoint(state).write(model)
    for language in ("de", "en"):
        some.save(str(data / f"dict.{language}.txt"))
    (data / "test.de-en.de.idx").touch()

    def run(*arguments: object) -> tuple[int, str]:
        status = cli.main([str(argument) for argument in arguments])
        return status, "".join(capsys.readouterr())

    (tmp_path / "text").write_text(f"w1 w2 p3{'@@' * pieces} w4\n")
    command = ["translate", model, tmp_path / "text", "--data", data, "--device", "cpu"]
    status, output = run(*command)
    assert status == 2 and "there is no text.json in " in output and "or tokens with --tokenised.\n" in output
    status, units = run(*command, "--units")
    assert status == 0 and units.count("\n") == 1
    status, output = run(*command, "--tokenised")
    if not pieces:
        assert (status, output) == (0, units)
        return
    assert status == 2 and "the file as --codes, or units with --units.\n" in output
    (tmp_path / "merges").write_text("p 3 1\n")
    assert run(*command, "--tokenised", "--codes", tmp_path / "merges")[0] == 0
    status, output = run(*command, "--tokenised", "--codes", tmp_path / "none")
    assert status == 2 and f"{tmp_path / 'none'}: cannot be read (No such file or directory)." in output


SETTINGS = {"source": "de", "target": "en", "lowercase": False, "normalise": True, "aggressive_dashes": True}
RECORDED = {None: "c0b7b959c0102613", False: "2eea43321f31989e", True: "1ea10103ba3c84c5"}
"""Fingerprints of these settings that old models recorded, by text.json's `perl` (None: left out)."""


@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("given", RECORDED)
def test_perl_left_out_is_perl_false(recorded: bool | None, given: bool | None, tmp_path: Path) -> None:
    """A text.json without `perl` counts as equal to one with `perl` false, whichever the model recorded."""
    settings = {**SETTINGS, "escape": True, **({} if given is None else {"perl": given})}
    (tmp_path / "text.json").write_text(json.dumps(settings, indent=1))
    assets = Assets(tmp_path / "model.pt")
    assert assets.fingerprints() == {"text.json": RECORDED[bool(given)]}
    assets.expected = {"text.json": RECORDED[recorded]}
    with (
        contextlib.nullcontext()
        if bool(recorded) == bool(given)
        else pytest.raises(AdminError, match="another model's")
    ):
        assert assets.find("text.json")
