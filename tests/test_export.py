"""`fairseq-admin export`: same function and tokens in CTranslate2 and transformers, or a one-line refusal."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import reference
import test_fold
import torch
from conftest import needs
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from reference import PAD

from fairseq_admin import cli
from fairseq_admin.checkpoints.building import build
from fairseq_admin.checkpoints.checkpoint import Checkpoint
from fairseq_admin.errors import AdminError
from fairseq_admin.export import ctranslate2, folder, huggingface, tokenizer
from fairseq_admin.method import provenance
from fairseq_admin.method.norms import ShortcutNorm, shortcut_norms
from fairseq_admin.text.assets import Assets
from fairseq_admin.text.bpe import BPE
from fairseq_admin.text.tokens import Text

ENGINES = ("ctranslate2", "huggingface")
UNTIED = {"share_all_embeddings": False}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def state_of(source, target, arch="transformer_admin", **options):
    """A checkpoint in fairseq-train's format: a tiny model with random weights. No weight keeps its initial 0 or 1."""
    sizes = {**reference.TINY, "max_source_positions": 64, "max_target_positions": 48, **options}
    model = reference.scattered(reference.build(arch, source, target=target, **sizes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for norm in [*shortcut_norms(model.encoder), *shortcut_norms(model.decoder)]:
            if isinstance(norm, ShortcutNorm):
                norm.omega_init.fill_(1.0)
                if norm.omega_delta is not None:
                    norm.omega_delta.copy_(3 * torch.rand(norm.omega_init.shape, generator=generator))
    state = test_fold.state_of(model, arch, **sizes)
    state["cfg"]["task"] |= {"source_lang": "de", "target_lang": "en", "left_pad_target": False}
    return {**state, "model": {key: tensor.clone() for key, tensor in state["model"].items()}}  # without fingerprints


def two_models(folder: Path) -> None:
    """Write model.pt and other.pt, two models of one run, with 60 words."""
    state = state_of(60, None)
    state["model"][provenance.KEY] = provenance.encode({"rule": "reference", "seed": 1})
    Checkpoint(state).write(folder / "model.pt")
    state["model"]["decoder.layers.0.fc1.bias"] += 1
    Checkpoint(state).write(folder / "other.pt")


class Model:
    """A checkpoint with its dictionaries next to it."""

    def __init__(self, folder, state, source, target):
        folder.mkdir()
        self.path, self.state, self.source, self.target = folder / "model.pt", state, source, target
        source.save(str(folder / "dict.de.txt"))
        target.save(str(folder / "dict.en.txt"))
        Checkpoint(state).write(self.path)

    def export(self, engine, output, **options):
        return folder.export(Checkpoint.read(self.path), engine, output, **options)


@pytest.fixture
def model_of(tmp_path):
    """model_of(number of words, the target's if it has its own, arch, options) -> a `Model` in a folder `model`."""

    def make(words=60, target=None, arch="transformer_admin", **options):
        source = reference.dictionary(words)
        target = source if target is None else reference.dictionary(target, 7)
        return Model(tmp_path / "model", state_of(source, target, arch, **options), source, target)

    return make


def left_over(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "model")


# -- the same function -----------------------------------------------------------------------------------------------

BOTH = {
    "tied": {},
    "two dictionaries": {"target": 50, **UNTIED},
    "output tied": {"target": 50, **UNTIED, "share_decoder_input_output_embed": True},
    "nothing tied, one size": {"target": 60, **UNTIED},
    "sizes": {"encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_embed_dim": 48},
    "gelu": {"activation_fn": "gelu"},
    "gelu_accurate": {"activation_fn": "gelu_accurate"},
    "unscaled": {"no_scale_embedding": True},
    "stock": {"arch": "transformer"},
    "iwslt": {"arch": "transformer_iwslt_de_en"},
}
CTRANSLATE2 = {
    "normalised embeddings": {"layernorm_embedding": True},
    "learned positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "pre-ln": {"arch": "transformer", "encoder_normalize_before": True, "decoder_normalize_before": True},
}


@pytest.mark.parametrize("name", [*BOTH, *CTRANSLATE2])
def test_ctranslate2_computes_the_same(model_of, tmp_path, name):
    """Do log-probabilities equal the unfolded model's?"""
    ctranslate2 = needs("ctranslate2")
    model = model_of(**{**BOTH, **CTRANSLATE2}[name])
    model.export("ctranslate2", tmp_path / "out")
    tokens, lengths, prev = reference.batch(words=46)
    translator = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    source = [[model.source[n] for n in row.tolist() if n > 3] for row in tokens]
    target = [[model.target[n] for n in row.tolist() if n > 3] for row in prev]
    with torch.no_grad():
        expected = build(Checkpoint(model.state))(tokens, lengths, prev)[0].log_softmax(-1)
    for row, result in enumerate(translator.score_batch(source, target)):
        numbers = [model.target.index(unit) for unit in target[row]] + [2]
        scores = torch.tensor([expected[row, step, number] for step, number in enumerate(numbers)])
        # five layers round float32 sums that are added in another order
        assert (torch.tensor(result.log_probs) - scores).abs().max() < 1e-4


FSMT = {"unequal heads": {"decoder_attention_heads": 2, "activation_fn": "relu_squared"}}


@pytest.mark.parametrize("name", [*BOTH, *FSMT])
def test_transformers_compute_the_same(model_of, tmp_path, name, caplog):
    """Do FSMT's log-probabilities equal the unfolded model's, and does FSMT load without warnings?"""
    transformers = needs("huggingface")
    model = model_of(**{**BOTH, **FSMT}[name])
    model.export("huggingface", tmp_path / "out")
    transformers.utils.logging.enable_propagation()
    try:
        fsmt = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    finally:
        transformers.utils.logging.disable_propagation()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    tokens, lengths, prev = reference.batch(words=46)
    right = torch.ones_like(tokens)
    for row, sentence in zip(right, tokens):
        row[: sentence.ne(1).sum()] = sentence[sentence.ne(1)]
    assert right[1, -1] == 1 and tokens[1, 0] == 1
    with torch.no_grad():
        expected = build(Checkpoint(model.state))(tokens, lengths, prev)[0].log_softmax(-1)[prev.ne(1)]
        for padded in (tokens, right):
            logits = fsmt(padded, attention_mask=padded.ne(1), decoder_input_ids=prev, use_cache=False).logits
            # five layers round float32 sums that are added in another order
            assert (logits.log_softmax(-1)[prev.ne(1)] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stock_model_of_fairseq_0122_is_exported(model_of, tmp_path, engine):
    """Does a half-precision checkpoint of fairseq 0.12.2 export? It has untrained entries that today's models lack."""
    needs(engine)
    model = model_of(arch="transformer")
    model.state["model"] = {key: tensor.half() for key, tensor in model.state["model"].items()}
    model.state["model"]["encoder.layers.1.in_proj_weight"] = torch.full((192, 64), float("nan"))
    Checkpoint(model.state).write(model.path)
    model.export(engine, tmp_path / "out")
    assert left_over(tmp_path) == ["out"]


def test_beam_search_of_the_generation_config_is_fairseqs(model_of, tmp_path):
    """Does generate() with the folder's settings give the translations of fairseq-generate's defaults?"""
    transformers = needs("huggingface")
    exported = model_of()
    exported.export("huggingface", tmp_path / "out")
    fsmt = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    tokens = reference.batch(words=56)[0]
    translations = fsmt.generate(tokens, attention_mask=tokens.ne(1))
    model = build(Checkpoint(exported.state))
    generator = SequenceGenerator([model], exported.target, beam_size=5, max_len_a=0, max_len_b=200)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(1).sum(1)}}
    expected = [hypotheses[0]["tokens"].tolist() for hypotheses in generator.generate([model], sample)]
    assert [[n for n in row.tolist() if n != 1][1:] for row in translations] == expected


def test_generation_gives_no_padding(model_of, tmp_path):
    """As in fairseq's search, padding is never generated, even if it is always likeliest."""
    transformers = needs("huggingface")
    model = model_of(target=50, **UNTIED)
    model.state["model"]["decoder.layers.1.final_layer_norm.bias"] += 2
    model.state["model"]["decoder.output_projection.weight"][PAD] = 0.2  # a logit of about 64 * 2 * 0.2
    Checkpoint(model.state).write(model.path)
    model.export("huggingface", tmp_path / "out")
    fsmt = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    tokens, lengths, _ = reference.batch(words=56)
    first = build(Checkpoint(model.state))(tokens, lengths, torch.full((len(tokens), 1), 2))[0][:, 0]
    assert first.argmax(1).eq(PAD).all(), "the model would not begin with it: nothing was tried"
    translations = fsmt.generate(tokens, attention_mask=tokens.ne(1), max_length=8)
    assert translations[:, 1].gt(2).all() and translations.ne(PAD).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_real_sentences_are_checked_too(corpus, tmp_path, engine):
    """With binarised data next to the dictionaries, is the validation set compared too, whatever the training task?"""
    needs(engine)
    source = Dictionary.load(str(corpus / "dict.a.txt"))
    state, path = state_of(source, source), tmp_path / "model.pt"
    other = {"_name": "translation_from_pretrained_bart", "source_lang": "a", "target_lang": "b", "langs": "a,b"}
    state["cfg"]["task"] |= other
    counted = []
    for data in (corpus, tmp_path / "plain"):
        data.mkdir(exist_ok=True)
        for name in ("dict.a.txt", "dict.b.txt"):
            (data / name).write_bytes((corpus / name).read_bytes())
        summary, _ = folder.export(Checkpoint(state, path), engine, tmp_path / f"out-{data.name}", Assets(path, data))
        counted.append(int(summary.split("log-probabilities of ")[1].split()[0]))
    valid = sum(len(line.split()) + 1 for line in (corpus.parent / "valid.b").read_text().splitlines())
    # transformers models are compared twice, with padding on either side
    assert counted[0] - counted[1] == valid * (2 if engine == "huggingface" else 1)


def test_an_int8_export_is_smaller_and_its_difference_is_said(model_of, tmp_path):
    needs("ctranslate2")
    model = model_of()
    for quantization in (None, "int8"):
        summary, _ = model.export("ctranslate2", tmp_path / str(quantization), quantization=quantization)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("None", "int8")]
    assert sizes[1] < 0.6 * sizes[0] and "as int8, here computed in int8" in summary


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_export_is_refused(model_of, tmp_path, monkeypatch, engine):
    """Is an export that computes another function refused, and its folder deleted?"""
    needs(engine)
    exported = model_of()
    module = ctranslate2 if engine == "ctranslate2" else huggingface
    convert = module.convert

    def wrong(model, *rest):
        key = "decoder.layers.1.encoder_attn.out_proj.bias"
        model.stock.weights[key] = model.stock.weights[key] + 0.01 * torch.arange(64)
        convert(model, *rest)

    monkeypatch.setattr(module, "convert", wrong)
    with pytest.raises(AdminError, match="more than 0.0001: the engine does not .* Nothing was written"):
        exported.export(engine, tmp_path / "out")
    assert left_over(tmp_path) == []
    exported.export(engine, tmp_path / "out", tolerance=100.0)
    assert left_over(tmp_path) == ["out"]


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_folder_is_filled_and_said_in_one_line(model_of, tmp_path, capfd, engine, monkeypatch):
    """The result is one line on stdout, notes are on stderr, and a missing package is one line with status 2."""
    needs(engine)
    out, command = tmp_path / "out", ["export", str(model_of().path), "--to", engine, "-o"]
    out.mkdir()
    assert cli.main([*command, str(out)]) == 0
    streams = capfd.readouterr()
    assert streams.out.startswith(f"{out}: ") and streams.out.count("\n") == 1 and "differ by up to" in streams.out
    assert ("no tokenizer was written: text.json was not found" in streams.err) == (engine == "huggingface")
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    positions = json.loads((out / "fingerprints.json").read_text())["positions"]
    assert positions == "48", "the smaller number, of the target"
    package = {"ctranslate2": "ctranslate2", "huggingface": "transformers"}[engine]
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main([*command, str(tmp_path / "other")]) == 2
    assert capfd.readouterr().err.startswith(f"fairseq-admin: {package} is not installed. Run pip install '{package}>=")
    assert left_over(tmp_path) == ["out"]


# -- the tokenizer ---------------------------------------------------------------------------------------------------

LINES = [
    "Der Arzt möchte 81 Tage in Vietnam bleiben.",
    "„Wohl-bekannt“ – sagte er… und ging, z.B. um 10:30 Uhr!",
    'A "well-known" man said: it\'s 5 % cheaper & 1,000.50 more <today> [sic] | #1',
    "全角：（１２３）。「Hallo」！",
    "  Und\u00a0geschützte \u200bLeerzeichen \x07 ",
    "Straße ÄÖÜ İstanbul naïve café",
    "&amp; &lt;b&gt; @-@ un@@ able </w> x@y.de http://a-b.c/d?e=f",
    "...",
    "x",
    "",
]


class TextModel:
    """A model whose dictionary and merges were learned from lines, as in the recipes."""

    def __init__(self, folder, lines, text, merges=60, rare=1):
        from recipes.steps import bpe

        folder.mkdir()
        tokens = [text.tokenise(line, text.source) for line in lines]
        (folder / "codes").write_text("".join(line + "\n" for line in bpe.learn(tokens, merges)), encoding="utf-8")
        text.write(folder / "text.json")
        self.units = BPE(folder / "codes").apply(tokens)
        self.words = Dictionary()
        for line in self.units:
            for unit in line.split():
                self.words.add_symbol(unit)
        self.words.finalize(nwords=len(self.words) - 4 - rare, padding_factor=8)
        for language in (text.source, text.target):
            self.words.save(str(folder / f"dict.{language}.txt"))
        self.folder, self.path, self.text = folder, folder / "model.pt", text
        state = state_of(self.words, self.words, encoder_layers=1, decoder_layers=1)
        state["cfg"]["task"] |= {"source_lang": text.source, "target_lang": text.target}
        Checkpoint(state).write(self.path)

    def numbers(self, units):
        return [self.words.index(unit) for unit in units.split()] + [2]


@pytest.mark.parametrize("lowercase", [False, True])
def test_tokenizer_gives_our_numbers_and_our_text(tmp_path, lowercase):
    """Does AutoTokenizer turn raw lines into our token numbers, also for unknown units, and decode them to our text?"""
    transformers = needs("huggingface")
    pytest.importorskip("sacremoses")
    pytest.importorskip("subword_nmt")
    # Drop one unit from the dictionary, so that it is unknown.
    model = TextModel(tmp_path / "text", LINES, Text("de", "en", lowercase, True, True, True), rare=20)
    summary, notes = folder.export(Checkpoint.read(model.path), "huggingface", tmp_path / "out")
    assert notes == [] and "FSMT with its tokenizer" in summary
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(tokenizer).__name__ == "FSMTTokenizer"
    for line, units in zip(LINES, model.units):
        # transformers removes "</s>" and similar tokens from raw text before FSMTTokenizer sees it. No other text is
        # special.
        assert tokenizer(line).input_ids == model.numbers(units), line
    assert any(model.words.unk() in model.numbers(units) for units in model.units)
    # Decode each line's known units, through fairseq's numbers and through transformers'.
    for units in model.units:
        numbers = model.numbers(units)
        known = " ".join(model.words[number] for number in numbers[:-1] if number > 3)
        kept = [number for number in numbers if number != model.words.unk()]
        plain = f"{known} ".replace("@@ ", "").rstrip()
        assert tokenizer.decode(kept, skip_special_tokens=True) == model.text.detokenise(plain)
    fsmt = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    batch = tokenizer(LINES[:2], return_tensors="pt", padding=True)
    assert all(isinstance(line, str) for line in tokenizer.batch_decode(fsmt.generate(**batch, max_length=9)))


def test_no_tokenizer_where_the_text_was_treated_otherwise(tmp_path, monkeypatch):
    """Its files are left out, with a reason, if text.json's settings or their effect differ."""
    needs("huggingface")
    pytest.importorskip("sacremoses")
    pytest.importorskip("subword_nmt")
    model = TextModel(tmp_path / "text", LINES, Text("de", "en", False, True, True, True))
    names = {"vocab-src.json", "vocab-tgt.json", "merges.txt", "tokenizer_config.json"}

    def note(out):
        _, notes = folder.export(Checkpoint.read(model.path), "huggingface", tmp_path / out)
        assert not names & {path.name for path in (tmp_path / out).iterdir()}
        assert {"codes", "text.json", "config.json", "model.safetensors"} <= {
            p.name for p in (tmp_path / out).iterdir()
        }
        return notes[0]

    write = tokenizer.write

    def without_merges(model, folder):
        written = write(model, folder)
        (folder / "merges.txt").write_text("")
        return written

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "write", without_merges)
        assert "FSMTTokenizer splits" in note("other")
    joined = TextModel(tmp_path / "joined", [*LINES, "نمی\u200cداند " * 5], model.text)
    reason = folder.export(Checkpoint.read(joined.path), "huggingface", tmp_path / "persian")[1][0]
    assert "FSMTTokenizer removes zero-width joiners" in reason
    Text("de", "en", False, False, True, False).write(model.folder / "text.json")
    assert "always does what text.json has off (normalise, escape)" in note("off")
