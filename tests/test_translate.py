"""`fairseq-admin translate`: against fairseq-generate, three engines against one another, and what a line can hold."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TRAIN, Run, run_module

from fairseq_admin import cli
from fairseq_admin.checkpoints import files, fold
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.text.assets import Assets
from fairseq_admin.text.bpe import BPE, remove_bpe
from fairseq_admin.text.tokens import Text
from fairseq_admin.translation import streams
from fairseq_admin.translation.engines import Hypothesis, Search, Translator
from fairseq_admin.translation.pipeline import Pipeline, Translation, batches, split
from recipes.steps import bpe

TEXT = Text("de", "en", normalise=True, aggressive_dashes=True, escape=True)
POSITIONS = 40
CTRANSLATE2 = importlib.util.find_spec("ctranslate2")


def sentences(count: int, seed: int) -> list[str]:
    """Two to four syllables a word, three to six words and a full stop a sentence."""
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
    """text.json, codes and binarised data, as a recipe leaves them; the target is the source's words in capitals."""
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
    prefixes = [f"--{name}pref={folder / name}" for name in raw]
    arguments = ["-s", "de", "-t", "en", *prefixes, "--destdir", folder / "bin", "--joined-dictionary"]
    done = run_module("fairseq_cli.preprocess", *arguments, log=folder / "log")
    assert done.status == 0, done.output
    return folder


@pytest.fixture(scope="module")
def admin(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Admin model after one update, made talkative: its last norm is negative, so that no word predicts itself, and
    the end of the sentence is as likely as some words together."""
    folder = tmp_path_factory.mktemp("admin")
    sizes = ["--max-source-positions", POSITIONS, "--max-target-positions", POSITIONS]
    given = ["-s", "de", "-t", "en", "--save-dir", folder, "--max-update", 1, "--disable-validation", *sizes]
    done = run_module("fairseq_cli.train", data / "bin", *TRAIN, *given, log=folder / "log")
    assert done.status == 0, done.output[-4000:]
    state = files.read(folder / "checkpoint_last.pt")
    end = state["model"]["decoder.embed_tokens.weight"][2]
    state["model"]["decoder.layers.1.final_layer_norm.weight"].fill_(-3)
    state["model"]["decoder.layers.1.final_layer_norm.bias"].copy_(2 * end / end.square().sum())
    files.write(state, folder / "talkative.pt")
    return folder / "talkative.pt"


@pytest.fixture(scope="module")
def folded(admin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, folded: a stock Transformer."""
    path = tmp_path_factory.mktemp("folded") / "model.pt"
    fold.fold(Checkpoint.read(admin)).write(path)
    return path


def next_to(data: Path, folder: Path) -> Path:
    """Copy what the text needs next to a model."""
    for path in (data / "text.json", data / "codes", data / "bin/dict.de.txt", data / "bin/dict.en.txt"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def ct2(folded: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as CTranslate2's own converter writes it."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    folder = tmp_path_factory.mktemp("ct2") / "model"
    converter = ctranslate2.converters.FairseqConverter(str(folded), str(data / "bin"), "de", "en")
    converter.convert(str(folder))
    return next_to(data, folder)


@pytest.fixture(scope="module")
def fsmt(folded: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    weights = files.read(folded)["model"]
    words = weights["encoder.embed_tokens.weight"].size(0)
    sizes = {"d_model": 64, "src_vocab_size": words, "tgt_vocab_size": words, "max_position_embeddings": POSITIONS}
    for stack in ("encoder", "decoder"):
        sizes.update({f"{stack}_layers": 2, f"{stack}_ffn_dim": 128, f"{stack}_attention_heads": 4})
    model = transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(langs=["de", "en"], **sizes))
    weights = {f"model.{key}": tensor for key, tensor in weights.items()}
    missing, _ = model.load_state_dict(weights, strict=False)
    assert all("embed_positions" in key for key in missing)
    folder = tmp_path_factory.mktemp("fsmt")
    model.save_pretrained(folder)
    return next_to(data, folder)


@pytest.fixture
def translate(tmp_path: Path, data: Path) -> Callable[..., list[str]]:
    """translate(model, lines, *options) -> the lines written."""

    def go(model: Path, lines: Sequence[str], *options: object) -> list[str]:
        (tmp_path / "in").write_bytes("".join(f"{line}\n" for line in lines).encode())
        given = [model, tmp_path / "in", "-o", tmp_path / "out", "--data", data, "--device", "cpu", *options]
        assert cli.main(["translate", *map(str, given)]) == 0
        assert {path.name for path in tmp_path.iterdir()} <= {"in", "out", "run0.log"}
        written = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
        assert written.pop() == ""
        return written

    return go


def test_the_hypotheses_are_those_of_fairseq_generate(
    admin: Path, data: Path, run: Callable[..., Run], translate: Callable
) -> None:
    """Are text and scores equal, hypothesis by hypothesis, units and raw?"""
    given = ["--path", admin, "--user-dir", "fairseq_admin", "--gen-subset", "test", "--beam", 4, "--nbest", 3, "--cpu"]
    given += ["--lenpen", 1.2, "--max-len-a", 1, "--required-batch-size-multiple", 1, "--num-workers", 0]
    done = run("fairseq_cli.generate", data / "bin", *given)
    assert done.status == 0, done.output[-4000:]
    expected: dict[int, list[list[str]]] = {}
    for line in done.output.splitlines():
        if line.startswith("H-"):
            number, *rest = line[2:].split("\t")
            expected.setdefault(int(number) + 1, []).append(rest)
    assert sorted(expected) == list(range(1, 21))
    options = ["--beam", 4, "--nbest", 3, "--lenpen", 1.2]
    raw = [line.split("\t") for line in translate(admin, TEST, *options)]
    tokens = [line.split("\t") for line in translate(admin, [TEXT.tokenise(line, "de") for line in TEST], *options,
                                                     "--tokenised")]  # fmt: skip
    assert len(raw) == len(tokens) == 60
    wanted = [(number, *hypothesis) for number in sorted(expected) for hypothesis in expected[number]]
    for (number, score, units), found_raw, found_tokens in zip(wanted, raw, tokens):
        # fairseq-generate prints logarithms to base 2; four digits are printed.
        wanted_score = pytest.approx(float(score) * math.log(2), abs=1e-4)
        assert (int(found_raw[0]), float(found_raw[1])) == (number, wanted_score)
        assert found_tokens[2] == remove_bpe(units) and found_raw[2] == TEXT.detokenise(remove_bpe(units))
    assert len({text for _, _, text in raw}) > 12, "the model says always the same: nothing was compared"


@pytest.mark.parametrize("engine", ["folded", "ct2", "fsmt"])
@pytest.mark.parametrize("options", [["--beam", 4, "--nbest", 2], ["--beam", 1]])
def test_all_engines_agree(
    engine: str, options: list[object], admin: Path, translate: Callable, request: pytest.FixtureRequest
) -> None:
    """Do they give the unfolded model's hypotheses, with scores equal up to float32's rounding?"""
    lines = [*TEST, "", "  \u2028", "Wörter die keiner kennt: 日本語"]
    expected = translate(admin, lines, *options)
    found = translate(request.getfixturevalue(engine), lines, *options)
    assert [line.rpartition("\t")[2] for line in found] == [line.rpartition("\t")[2] for line in expected]
    if "--nbest" in options:
        scores = [[float(line.split("\t")[1]) for line in lines] for lines in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-3)


@pytest.mark.parametrize("engine", ["admin", "ct2", "fsmt"])
def test_too_long_a_line_is_translated_in_pieces(
    engine: str, translate: Callable, capfd: pytest.CaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Is it split where sentences end, is nothing lost, and is that reported?"""
    model = request.getfixturevalue(engine)
    sentence = "Baki doki luba."
    alone = translate(model, [sentence, f"{sentence} {sentence}"])
    units = len(BPE(Path(request.getfixturevalue("data")) / "codes").apply([TEXT.tokenise(sentence, "de")])[0].split())
    fit = (POSITIONS - 1) // units
    capfd.readouterr()
    found = translate(model, ["ba", " ".join([sentence] * (3 * fit))])
    whole = translate(model, [" ".join([sentence] * fit)])
    assert found[1] == " ".join(whole * 3) and alone[0] != ""
    said = f"line 2 has {3 * fit * units} units and the model takes {POSITIONS - 1}: translated in 3 pieces."
    assert capfd.readouterr().err == f"fairseq-admin: {said}\n"


@pytest.mark.parametrize("positions", [0, 1])
def test_a_model_without_room_for_a_word_is_refused(positions: int, admin: Path, data: Path, tmp_path: Path) -> None:
    """Every line would be cut for ever."""
    state = files.read(admin)
    state["cfg"]["model"]["max_source_positions"] = positions
    files.write(state, tmp_path / "model.pt")
    with pytest.raises(AdminError, match=f"model.pt takes sentences of {positions} positions, of which the end takes"):
        Pipeline.load(tmp_path / "model.pt", Assets(tmp_path / "model.pt", data), device="cpu")


def test_a_checkpoint_that_does_not_name_its_languages(admin: Path, data: Path, tmp_path: Path) -> None:
    """fairseq-train without -s and -t notes none: are they text.json's?"""
    state = files.read(admin)
    state["cfg"]["task"].update(source_lang=None, target_lang=None)
    files.write(state, tmp_path / "model.pt")
    found = [
        Pipeline.load(path, Assets(path, data), device="cpu").translate(["Baki."], Search())
        for path in (admin, tmp_path / "model.pt")
    ]
    assert found[0] == found[1]


def test_standard_output_holds_translations_only(folded: Path, data: Path, tmp_path: Path) -> None:
    """From a shell: nothing else on standard output, no log on standard error, and a reader may stop early."""
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in TEST))
    command = f"{sys.executable} -m fairseq_admin.cli translate {folded} --data {data} --device cpu --beam 1"
    done = subprocess.run(
        ["bash", "-c", f"cat {tmp_path}/in | {command} | tee {tmp_path}/out | head -n 3; echo ${{PIPESTATUS[*]}}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    *lines, status = done.stdout.splitlines()
    assert len(lines) == 3 and status.split()[:2] == ["0", "0"]
    assert (tmp_path / "out").read_text().startswith("".join(f"{line}\n" for line in lines))
    assert done.stderr == ""


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(capfd: pytest.CaptureFixture, *arguments: object) -> str:
    """The one line that the command ends with."""
    capfd.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    return err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("baki.\n")
    return path


def test_what_is_missing_is_named(
    folded: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("text.json", "dict.de.txt", "dict.en.txt", "codes"):
        message = f"there is no {name} in {empty} or {empty}/bin. Give the folder"
        assert message in refused(capfd, folded, text, "--data", empty)
        source = data / name if (data / name).exists() else data / "bin" / name
        shutil.copy(source, empty)
    assert f"there is no text.json in {folded.parent}. " in refused(capfd, folded, text)
    assert "nope.pt: no such file" in refused(capfd, tmp_path / "nope.pt", text)
    assert "no.txt: No such file or directory; expected a text" in refused(capfd, folded, tmp_path / "no.txt")
    assert "has neither model.bin nor config.json" in refused(capfd, empty, text)
    assert "--nbest 3 is more than --beam 2 finds" in refused(capfd, folded, text, "--beam", 2, "--nbest", 3)
    assert f"{text} would overwrite its input {text}" in refused(capfd, folded, text, "-o", text)
    assert "is a folder or a device" in refused(capfd, folded, text, "-o", empty)
    assert "could not be written" in refused(capfd, folded, text, "-o", empty / "no/out", "--data", data)
    if not torch.cuda.is_available():
        assert "no CUDA device was found" in refused(capfd, folded, text, "--data", data, "--device", "cuda")


def test_what_does_not_fit_is_one_line(
    folded: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    for name, content in (("text.pt", b"baki\n"), ("cut.pt", folded.read_bytes()[:20000])):
        (tmp_path / name).write_bytes(content)
        assert f"{name}: not a whole checkpoint" in refused(capfd, tmp_path / name, text, "--data", data)
    other = next_to(data, tmp_path)
    for side in ("de", "en"):
        with (other / f"dict.{side}.txt").open("a") as file:
            file.write("more 1\n")
    assert "dict.de.txt has 41 symbols and the model 40" in refused(capfd, folded, text, "--data", other)
    Text("en", "de").write(other / "text.json")
    assert "is for en-de and " in refused(capfd, folded, text, "--data", other)
    (other / "text.json").write_text("{}")
    assert "is missing; expected source, target" in refused(capfd, folded, text, "--data", other)


@pytest.mark.parametrize("place", ["data", "data/bin", "."])
def test_every_verb_takes_the_texts_folder_and_its_bin(
    place: str, admin: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For translate and export text.json is in the one; for fold and analyze, the binarised data are in the other."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "text").write_text("baki.\n")
    monkeypatch.chdir(tmp_path / "data/bin" if place == "." else tmp_path)
    given: dict[str, list[object]] = {
        "translate": ["translate", admin, tmp_path / "text", "--device", "cpu"],
        "fold": ["fold", admin],
        "analyze": ["analyze", "dependency", admin, "--tokens", 64, "--json"],
    }
    if CTRANSLATE2:
        given["export"] = ["export", admin, "--to", "ctranslate2"]
    told = {}
    for verb, arguments in given.items():
        command = [*arguments, "--data", place, "-o", tmp_path / verb]
        assert cli.main([str(argument) for argument in command]) == 0, capfd.readouterr().err
        told[verb] = capfd.readouterr()
    assert cli.main(["fold", str(admin), "-o", str(tmp_path / "plain")]) == 0
    assert int(re.findall(r"of (\d+) positions", told["fold"].out)[0]) > int(
        re.findall(r"of (\d+) positions", capfd.readouterr().out)[0]
    )
    assert Checkpoint.read(tmp_path / "fold").text.keys() == {"encoder", "decoder", "codes", "text.json"}
    assert "export" not in told or ("found no" not in told["export"].err and (tmp_path / "export/codes").exists())


@pytest.mark.parametrize("place", ["none", "none/bin"])
def test_a_folder_without_data_is_one_line(
    place: str, admin: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "none/bin").mkdir(parents=True)
    given = ["--data", str(tmp_path / place), "-o", str(tmp_path / "out")]
    for command in (["fold", str(admin)], ["analyze", "dependency", str(admin)]):
        capfd.readouterr()
        assert cli.main([*command, *given]) == 2
        err = capfd.readouterr().err
        assert f"none/bin: no data to check on ({tmp_path}/none/bin/dict.de.txt: No such file or directory)." in err


def swapped(path: Path) -> None:
    """A dictionary with its first two lines the other way round: of the same size, and another."""
    first, second, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([second, first, *rest]), encoding="utf-8")


def test_another_models_files_of_equal_size_are_refused(
    admin: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Training notes the dictionaries; folding with --data the merges and the settings, too."""
    folded = tmp_path / "model.pt"
    assert cli.main(["fold", str(admin), "-o", str(folded), "--data", str(data / "bin")]) == 0
    given = ["--data", tmp_path / "data"]

    def other(name: str, change: Callable[[Path], object]) -> None:
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        change(shutil.copytree(data, tmp_path / "data") / name)

    other("codes", lambda path: None)
    (tmp_path / "data/text.json").write_text(json.dumps(json.loads((data / "text.json").read_bytes())))  # on one line
    assert cli.main(["translate", str(folded), str(text), *map(str, given), "--device", "cpu"]) == 0
    capfd.readouterr()
    for name in ("bin/dict.de.txt", "bin/dict.en.txt"):
        other(name, swapped)
        message = f"{tmp_path}/data/{name} is another model's: "
        assert message in refused(capfd, admin, text, *given)
        assert message in refused(capfd, folded, text, *given)
        export = ["export", str(folded), "--to", "ctranslate2", "-o", str(tmp_path / "new"), *map(str, given)]
        assert not CTRANSLATE2 or (cli.main(export) == 2 and message in capfd.readouterr().err)
        assert cli.main(["fold", str(admin), "-o", str(tmp_path / "new"), "--data", str(tmp_path / "data/bin")]) == 2
        stack = "encoder" if "de" in name else "decoder"
        assert f"data/bin: the dictionary of the {stack} is not the one that {admin} was" in capfd.readouterr().err
    other("codes", lambda path: path.write_text("b a 1\n"))
    assert f"{tmp_path}/data/codes is another model's: " in refused(capfd, folded, text, *given)
    other("text.json", Text("de", "en", lowercase=True).write)
    assert f"{tmp_path}/data/text.json is another model's: " in refused(capfd, folded, text, *given)


@pytest.mark.parametrize("engine", ["ctranslate2", "huggingface"])
def test_an_exported_folder_knows_its_files(
    engine: str, folded: Path, data: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """Also of a checkpoint that was noted with none of them: what it was exported with counts."""
    pytest.importorskip({"huggingface": "transformers"}.get(engine, engine), reason=f"{engine} is not installed")
    folder = tmp_path / "exported"
    assert cli.main(["export", str(folded), "--to", engine, "-o", str(folder), "--data", str(data)]) == 0
    assert cli.main(["translate", str(folder), str(text), "--device", "cpu"]) == 0
    capfd.readouterr()
    changes = {"codes": lambda path: path.write_text("b a 1\n"), "text.json": Text("de", "en", lowercase=True).write}
    if engine == "huggingface":
        changes["dict.en.txt"] = swapped
    for name, change in changes.items():
        other = next_to(data, tmp_path)
        change(other / name)
        assert f"{other / name} is another model's: {folder} was" in refused(capfd, folder, text, "--data", other)
        kept = (folder / name).read_bytes()
        change(folder / name)
        assert f"{folder / name} is another model's: " in refused(capfd, folder, text)
        (folder / name).write_bytes(kept)
    (folder / "fingerprints.json").write_text("[]")
    assert f"{folder}/fingerprints.json holds no fingerprints" in refused(capfd, folder, text)
    (folder / "fingerprints.json").unlink()  # as in folders of earlier days, or another converter's
    assert cli.main(["translate", str(folder), str(text), "--device", "cpu"]) == 0


def test_broken_folders_are_one_line(
    ct2: Path, fsmt: Path, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    for whole, weights in ((ct2, "model.bin"), (fsmt, "model.safetensors")):
        broken = tmp_path / weights
        shutil.copytree(whole, broken)
        (broken / weights).write_bytes((whole / weights).read_bytes()[:1000])
        assert "is no whole " in refused(capfd, broken, text)
    (broken / "config.json").write_text('{"model_type": "bart", "langs": ["de", "en"]}')
    assert "is not that of an FSMT model" in refused(capfd, broken, text)
    shutil.copy(fsmt / "config.json", broken)
    shutil.copy(fsmt / "model.safetensors", broken)
    (broken / "dict.de.txt").write_text("ba 1\n")
    assert "dict.de.txt has 5 symbols and the model" in refused(capfd, broken, text)


@pytest.mark.parametrize("missing", ["Library libcublas.so.12 is not found or cannot be loaded", ""])
def test_a_gpu_without_the_libraries_of_ctranslate2(
    missing: str, ct2: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Is the CPU used, with a note, unless CUDA was asked for? (ctranslate2 looks for them only at the first batch.)"""
    import ctranslate2

    opened = []

    class OnGPU:
        """The CPU's translator, on a GPU whose library may be missing."""

        def __init__(self, folder: str, device: str) -> None:
            opened.append(device)
            self.device, self.translator = device, real(folder, device="cpu")

        def translate_batch(self, *batch, **options):
            if self.device == "cuda" and missing:
                raise RuntimeError(missing)
            return self.translator.translate_batch(*batch, **options)

    real = ctranslate2.Translator
    assert cli.main(["translate", str(ct2), str(text)]) == 0
    expected = capfd.readouterr().out
    monkeypatch.setattr(ctranslate2, "Translator", OnGPU)
    monkeypatch.setattr(ctranslate2, "get_cuda_device_count", lambda: 1)
    assert cli.main(["translate", str(ct2), str(text)]) == 0
    found = capfd.readouterr()
    assert found.out == expected and opened == (["cuda", "cpu"] if missing else ["cuda"])
    assert [line for line in found.err.splitlines() if line.startswith("fairseq-admin")] == (
        [f"fairseq-admin: {missing}, which ctranslate2 needs for CUDA; using the CPU."] if missing else []
    )
    if missing:
        message = refused(capfd, ct2, text, "--device", "cuda")
        assert f"--device cuda: {missing}; " in message and "pip install nvidia-cublas-cu12" in message


@pytest.mark.parametrize(("engine", "package"), [("ct2", "ctranslate2"), ("fsmt", "transformers")])
def test_an_engine_that_is_not_installed_is_named(
    engine: str, package: str, text: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    model = request.getfixturevalue(engine)
    monkeypatch.setitem(sys.modules, package, None)
    assert f"needs {package}, which is not installed. Run pip install '{package}>=" in refused(capfd, model, text)


# -- the flow of lines, with a model that shouts -----------------------------------------------------------------------


class Shouter(Translator):
    """Translates into capitals, and remembers its batches; a second hypothesis has one more exclamation mark."""

    longest = 6

    def __init__(self) -> None:
        self.batches: list[list[list[str]]] = []

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        self.batches.append(list(batch))
        return [
            [Hypothesis(-float(n), [unit.upper() for unit in units] + ["!"] * n) for n in range(search.nbest)]
            for units in batch
        ]


@pytest.fixture
def shouter(tmp_path: Path) -> Pipeline:
    (tmp_path / "codes").write_text("a b</w> 1\n")
    return Pipeline(Shouter(), Text("de", "en", normalise=True), BPE(tmp_path / "codes"))


def test_lines_keep_their_order_and_empty_ones_reach_no_model(shouter: Pipeline) -> None:
    counted: list[int] = []
    lines = ["x", "", "x x x x", "\u200b", " \t", "ab y", "x x x"]
    found = shouter.translate(lines, Search(), batch_tokens=4, done=counted.append)
    assert [[text for _, text in best] for best in found] == [["X"], [""], ["X X X X"], [""], [""], ["AB Y"], ["X X X"]]
    assert found[1] == [Translation(0.0, "")]
    assert [[len(units) for units in batch] for batch in shouter.translator.batches] == [[4], [3], [2, 1]]
    assert sum(counted) == len(lines)


def test_pieces_are_joined_rank_by_rank(shouter: Pipeline) -> None:
    told: list[str] = []
    found = shouter.translate(["x", "a! b b b c d"], Search(nbest=2), first=7, warn=told.append)
    assert [text for _, text in found[1]] == ["A! B B B C D", "A!! B B B C D!"]
    assert found[0] == [(0.0, "X"), (-1.0, "X!")]
    assert [score for score, _ in found[1]] == [0.0, -1.0]
    assert told == ["line 8 has 7 units and the model takes 6: translated in 2 pieces."]


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


def test_batches_hold_every_sentence_once_and_no_more_than_they_may() -> None:
    generator = random.Random(1)
    lengths = [generator.randint(1, 60) for _ in range(500)]
    found = list(batches(lengths, 50))
    assert sorted(itertools.chain(*found)) == list(range(500))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 50 for batch in found)
    assert len(found) < sum(lengths) / 40 + 10 * sum(length > 50 for length in lengths)
    assert list(batches([], 50)) == []


class Endless(io.RawIOBase):
    """A source without end; `read_lines` counts what was read from it."""

    read_lines = 0

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def readline(self, size: int = -1) -> bytes:  # type: ignore[override]
        self.read_lines += 1
        return b"x\n"

    def isatty(self) -> bool:
        return self.terminal


class Closing(io.BytesIO):
    """A sink that is closed after what is first written."""

    def write(self, text: bytes) -> int:  # type: ignore[override]
        super().write(text)
        raise BrokenPipeError


@pytest.mark.parametrize(("terminal", "read"), [(True, 1), (False, streams.CHUNK)])
def test_an_endless_stream_is_read_as_far_as_needed(shouter: Pipeline, terminal: bool, read: int) -> None:
    source, sink = Endless(terminal), Closing()
    with pytest.raises(BrokenPipeError):
        streams.flow(shouter, source, "endless", sink.write, Search(), 4096)  # type: ignore[arg-type]
    assert source.read_lines == read and sink.getvalue() == b"X\n" * read


def test_lines_end_at_newlines_only() -> None:
    """And a byte order mark at the very beginning is not part of the text."""
    found = streams.read(io.BytesIO("\ufeffx\r\n\ufeffy\u2028\x85z".encode()), "text", 1)
    assert list(found) == [["x\r"], ["\ufeffy\u2028\x85z"]]


@pytest.mark.parametrize("chunk", [1, 2, 2000])
def test_what_is_written(
    chunk: int, shouter: Pipeline, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are hypotheses numbered by line, however many are read at a time, and is there no bar without a terminal?"""
    monkeypatch.setattr(streams, "CHUNK", chunk)
    sink = io.BytesIO()
    streams.flow(shouter, io.BytesIO("\ufeffx\r\n\ny\u2028z".encode()), "text", sink.write,
                 Search(nbest=2), 4096)  # fmt: skip
    assert sink.getvalue().decode() == "1\t0.0000\tX\n1\t-1.0000\tX!\n2\t0.0000\t\n3\t0.0000\tY Z\n3\t-1.0000\tY Z!\n"
    assert capfd.readouterr() == ("", "")


def test_the_first_line_does_not_stick_to_the_bar(shouter: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is the bar away whenever lines are written, which may go to the same terminal?"""
    events: list[str] = []

    class Shown(contextlib.nullcontext):
        """A bar that notes what is done to it."""

        def update(self, lines: int) -> None:
            events.append("bar")

        def clear(self) -> None:
            events.append("cleared")

    class Sink(io.BytesIO):
        def write(self, text: bytes) -> int:  # type: ignore[override]
            events.append(text.decode())
            return len(text)

    monkeypatch.setattr(streams, "bar", lambda *_, **__: Shown())
    monkeypatch.setattr(streams, "CHUNK", 2)
    streams.flow(shouter, io.BytesIO(b"x\ny\nx\n"), "text", Sink().write, Search(), 1)
    shown = [event for event, following in zip(events, [*events[1:], ""]) if event != following]
    assert shown == ["bar", "cleared", "X\nY\n", "bar", "cleared", "X\n"]


def test_what_is_not_utf8_is_named_by_its_line(shouter: Pipeline) -> None:
    source = io.BytesIO(b"x\n" * streams.CHUNK + b"f\xfcnf\n")
    sink = io.BytesIO()
    message = f"text: line {streams.CHUNK + 1} is not UTF-8 \\(byte 0xfc at column 2\\)"
    with pytest.raises(AdminError, match=message):
        streams.flow(shouter, source, "text", sink.write, Search(), 4096)
    assert sink.getvalue() == b"X\n" * streams.CHUNK


def test_an_interrupted_file_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(KeyboardInterrupt), streams.written(tmp_path / "out") as write:
        write(b"new")
        raise KeyboardInterrupt
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


class Quota(io.BufferedWriter):
    """A file of a system that tells only when it is closed what could not be written."""

    def close(self) -> None:
        super().close()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def written_by(kind: Callable[[Path, str], io.BufferedWriter], path: Path, error: Exception | None = None) -> str:
    """The refusal of writing to a path, through such files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", kind)
        with pytest.raises(AdminError) as refusal, streams.written(path) as write:
            write(b"new")
            if error:
                raise error
    return str(refusal.value)


def test_a_file_that_cannot_be_closed_is_one_line(tmp_path: Path) -> None:
    """As over NFS, which may tell of a full disk only then; an error before it stays the one that is told."""
    (tmp_path / "out").write_text("old")
    found = [
        written_by(lambda path, mode: Quota(io.FileIO(path, mode)), tmp_path / "out", error)
        for error in (None, AdminError("stopped before"))
    ]
    assert found[0].startswith(f"{tmp_path}/out: could not be written (Disk quota exceeded).")
    assert found[1] == "stopped before" and [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk as Linux has it")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """What could not be written is tried again when the file is closed."""
    found = written_by(lambda path, mode: open("/dev/full", mode), tmp_path / "out")
    assert "/out: could not be written (No space left on device)." in found
    assert list(tmp_path.iterdir()) == []
