"""The language model under fairseq's commands: trained in every mode, resumed, evaluated, generated with, folded."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import language
import numpy
import pytest
import torch
from conftest import ROOT, Run, run_module
from fairseq import options as fairseq_options
from fairseq import tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from language import profile_by_hand
from test_modes import assert_same_state, same

import fairseq_admin  # noqa: F401  (registers the model)
from fairseq_admin import cli
from fairseq_admin.architectures.language_model import TransformerLMAdminModel
from fairseq_admin.checkpoints import files
from fairseq_admin.method import provenance, state_dict
from fairseq_admin.method.schemes import SCHEMES

TRAIN = (
    "--user-dir fairseq_admin --task language_modeling --arch transformer_lm_admin_tiny --optimizer radam --lr 1e-3 "
    "--lr-scheduler inverse_sqrt --warmup-updates 10 --criterion cross_entropy --max-tokens 300 --tokens-per-sample 30 "
    "--sample-break-mode complete --cpu --no-epoch-checkpoints --share-decoder-input-output-embed --log-format simple "
    "--log-interval 1 --num-workers 0"
).split()
QUICK = ["--disable-validation", "--max-update", 10]
EVAL = "--gen-subset valid --max-tokens 300 --tokens-per-sample 30 --sample-break-mode complete --cpu".split()
ADAPTIVE = (
    "--adaptive-input --adaptive-input-cutoff 15,30 --adaptive-softmax-cutoff 15,30 --tie-adaptive-weights "
    "--tie-adaptive-proj --criterion adaptive_loss --ddp-backend legacy_ddp"
)
# Under these, the output matrix is not the input's.
UNTIED = [option for option in TRAIN if option != "--share-decoder-input-output-embed"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language.binarised(tmp_path_factory.mktemp("words"))


def train(data: Path, folder: Path, *arguments: object, options: list[str] = TRAIN) -> Run:
    """Train, or resume, in a folder; fails the test if the command fails."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log{len(list(folder.glob('log*')))}"
    done = run_module("fairseq_cli.train", data, *options, "--save-dir", folder, *arguments, log=log)
    assert done.status == 0, done.output[-4000:]
    return done


def last(folder: Path) -> dict[str, Any]:
    return files.read(folder / "checkpoint_last.pt")


MODES = {
    "fp32": "",
    "memory-efficient fp16": "--memory-efficient-fp16",
    "amp": "--amp",
    "layerdrop": "--decoder-layerdrop 0.5 --optimizer adam",
    "checkpointed activations": "--checkpoint-activations",
    "ema": "--store-ema --ema-decay 0.9",
    "update-freq": "--update-freq 2 --max-tokens 150",
    "adaptive": ADAPTIVE,
    "paper": "--admin-init paper",
    "log": "--admin-init log",
    "constant": "--admin-init constant",
    "blocks": "--sample-break-mode none",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_mode(name: str, words: Path, tmp_path: Path) -> None:
    """Is ω in the checkpoint, profiled once, and does a run stopped in mid-epoch go on bit for bit?"""
    options = [*QUICK, *MODES[name].split()]
    given = UNTIED if name == "adaptive" else TRAIN
    whole = train(words, tmp_path / "whole", *options, "--save-interval-updates", 7, options=given)
    state = last(tmp_path / "whole")
    omegas = [omega.mean().item() for omega in state_dict.omegas(state["model"])["decoder"].values()]
    record = provenance.decode(state["model"][provenance.KEY])
    measured = name not in ("log", "constant")
    assert whole.output.count("profiled by rule") == measured and len(omegas) == 4
    assert record["rule"] == (name if name in ("paper", "log", "constant") else "reference")
    if measured:
        assert omegas[0] == 1 and omegas[1] > 1.1 and record["tokens"] > 100
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint_1_7.pt", tmp_path / "resumed/checkpoint_last.pt")
    resumed = train(words, tmp_path / "resumed", *options, options=given)
    assert "7 updates" in resumed.output and "profiled by rule" not in resumed.output
    assert_same_states(last(tmp_path / "resumed"), state)


def assert_same_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    """As in test_modes, except for its count of a translation model's entries."""
    assert len(a["model"]) > 30
    filler = {f"filler{n}": torch.zeros(1) for n in range(50)}
    assert_same_state(*({**state, "model": {**filler, **state["model"]}} for state in (a, b)))


@pytest.fixture(scope="module")
def trained(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with last.pt, of a short run, and folded.pt."""
    folder = tmp_path_factory.mktemp("trained")
    train(words, folder, "--max-epoch", 12)
    os.rename(folder / "checkpoint_last.pt", folder / "last.pt")
    assert cli.main(["fold", str(folder / "last.pt"), "-o", str(folder / "folded.pt"), "--data", str(words)]) == 0
    return folder


def test_omega_of_the_first_batch(words: Path, tmp_path: Path) -> None:
    """Does the command line measure what the plain loop measures on the first batch of a model built the same way?"""
    train(words, tmp_path / "run", "--disable-validation", "--max-update", 1, "--dropout", 0)
    given = [str(words), *TRAIN[2:], "--dropout", "0"]
    cfg = convert_namespace_to_omegaconf(
        fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), given)
    )
    utils.set_torch_seed(1)
    numpy.random.seed(1)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).train()
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_tokens=300, required_batch_size_multiple=8, seed=1)
    first = next(batches.next_epoch_itr(shuffle=True))["net_input"]["src_tokens"]
    expected = profile_by_hand(model, first, "reference")
    found = files.read(tmp_path / "run/checkpoint_last.pt")["model"]
    profiled = [
        found[f"decoder.layers.{layer}.{norm}_layer_norm.omega_init"][0].item()
        for layer in (0, 1)
        for norm in ("self_attn", "final")
    ]
    # The profile sums some 10^4 float32 numbers pairwise, the twin in float64.
    assert profiled == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing fairseq_admin fails, wherever it is installed."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "fairseq_admin").mkdir()
    (folder / "fairseq_admin/__init__.py").write_text("raise ImportError('the plugin was asked for')\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def perplexity(output: str) -> float:
    return float(re.search(r"Perplexity: ([0-9.]+)", output)[1])


def test_eval_lm_with_and_without_the_plugin(words, trained, without_plugin, tmp_path, run) -> None:
    """Does stock fairseq-eval-lm give the folded model the perplexity of the unfolded one, a learned one?"""
    ours = run("fairseq_cli.eval_lm", words, "--user-dir", "fairseq_admin", "--path", trained / "last.pt", *EVAL)
    assert ours.status == 0, ours.output[-3000:]
    command = [sys.executable, "-m", "fairseq_cli.eval_lm", words, "--path", trained / "folded.pt", *EVAL]
    stock = subprocess.run(command, env=without_plugin, cwd=tmp_path, capture_output=True, text=True)
    assert stock.returncode == 0, stock.stderr[-3000:]
    found = perplexity(ours.output)
    # Printed with two decimals.
    assert found == pytest.approx(perplexity(stock.stdout + stock.stderr), abs=0.011) and found < 25
    command[command.index(trained / "folded.pt")] = trained / "last.pt"
    assert subprocess.run(command, env=without_plugin, cwd=tmp_path, capture_output=True).returncode != 0


def test_generate_and_hub(words: Path, trained: Path, run: Callable[..., Run], monkeypatch) -> None:
    """Do fairseq-generate and from_pretrained continue a text?"""
    # fairseq's hub for language models asks numpy for this alias of int, which numpy 2 no longer has.
    monkeypatch.setattr(numpy, "compat", SimpleNamespace(long=int), raising=False)
    given = ["--user-dir", "fairseq_admin", "--task", "language_modeling", "--gen-subset", "test", "--cpu"]
    given += ["--path", trained / "last.pt", "--beam", 2, "--max-len-b", 12, "--prefix-size", 2]
    given += ["--required-batch-size-multiple", 1, "--max-tokens", 300, "--num-workers", 0]
    given += ["--sample-break-mode", "complete", "--tokens-per-sample", 30]
    done = run("fairseq_cli.generate", words, *given)
    assert done.status == 0, done.output[-3000:]
    # 20 sentences in blocks of up to 30 words.
    assert len(re.findall(r"^H-\d+\t[-.0-9]+\tw\d+ w\d+", done.output, re.MULTILINE)) == 10
    hub = TransformerLMAdminModel.from_pretrained(str(trained), "last.pt", str(words))
    assert type(hub.models[0]) is TransformerLMAdminModel and hub.models[0].profiled
    assert hub.sample("w1 w4", beam=2, max_len_b=8).startswith("w1 w4")
    assert hub.score("w1 w4 w7")["positional_scores"].isfinite().all()


def test_omega_average_fold(words: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    state = files.read(trained / "last.pt")
    state["model"]["decoder.layers.1.fc1.bias"] = state["model"]["decoder.layers.1.fc1.bias"] + 0.01
    files.write(state, tmp_path / "other.pt")
    both = [str(trained / "last.pt"), str(tmp_path / "other.pt")]
    assert cli.main(["average", *both, "-o", str(tmp_path / "a.pt")]) == 0
    capsys.readouterr()
    assert cli.main(["omega", str(tmp_path / "a.pt"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["sublayer"] for row in table["decoder"]] == ["self_attn", "ffn"] * 2 and "encoder" not in table
    assert table["provenance"]["rule"] == "reference"
    assert cli.main(["fold", str(tmp_path / "a.pt"), "-o", str(tmp_path / "f.pt")]) == 0
    a, b = (files.read(path)["model"] for path in (trained / "folded.pt", tmp_path / "f.pt"))
    assert [key for key in a if not torch.allclose(a[key], b[key])] == ["decoder.layers.1.fc1.bias"]


@pytest.mark.parametrize("verb", [["export", "--to", "ctranslate2", "-o", "out"], ["translate"]])
@pytest.mark.parametrize("name", ["last.pt", "folded.pt"])
def test_no_translation_model(verb, name, trained, tmp_path, capsys, monkeypatch) -> None:
    """Does what only a translation model can do end in one line?"""
    if verb[0] == "export":
        pytest.importorskip("ctranslate2", reason="its lack is told first")
    monkeypatch.chdir(tmp_path)
    assert cli.main([verb[0], str(trained / name), *verb[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fairseq-admin: ") and error.count("\n") == 1 and "expected" in error, error
    assert not (tmp_path / "out").exists()


NOT_FOLDED = {"rezero", "t-fixup", "t-fixup-code", "fixup", "b2t", "b2t-code", "residual", "peri-ln", "keel"}
FOLDED = [name for name in SCHEMES if name not in NOT_FOLDED]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str, words: Path, tmp_path: Path, without_plugin, capsys) -> None:
    """Is every scheme trained, resumed, and either folded into what stock fairseq loads or refused in one line?"""
    given = ["--disable-validation", "--admin-scheme", scheme]
    train(words, tmp_path, *given, "--max-update", 4)
    train(words, tmp_path, *given, "--max-update", 8)
    capsys.readouterr()
    status = cli.main(
        ["fold", str(tmp_path / "checkpoint_last.pt"), "-o", str(tmp_path / "f.pt"), "--data", str(words)]
    )
    said = capsys.readouterr()
    if scheme not in FOLDED:
        assert status == 2 and f"--admin-scheme {scheme}, whose layers no stock Transformer has" in said.err
        return
    assert status == 0 and f"{tmp_path / 'f.pt'}: transformer_lm, fp32; log-probabilities of" in said.out, said.err
    state = files.read(tmp_path / "f.pt")
    assert state["args"]["arch"] == "transformer_lm" and not [name for name in state["args"] if "admin" in name]
    assert state["args"]["decoder_normalize_before"] == (SCHEMES[scheme].norm[1] == "before")
    assert not [key for key in state["model"] if re.search("omega|scale|admin", key)]


@pytest.mark.parametrize("options", ["--layernorm-embedding", "--admin-init constant", ADAPTIVE])
def test_folding_with(options: str, words: Path, tmp_path: Path) -> None:
    """What comes before and after the stack does not get in the way. (The command compares the functions itself.)"""
    given = UNTIED if options == ADAPTIVE else TRAIN
    train(words, tmp_path, "--disable-validation", "--max-update", 8, *options.split(), options=given)
    command = ["fold", str(tmp_path / "checkpoint_last.pt"), "-o", str(tmp_path / "f.pt"), "--data", str(words)]
    assert cli.main(command) == 0


@pytest.mark.slow
def test_two_processes(words: Path, tmp_path: Path, start) -> None:
    """Do two processes profile the ω that one profiles, and go on together?"""
    train(words, tmp_path / "one", "--disable-validation", "--max-update", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "two").mkdir()
    running = []
    for rank in (0, 1):
        given = ["--save-dir", tmp_path / "two", *QUICK, "--distributed-world-size", 2, "--distributed-rank", rank]
        given += ["--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-backend", "gloo"]
        given += ["--distributed-no-spawn", "--ddp-backend", "legacy_ddp"]
        running.append(start("fairseq_cli.train", words, *TRAIN, *given, log=tmp_path / f"rank{rank}"))
    for process in running:
        process.join(120)
        assert process.exitcode == 0, (tmp_path / "rank0").read_text()[-3000:]
    one, two = last(tmp_path / "one")["model"], last(tmp_path / "two")["model"]
    names = [key for key in one if key.endswith("omega_init")]
    assert len(names) == 4 and all(same(one[key], two[key]) for key in names)


HYDRA = """# @package _group_
common: {{cpu: true, user_dir: {user_dir}, {common}}}
task: {{_name: language_modeling, data: {data}, tokens_per_sample: 30, sample_break_mode: complete}}
criterion: cross_entropy
dataset: {{max_tokens: 300, num_workers: 0, disable_validation: true}}
optimization: {{max_update: 10, lr: [0.001]}}
optimizer: {{_name: radam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 10}}
checkpoint: {{save_dir: {folder}, no_epoch_checkpoints: true}}
model: {{_name: {model}, share_decoder_input_output_embed: true}}
hydra: {{run: {{dir: {folder}}}}}
"""


def hydra_train(words: Path, folder: Path, model: str, common: str = "seed: 1") -> Run:
    folder.mkdir()
    text = HYDRA.format(user_dir=ROOT / "fairseq_admin", data=words, folder=folder, model=model, common=common)
    (folder / "run.yaml").write_text(text)
    done = run_module("fairseq_cli.hydra_train", "--config-dir", folder, "--config-name", "run", log=folder / "log")
    assert done.status == 0, done.output[-4000:]
    return done


SIZED = (
    "transformer_lm_admin, decoder_layers: 2, decoder_embed_dim: 64, decoder_ffn_embed_dim: 128, "
    "decoder_attention_heads: 4"
)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer_lm_admin_tiny", SIZED])
def test_hydra(model: str, words: Path, tmp_path: Path) -> None:
    """Does fairseq-hydra-train do what fairseq-train does, with a preset's name and with sizes?"""
    train(words, tmp_path / "plain", *QUICK)
    done = hydra_train(words, tmp_path / "hydra", model)
    assert done.output.count("profiled by rule reference") == 1
    assert same(last(tmp_path / "hydra")["model"], last(tmp_path / "plain")["model"])


@pytest.mark.slow
def test_bf16(words: Path, tmp_path: Path) -> None:
    """Is ω in bfloat16, which only fairseq-hydra-train can train in on a CPU, that of float32, rounded?"""
    train(words, tmp_path / "plain", *QUICK)
    bf16 = "bf16: true, memory_efficient_bf16: true"
    done = hydra_train(words, tmp_path / "half", "transformer_lm_admin_tiny", bf16)
    assert done.output.count("profiled by rule reference") == 1
    one, other = last(tmp_path / "plain")["model"], last(tmp_path / "half")["model"]
    for key in [key for key in one if key.endswith("omega_init")]:
        # bfloat16 has 8 bits; weights and activations are rounded, too, and ω when it is stored.
        torch.testing.assert_close(other[key], one[key], rtol=2 * 2**-8, atol=0)


def test_refusals(words: Path, trained: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """Is a user's mistake one line and status 2?"""
    given = [words, *TRAIN, "--save-dir", tmp_path, "--max-update", 1]
    for more, said in (
        (["--decoder-normalize-before"], "--decoder-normalize-before was given"),
        (["--restore-file", trained / "last.pt", "--admin-scheme", "deepnorm"], "the checkpoint is of --admin-scheme"),
        (["--restore-file", trained / "last.pt", "--decoder-layers", 3], "the checkpoint's decoder has 2 layers"),
    ):
        done = run("fairseq_cli.train", *given, *more)
        end = done.output.splitlines()[-1]
        assert done.status == 2 and end.startswith("fairseq-admin: ") and said in end, done.output[-3000:]
        assert "Traceback" not in done.output
    assert not list(tmp_path.glob("*.pt"))


def test_stock_checkpoint_is_fine_tuned(words: Path, trained: Path, tmp_path: Path) -> None:
    """Does a stock Post-LN model's training go on as Admin's, from where it was?"""
    done = train(words, tmp_path, "--finetune-from-model", trained / "folded.pt", "--max-update", 1)
    assert "every omega is 1" in done.output and "profiled by rule" not in done.output
    loss = float(re.search(r"train_inner \| .*?loss=([0-9.]+)", done.output)[1])
    losses = [float(found) for found in re.findall(r"loss=([0-9.]+)", (trained / "log0").read_text())]
    assert abs(loss - losses[-1]) < 0.5 < losses[0] - losses[-1]
