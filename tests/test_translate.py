"""`fairseq-admin translate`: parity with fairseq-generate, parity of the engines, and unusual lines."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Completed, needs, one_line_error, preprocess, python, train

from fairseq_admin import cli
from fairseq_admin.checkpoints import files
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.text.assets import Assets
from fairseq_admin.text.bpe import BPE, remove_bpe
from fairseq_admin.text.tokens import Text
from fairseq_admin.translation import streams
from fairseq_admin.translation.engines import Hypothesis, Search, Translator
from fairseq_admin.translation.in_ctranslate2 import CTranslate2Translator
from fairseq_admin.translation.pipeline import Pipeline, split
from recipes.steps import bpe

TEXT = Text("de", "en", normalise=True, aggressive_dashes=True, escape=True)
POSITIONS = 40
CTRANSLATE2 = importlib.util.find_spec("ctranslate2")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences of three to six words and a full stop. Words have two to four syllables."""
    generator = random.Random(seed)
    made = []
    for _ in range(count):
        words = ["".join(generator.choices(["ba", "do", "ki", "lu"], k=generator.randint(2, 4))) for _ in range(6)]
        words[1] += generator.choice(["-ki", "'s", ",", "", ""])
        made.append(" ".join(words[: generator.randint(3, 6)]) + ".")
    return made


TEST = sentences(20, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """text.json, codes and binarised data, as from a recipe. The target is the source in capitals."""
    folder = tmp_path_factory.mktemp("data")
    TEXT.write(folder / "text.json")
    raw = {"train": sentences(300, 1), "valid": sentences(10, 3), "test": TEST}
    sides = {"de": lambda line: line, "en": str.upper}
    tokens = {
        (split, language): [TEXT.tokenise(change(line), language) for line in lines]
        for split, lines in raw.items()
        for language, change in sides.items()
    }
    merges = bpe.learn(tokens["train", "de"] + tokens["train", "en"], 30)
    (folder / "codes").write_text("".join(f"{merge}\n" for merge in merges))
    for (name, language), lines in tokens.items():
        (folder / f"{name}.{language}").write_text("".join(f"{line}\n" for line in BPE(folder / "codes").apply(lines)))
    preprocess(folder, "-s", "de", "-t", "en", "--joined-dictionary")
    return folder


@pytest.fixture(scope="module")
def admin(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Admin model after one update, changed so that it writes long translations.

    Its last norm is negative, so that no word predicts itself, and the end of the sentence is as likely as some words
    together."""
    folder = tmp_path_factory.mktemp("admin")
    sizes = ["--max-source-positions", POSITIONS, "--max-target-positions", POSITIONS]
    train(data / "bin", folder, "-s", "de", "-t", "en", "--max-update", 1, "--disable-validation", *sizes)
    state = files.read(folder / "checkpoint_last.pt")
    end = state["model"]["decoder.embed_tokens.weight"][2]
    state["model"]["decoder.layers.1.final_layer_norm.weight"].fill_(-3)
    state["model"]["decoder.layers.1.final_layer_norm.bias"].copy_(2 * end / end.square().sum())
    Checkpoint(state).write(folder / "talkative.pt")
    return folder / "talkative.pt"


def command(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folded(admin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, folded to a stock Transformer."""
    path = tmp_path_factory.mktemp("folded") / "model.pt"
    assert command("fold", admin, "-o", path) == 0
    return path


@pytest.fixture(scope="module")
def ct2(folded: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, exported to CTranslate2."""
    needs("ctranslate2")
    folder = tmp_path_factory.mktemp("ct2") / "model"
    assert command("export", folded, "--to", "ctranslate2", "-o", folder, "--data", data) == 0
    return folder


def next_to(data: Path, folder: Path) -> Path:
    """Copy the text's files next to a model."""
    for path in (data / "text.json", data / "codes", data / "bin/dict.de.txt", data / "bin/dict.en.txt"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def translate(tmp_path: Path, data: Path) -> Callable[..., list[str]]:
    """translate(model, lines, *options) -> the output lines."""

    def go(model: Path, lines: Sequence[str], *options: object) -> list[str]:
        (tmp_path / "in").write_bytes("".join(f"{line}\n" for line in lines).encode())
        places = [tmp_path / "in", "-o", tmp_path / "out", "--data", data]
        assert command("translate", model, *places, "--device", "cpu", *options) == 0
        assert {path.name for path in tmp_path.iterdir()} <= {"in", "out", "run0.log"}
        written = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
        assert written.pop() == ""
        return written

    return go


def test_the_hypotheses_are_those_of_fairseq_generate(
    admin: Path, data: Path, run: Callable[..., Completed], translate: Callable
) -> None:
    """Are texts and scores equal, hypothesis by hypothesis, for tokens and for raw text?"""
    search = ["--path", admin, "--user-dir", "fairseq_admin", "--gen-subset", "test", "--cpu", "--num-workers", 0]
    search += ["--beam", 4, "--nbest", 3, "--lenpen", 1.2, "--max-len-a", 1, "--required-batch-size-multiple", 1]
    generated = run("fairseq_cli.generate", data / "bin", *search)
    assert generated.status == 0, generated.output[-4000:]
    lines = (line[2:].split("\t") for line in generated.output.splitlines() if line.startswith("H-"))
    expected = sorted(((int(number), float(score), units) for number, score, units in lines), key=lambda row: row[0])
    assert [number for number, *_ in expected] == [number for number in range(20) for _ in range(3)]
    options = ["--beam", 4, "--nbest", 3, "--lenpen", 1.2]
    raw = [line.split("\t") for line in translate(admin, TEST, *options)]
    tokenised = [TEXT.tokenise(line, "de") for line in TEST]
    tokens = [line.split("\t") for line in translate(admin, tokenised, *options, "--tokenised")]
    for (number, score, units), row, row_of_tokens in zip(expected, raw, tokens, strict=True):
        # fairseq-generate prints base-2 logarithms with four digits.
        assert (int(row[0]), float(row[1])) == (number + 1, pytest.approx(score * math.log(2), abs=1e-4))
        assert row_of_tokens[2] == remove_bpe(units) and row[2] == TEXT.detokenise(remove_bpe(units))
    assert len({text for _, _, text in raw}) > 12, "the model says always the same: nothing was compared"


@pytest.mark.parametrize(("recorded", "left"), [(True, True), (False, False), ("False", False), (None, True)])
def test_sources_are_padded_as_in_training(
    recorded: object, left: bool, admin: Path, data: Path, tmp_path: Path
) -> None:
    """Are sources padded on the side of --left-pad-source? Older fairseq stores it as text."""
    state = files.read(admin)
    state["cfg"]["task"]["left_pad_source"] = recorded
    if recorded is None:
        del state["cfg"]["task"]["left_pad_source"]
    Checkpoint(state).write(tmp_path / "model.pt")
    pipeline = Pipeline.load(tmp_path / "model.pt", Assets(tmp_path / "model.pt", data), device="cpu")
    sources: list[torch.Tensor] = []
    pipeline.translator.model.encoder.embed_tokens.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda _, inputs: sources.append(inputs[0])
    )
    pipeline.translate(["Ba do.", "Ba do ki lu ba do ki."], Search(beam=1))
    padding = sources[0].eq(1)
    assert padding[:, 0 if left else -1].any() and not padding[:, -1 if left else 0].any()


@pytest.mark.parametrize("engine", ["folded", "ct2"])
@pytest.mark.parametrize("options", [["--beam", 4, "--nbest", 2], ["--beam", 1]])
def test_all_engines_agree(
    engine: str, options: list[object], admin: Path, translate: Callable, request: pytest.FixtureRequest
) -> None:
    """Do all engines give the unfolded model's hypotheses, with equal scores up to float32 rounding?"""
    lines = [*TEST, "", "  \u2028", "Wörter die keiner kennt: 日本語"]
    expected = translate(admin, lines, *options)
    translations = translate(request.getfixturevalue(engine), lines, *options)
    assert [line.rpartition("\t")[2] for line in translations] == [line.rpartition("\t")[2] for line in expected]
    if "--nbest" in options:
        scores = [[float(line.split("\t")[1]) for line in lines] for lines in (translations, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-3)


@pytest.mark.parametrize("engine", ["admin", "ct2"])
def test_too_long_a_line_is_translated_in_pieces(
    engine: str, translate: Callable, data: Path, capfd: pytest.CaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Is a line that is too long split at sentence ends, without loss, and is this reported?"""
    model = request.getfixturevalue(engine)
    sentence = "Baki doki luba."
    units = len(BPE(data / "codes").apply([TEXT.tokenise(sentence, "de")])[0].split())
    fit = (POSITIONS - 1) // units
    capfd.readouterr()
    translations = translate(model, ["ba", " ".join([sentence] * (3 * fit))])
    note = f"line 2 has {3 * fit * units} units and the model takes {POSITIONS - 1}: translated in 3 pieces."
    assert capfd.readouterr().err == f"fairseq-admin: {note}\n"
    (whole,) = translate(model, [" ".join([sentence] * fit)])
    assert translations[1] == " ".join([whole] * 3) and whole


def test_a_translation_without_end_is_as_long_as_fairseqs() -> None:
    """fairseq ends a translation after one unit less than the positions; CTranslate2 goes on to its bound."""
    translator = object.__new__(CTranslate2Translator)

    def endless(batch: object, max_decoding_length: int, **_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(scores=[0.0], hypotheses=[["a"] * max_decoding_length])]

    translator.positions, translator.model = 10, SimpleNamespace(translate_batch=endless)
    assert translator.translate([["a"]], Search())[0][0].text.split() == ["a"] * 9


def test_a_compressed_text_is_read(folded: Path, translate: Callable, data: Path, tmp_path: Path, capfd) -> None:
    expected, packed = translate(folded, TEST), gzip.compress("".join(f"{line}\n" for line in TEST).encode())
    (tmp_path / "in.gz").write_bytes(packed)
    assert command("translate", folded, tmp_path / "in.gz", "-o", tmp_path / "gz", "--data", data) == 0
    assert (tmp_path / "gz").read_text(encoding="utf-8").splitlines() == expected
    (tmp_path / "in.gz").write_bytes(packed[:-9])
    message = one_line_error(capfd, "translate", folded, tmp_path / "in.gz", "--data", data)
    assert "in.gz: cannot be read (Compressed file ended" in message


def test_a_recipes_folder_is_its_model(folded: Path, data: Path, text: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "model").mkdir()
    model = next_to(data, tmp_path / "model") / "model.pt"
    shutil.copy(folded, model)
    capfd.readouterr()
    for path in (tmp_path / "model", model):
        assert command("translate", path, text, "--device", "cpu") == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == second
    assert "model.pt has no omega" in one_line_error(capfd, "omega", tmp_path / "model")
    assert f"{model} would overwrite its input" in one_line_error(capfd, "fold", tmp_path / "model", "-o", model)


def test_ctranslate2_needs_no_torch(ct2: Path, tmp_path: Path) -> None:
    """Does translating with CTranslate2 not import torch? The import takes longer than translating a sentence."""
    (tmp_path / "in").write_text("baki.\n")
    arguments = ["translate", str(ct2), str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    imported = "{'torch', 'fairseq'} & {*sys.modules}"
    code = f"import sys; from fairseq_admin import cli; cli.main({arguments}); print({imported})"
    process = python(code)
    assert process.stdout == "set()\n" and (tmp_path / "out").exists(), process.stderr


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("baki.\n")
    return path


def swap(path: Path) -> None:
    """Swap a dictionary's first two lines: it keeps its size, but is another dictionary."""
    first, second, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([second, first, *rest]), encoding="utf-8")


CHANGES = {"codes": lambda path: path.write_text("b a 1\n"), "text.json": Text("de", "en", lowercase=True).write}


def test_another_models_files_of_equal_size_are_refused(
    admin: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Training records the dictionaries. `fold --data` records the merges and the settings, too."""
    folded = tmp_path / "model.pt"
    assert command("fold", admin, "-o", folded, "--data", data / "bin") == 0
    same = shutil.copytree(data, tmp_path / "same")
    (same / "text.json").write_text(json.dumps(json.loads((data / "text.json").read_bytes())))  # on one line
    assert command("translate", folded, text, "--data", same, "--device", "cpu") == 0
    for name, change in {"bin/dict.de.txt": swap, "bin/dict.en.txt": swap, **CHANGES}.items():
        other = shutil.copytree(data, tmp_path / "other")
        change(other / name)
        kind = "is another model's: " if name in CHANGES else ": the dictionary is not the one the model was trained"
        assert kind in one_line_error(capfd, "translate", folded, text, "--data", other)
        if name not in CHANGES:
            for words in (["translate", admin, text], ["fold", admin, "-o", tmp_path / "new"]):
                assert kind in one_line_error(capfd, *words, "--data", other)
        shutil.rmtree(other)


def test_an_exported_folder_knows_its_files(
    ct2: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """An exported folder refuses files that differ from its own, even if its checkpoint recorded none."""

    def refused(*options: object) -> str:
        return one_line_error(capfd, "translate", folder, text, *options)

    folder = shutil.copytree(ct2, tmp_path / "exported")
    for name, change in CHANGES.items():
        other = next_to(data, tmp_path)
        change(other / name)
        assert f"{other / name} is another model's: {folder} was" in refused("--data", other)
    assert f"{folder}/text.json is for de-en and the command line for en-de" in refused("-s", "en", "-t", "de")
    (folder / "fingerprints.json").write_text("[]")
    assert f"{folder}/fingerprints.json holds no fingerprints" in refused()
    (folder / "fingerprints.json").unlink()  # as in older folders, or in folders of another converter
    assert command("translate", folder, text, "--device", "cpu") == 0
    os.truncate(folder / "model.bin", 1000)
    assert "is not a whole " in refused()


# -- the flow of lines, with a model that writes
# capitals------------------------------------------------------------------


class Shouter(Translator):
    """Translates into capitals and records its batches. The second hypothesis has one more exclamation mark."""

    longest = 6

    def __init__(self) -> None:
        self.batches: list[list[list[str]]] = []

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        self.batches.append(list(batch))
        return [
            [Hypothesis(-float(n), " ".join([*units, *"!" * n]).upper()) for n in range(search.nbest)]
            for units in batch
        ]


@pytest.fixture
def shouter(tmp_path: Path) -> Pipeline:
    (tmp_path / "codes").write_text("a b</w> 1\n")
    return Pipeline(Shouter(), Text("de", "en", normalise=True), BPE(tmp_path / "codes"))


def test_lines_keep_their_order_and_empty_ones_reach_no_model(shouter: Pipeline) -> None:
    counted: list[int] = []
    lines = ["x", "", "x x x x", "\u200b", " \t", "ab y", "x x x"]
    translations = shouter.translate(lines, Search(), batch_tokens=4, done=counted.append)
    assert [text for ((_, text),) in translations] == ["X", "", "X X X X", "", "", "AB Y", "X X X"]
    assert translations[1] == [Hypothesis(0.0, "")]
    assert [[len(units) for units in batch] for batch in shouter.translator.batches] == [[4], [3], [2, 1]]
    assert counted == [1, 1, 2]


def test_pieces_are_joined_rank_by_rank(shouter: Pipeline, capfd: pytest.CaptureFixture) -> None:
    translations = shouter.translate(["x", "a! b b b c d"], Search(nbest=2), first=7)
    assert translations[0] == [(0.0, "X"), (-1.0, "X!")]
    assert translations[1] == [(0.0, "A! B B B C D"), (-1.0, "A!! B B B C D!")]
    message = "fairseq-admin: line 8 has 7 units and the model takes 6: translated in 2 pieces.\n"
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(
    ("units", "pieces"),
    [
        ("", []),
        ("a b c d", ["a b c d"]),
        ("a . b . c", ["a . b .", "c"]),
        ('a . " b c', ['a . "', "b c"]),
        ("a . b . ) c", ["a . b .", ") c"]),
        ("a b c@@ d@@ e", ["a b", "c@@ d@@ e"]),
        ("a b c d e f g h i", ["a b c d", "e f g h", "i"]),
        ("a@@ b@@ c@@ d@@ e@@ f", ["a@@ b@@ c@@ d@@", "e@@ f"]),
    ],
)
def test_a_line_is_split_where_it_hurts_least(units: str, pieces: list[str]) -> None:
    assert [" ".join(piece) for piece in split(units.split(), 4)] == pieces


@pytest.mark.parametrize("chunk", [1, 2, 2000])
def test_hypotheses_are_numbered_by_line(
    chunk: int, shouter: Pipeline, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are hypotheses numbered by line, at any chunk size, without a progress bar if there is no terminal?"""
    monkeypatch.setattr(streams, "CHUNK", chunk)
    sink = io.BytesIO()
    source = io.BytesIO("\ufeffx\r\n\ny\u2028z".encode())
    streams.flow(shouter, source, "text", sink.write, Search(nbest=2), 4096)
    assert sink.getvalue().decode() == "1\t0.0000\tX\n1\t-1.0000\tX!\n2\t0.0000\t\n3\t0.0000\tY Z\n3\t-1.0000\tY Z!\n"
    assert capfd.readouterr() == ("", "")


def test_removed_characters_are_said_once(shouter: Pipeline, capfd: pytest.CaptureFixture) -> None:
    sink = io.BytesIO()
    streams.flow(shouter, io.BytesIO("x\u200by\n\tz\u200b\n".encode()), "text", sink.write, Search(), 4096)
    assert sink.getvalue() == b"XY\nZ\n"
    note = "fairseq-admin: text: 2 control or format characters are not in the tokens: U+200B (2).\n"
    assert capfd.readouterr() == ("", note)


def test_text_that_is_not_utf8_is_named_by_line(shouter: Pipeline) -> None:
    sink = io.BytesIO()
    with pytest.raises(AdminError, match=f"text: line {streams.CHUNK + 1} is not UTF-8 \\(byte 0xfc at column 2\\)"):
        source = io.BytesIO(b"x\n" * streams.CHUNK + b"f\xfcnf\n")
        streams.flow(shouter, source, "text", sink.write, Search(), 4096)
    assert sink.getvalue() == b"X\n" * streams.CHUNK
