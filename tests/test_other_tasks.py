"""Uses of a model besides translation with fairseq-train. They come from users' scripts and fairseq's own tests."""

from __future__ import annotations

import argparse
import copy
import shutil
from argparse import Namespace
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from conftest import TRAIN, Completed, generate, run_module
from fairseq.models import build_model
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

from fairseq_admin import MaskedLMAdminModel, TransformerAdminModel, TransformerLMAdminModel
from fairseq_admin.architectures.config import AdminOptions, TransformerAdminConfig, TransformerLMAdminConfig
from fairseq_admin.checkpoints import files
from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance

OURS = [TransformerAdminModel, TransformerLMAdminModel, MaskedLMAdminModel]
SIZES = reference.sizes(2, 2, 16, 32, heads=2)
SMALL = [option for option in TRAIN if option != "--share-all-embeddings"] + ["--max-update", 2]


def task() -> SimpleNamespace:
    words = reference.dictionary(20)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, max_positions=lambda: 64)


# Hand-made models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", OURS)
def test_missing_options_take_their_defaults(arch: type) -> None:
    """In a Namespace whose parser suppresses them, as in fairseq's tests."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    arch.add_args(parser)
    model = arch.build_model(parser.parse_args([], Namespace(**SIZES)), task())
    assert not model.profiled and model.cfg.admin_scheme == "admin" and model.cfg.admin_profile_tokens == 8192
    assert model.cfg.dropout == 0.1


@pytest.mark.parametrize(
    "arch, config",
    [
        (TransformerAdminModel, TransformerAdminConfig),
        (TransformerLMAdminModel, TransformerLMAdminConfig),
        (MaskedLMAdminModel, make_dataclass("Masked", [(name, int, 0) for name in SIZES], bases=(AdminOptions,))),
    ],
)
def test_a_namespace_a_dataclass_and_omegaconf_build_the_same_model(arch: type, config: type) -> None:
    """A dataclass has options that stand for those of the trainer and the task, which are missing here."""
    known = config.__dataclass_fields__.keys()
    options = {name: size for name, size in SIZES.items() if name in known} | {"admin_monitor": 7}
    forms: list[object] = [Namespace(**options), config(**options), OmegaConf.create(options)]
    forms.append(OmegaConf.structured(forms[1]))
    built, states = [], []
    for form in forms:
        torch.manual_seed(1)
        built.append(arch.build_model(form, task()))
        states.append({name: tensor for name, tensor in built[-1].state_dict().items() if "_float_tensor" not in name})
    for model, state in zip(built, states):
        assert vars(model.cfg) == vars(built[0].cfg) and model.monitor.every == 7
        assert state.keys() == states[0].keys() and all(torch.equal(state[name], states[0][name]) for name in state)
    assert forms[:2] == [Namespace(**options), config(**options)], "left unchanged"


def test_fairseqs_nested_config_builds_the_model() -> None:
    cfg = TransformerConfig.from_namespace(Namespace(**SIZES, dropout=0.3))
    for form in (cfg, OmegaConf.structured(cfg), OmegaConf.create({"encoder": {"layers": 1}, "dropout": 0.3})):
        model = TransformerAdminModel.build_model(form, task())
        assert model.cfg.dropout == 0.3 and model.cfg.decoder.embed_dim == model.cfg.encoder.embed_dim
        assert len(model.encoder.layers) == model.cfg.encoder.layers == form.encoder.layers


def test_a_masked_model_knows_the_trainers_options_under_hydra() -> None:
    """Does the model know the trainer's options? (Otherwise a long update would look like many skipped ones.)"""
    trainer = {"optimization": {"update_freq": [128]}, "common": {"log_interval": 10}}
    model = build_model(OmegaConf.create({**trainer, "model": {"_name": "masked_lm_admin_tiny"}}).model, task())
    assert (model.skipped_updates.batches_per_update, model.monitor.every) == (128, 10)
    assert build_model(OmegaConf.create({"_name": "masked_lm_admin_tiny"}), task()).monitor.every == 100


@pytest.mark.parametrize("arch, stock", [(TransformerAdminModel, TransformerModel), (MaskedLMAdminModel, RobertaModel)])
def test_model_args_are_those_of_the_stock_model(arch: type, stock: type) -> None:
    flat = {**SIZES, "dropout": 0.3, "encoder_layers_to_keep": "1", "max_source_positions": 64}
    ours, expected = (cls.build_model(Namespace(**flat), task()).args for cls in (arch, stock))
    assert ours.encoder_layers == expected.encoder_layers == 1
    assert ours.encoder_embed_dim == 16 and ours.dropout == 0.3
    assert {name for name, value in vars(expected).items() if getattr(ours, name) != value} == set()


# Training without the model------------------------------------------------------------------------------------------


def test_stacks_trained_before_omega_is_there() -> None:
    """A stack that trains without the model's forward, which profiles, is refused until omega is set."""
    model, (src, lengths, prev) = reference.build("transformer_admin", **reference.TINY), reference.batch()
    encoded = model.eval().encoder(src, lengths)
    model.train()
    with pytest.raises(AdminError, match="without the model, whose first call profiles omega. Give --admin-init log"):
        model.encoder(src, lengths)
    with pytest.raises(AdminError, match="whose first call profiles omega"):
        model.decoder.extract_features(prev, encoder_out=encoded)
    with torch.no_grad():
        model.encoder(src, lengths)
    other = copy.deepcopy(model)
    model(src, lengths, prev)
    model.encoder(src, lengths)
    with pytest.raises(AdminError):
        other.encoder(src, lengths)
    other.load_state_dict(model.state_dict())
    other.encoder(src, lengths)


@pytest.mark.parametrize("options", [{"admin_init": "log"}, {"admin_scheme": "deepnorm"}])
def test_rules_without_a_profile_train_without_the_model(options: dict[str, str]) -> None:
    model, (src, lengths, _) = reference.build("transformer_admin", **reference.TINY, **options), reference.batch()
    model.encoder(src, lengths)


@pytest.mark.parametrize("options", ["cfg", "args"])
def test_guided_alignment_gets_attention_and_gradients(options: str) -> None:
    """With guided alignment, a model gives the last decoder layer's attention in training, for the criterion."""
    guided = SimpleNamespace(**vars(task()), **{options: TranslationConfig(load_alignments=True)})
    attentions, gradients = [], []
    for fast in ("on", "off"):
        torch.manual_seed(1)
        args = Namespace(**SIZES, admin_fast=fast, dropout=0.0, attention_dropout=0.0)
        model = TransformerAdminModel.build_model(args, guided).train()
        attentions += model(*reference.batch(words=20))[1]["attn"]
        attentions[-1].square().sum().backward()
        gradients.append(model.decoder.layers[-1].encoder_attn.q_proj.weight.grad)
    torch.testing.assert_close(*attentions, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


# Tasks from the command line -----------------------------------------------------------------------------------------


def train(data: Path, folder: Path, *arguments: object) -> Completed:
    return run_module("fairseq_cli.train", data, *SMALL, "--save-dir", folder, *arguments, log=folder.parent / "log")


def check_trained(run: Completed, folder: Path) -> None:
    """Check that a run ended, profiled once, and then learned omega."""
    assert run.status == 0 and run.output.count("profiled by rule reference") == 1, run.output[-3000:]
    state = files.read(folder / "checkpoint_last.pt")["model"]
    assert provenance.decode(state[provenance.KEY])["rule"] == "reference"
    assert state["decoder.layers.1.final_layer_norm.omega_init"][0] > 1.1


def test_many_languages_train_and_generate(corpus: Path, tmp_path: Path) -> None:
    """translation_multi_simple_epoch trains in both directions, and generates."""
    langs = "--task translation_multi_simple_epoch --lang-pairs a-b,b-a --encoder-langtok src --decoder-langtok".split()
    folder = tmp_path / "run"
    sampled = "--sampling-method temperature --sampling-temperature 1.5 --virtual-epoch-size 200".split()
    check_trained(train(corpus, folder, *langs, *sampled), folder)
    options = [*langs, "--source-lang", "b", "--target-lang", "a"]
    assert len(generate(corpus, folder / "checkpoint_last.pt", *options, log=tmp_path / "log")) == 20


def test_online_backtranslation_trains(corpus: Path, tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    for lang in "ab":
        (data / lang).mkdir(parents=True)
        for path in corpus.glob(f"*.a-b.{lang}.*"):
            shutil.copy(path, data / lang / f"{path.name.split('.')[0]}{path.suffix}")
            shutil.copy(path, data)
    (data / "dict.txt").write_text("__a__ 1\n__b__ 1\n" + (corpus / "dict.a.txt").read_text())
    options = "--task online_backtranslation --mono-langs a,b --valid-lang-pairs a-b --share-all-embeddings".split()
    check_trained(train(data, folder, *options), folder)


MOE = "--task translation_moe --method hMoElp --mean-pool-gating-network --num-experts 3 --share-all-embeddings"


def test_mixture_of_experts_needs_a_rule_by_depth(corpus: Path, tmp_path: Path) -> None:
    """Mixture of experts never calls the model, so a rule that profiles is refused. With another rule, it generates."""
    (tmp_path / "both").mkdir()
    plugins = "import fairseq_admin\nfrom fairseq.examples.translation_moe import translation_moe_src\n"
    (tmp_path / "both/__init__.py").write_text(plugins)
    command_line, folder = [*MOE.split(), "--user-dir", tmp_path / "both"], tmp_path / "run"
    refused = train(corpus, folder, *command_line)
    last = refused.output.splitlines()[-1]
    assert refused.status == 2 and "Traceback" not in refused.output and last.startswith("fairseq-admin: "), last
    assert "whose first call profiles omega" in last and "--admin-init log" in last
    assert train(corpus, folder, *command_line, "--admin-init", "log").status == 0
    options = [option for option in command_line if option != "--share-all-embeddings"]
    options += ["--gen-expert", 1]
    assert len(generate(corpus, folder / "checkpoint_last.pt", *options, log=tmp_path / "log")) == 20
