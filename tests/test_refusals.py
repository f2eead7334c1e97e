"""What cannot work is refused with status 2 and one clear last line that names the option, without a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from conftest import ROOT, TRAIN, Run, run_module
from fairseq import options as fairseq_options

import fairseq_admin  # noqa: F401  (registers the model)
from fairseq_admin.checkpoints import files
from fairseq_admin.errors import AdminError
from fairseq_admin.method.profiling import profile


def check_refusal(done: Run, *parts: str) -> None:
    """Status 2, no traceback, and every part in the last line."""
    last = done.output.splitlines()[-1]
    assert done.status == 2 and last.startswith("fairseq-admin: "), done.output[-3000:]
    assert "Traceback" not in done.output
    for part in parts:
        assert part in last


OPTIONS = {
    "--encoder-normalize-before": ["--encoder-normalize-before", "Post-LN"],
    "--admin-profile-tokens 0": ["--admin-profile-tokens is 0", "at least 1"],
    "--admin-max-skipped-updates -1": ["--admin-max-skipped-updates is -1", "at least 0"],
    "--base-layers 1": ["--base-layers 1"],
    "--decoder-layers-to-keep 0,2": ["--decoder-layers-to-keep is 0,2", "from 0 to 1"],
}


@pytest.mark.parametrize("given", OPTIONS)
def test_options(given: str, corpus: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """Are the option and what was expected named?"""
    done = run("fairseq_cli.train", corpus, *TRAIN, *given.split(), "--save-dir", tmp_path, "--max-update", 1)
    check_refusal(done, *OPTIONS[given])
    assert not list(tmp_path.glob("*.pt"))


SHARDED = ["transformer_admin", "transformer_lm_admin", "masked_lm_admin", "deeper_admin"]


@pytest.mark.parametrize("arch", [*SHARDED, *(f"{name}_tiny" for name in SHARDED)])
def test_fully_sharded(arch: str) -> None:
    """Refused with the command line, before any data is read."""
    task = "translation" if arch.startswith("transformer_admin") else "language_modeling"
    given = ["data", "--task", task, "--arch", arch, "--ddp-backend"]
    parser = fairseq_options.get_training_parser()
    with pytest.raises(AdminError, match="^--ddp-backend fully_sharded was given.* Leave it out"):
        fairseq_options.parse_args_and_arch(parser, [*given, "fully_sharded"])
    fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*given, "legacy_ddp"])


def test_unknown_rule(corpus: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """Does the command line list the rules there are? (argparse refuses it: usage, one line, status 2.)"""
    done = run("fairseq_cli.train", corpus, *TRAIN, "--admin-init", "fixup", "--save-dir", tmp_path)
    last = done.output.splitlines()[-1]
    assert done.status == 2 and "argument --admin-init: invalid choice: 'fixup'" in last and "reference" in last
    assert "Traceback" not in done.output


HYDRA = """# @package _group_
common: {{cpu: true, user_dir: {user_dir}}}
task: {{_name: translation, data: {corpus}}}
criterion: label_smoothed_cross_entropy
dataset: {{max_tokens: 300}}
optimization: {{max_update: 1, lr: [0.001]}}
optimizer: {{_name: radam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 10}}
checkpoint: {{save_dir: {folder}}}
model: {{_name: transformer_admin_tiny, {model}}}
hydra: {{run: {{dir: {folder}}}}}
"""


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("admin_profile_tokens: 0", ["--admin-profile-tokens is 0"]),
        ("admin_init: fixup", ["fixup", "reference", "paper", "log", "constant"]),
    ],
)
def test_options_under_hydra(model: str, parts: list[str], corpus: Path, tmp_path: Path) -> None:
    """Does fairseq-hydra-train say the same? (hydra catches every error and shows it in its own way.)"""
    text = HYDRA.format(user_dir=ROOT / "fairseq_admin", corpus=corpus, folder=tmp_path, model=model)
    (tmp_path / "run.yaml").write_text(text)
    done = run_module("fairseq_cli.hydra_train", "--config-dir", tmp_path, "--config-name", "run", log=tmp_path / "log")
    assert done.status != 0
    assert any(all(part in line for part in parts) for line in done.output.splitlines()), done.output[-3000:]
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("side", [0, 1])
def test_batch_without_tokens(side: int) -> None:
    """Is a first batch of padding only, on either side, refused?"""
    model = reference.build("transformer_admin_tiny")
    words = [torch.full((2, 5), 7), torch.full((2, 6), 7)]
    words[side].fill_(1)
    stack = ("encoder", "decoder")[side]
    with pytest.raises(AdminError, match=f"profiling measured nan for omega at sub-layer 2 of the {stack}"):
        profile(model, *words, "reference", 8192)


@pytest.mark.parametrize("rule", ["reference", "paper"])
def test_nan_at_profiling(rule: str) -> None:
    """Is a weight that is not a number refused, naming the sub-layer after it and the stack?"""
    model = reference.build("transformer_admin_tiny")
    with torch.no_grad():
        model.encoder.embed_tokens.weight[7, 3] = torch.nan
    words = torch.full((2, 5), 7)
    with pytest.raises(AdminError, match="profiling measured nan for omega at sub-layer 2 of the encoder"):
        profile(model, words, words, rule, 8192)
    model = reference.build("transformer_admin_tiny")
    with torch.no_grad():
        model.decoder.layers[0].encoder_attn.out_proj.bias[3] = torch.nan
    # The rule `paper` takes a branch out of a sum that it is in, so its own omega is not a number either.
    number = {"reference": 3, "paper": 2}[rule]
    with pytest.raises(AdminError, match=f"profiling measured nan for omega at sub-layer {number} of the decoder"):
        profile(model, words, words, rule, 8192)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model: two layers a stack."""
    folder = tmp_path_factory.mktemp("trained")
    given = ["--disable-validation", "--save-dir", folder, "--max-update", 1]
    done = run_module("fairseq_cli.train", corpus, *TRAIN, *given, log=folder / "log")
    assert done.status == 0, done.output[-4000:]
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    ("how", "side", "layers"), [("--restore-file", "encoder", 1), ("--finetune-from-model", "decoder", 3)]
)
def test_checkpoint_of_another_depth(
    how: str, side: str, layers: int, corpus: Path, trained: Path, tmp_path: Path, run: Callable[..., Run]
) -> None:
    """Are both depths and the option named?"""
    given = [how, trained, f"--{side}-layers", layers, "--save-dir", tmp_path, "--max-update", 3]
    done = run("fairseq_cli.train", corpus, *TRAIN, *given)
    check_refusal(done, f"the checkpoint's {side} has 2 layers and the model's has {layers}", f"--{side}-layers 2")


def test_pre_ln_checkpoint(corpus: Path, trained: Path, tmp_path: Path, run: Callable[..., Run]) -> None:
    """Are a Pre-LN Transformer's weights refused, rather than read as Post-LN?"""
    state = files.read(trained)
    model = {key: tensor for key, tensor in state["model"].items() if "omega" not in key and "admin" not in key}
    for side in ("encoder", "decoder"):
        for entry in ("weight", "bias"):
            model[f"{side}.layer_norm.{entry}"] = torch.ones(64)
    files.write({**state, "model": model}, tmp_path / "pre.pt")
    given = ["--finetune-from-model", tmp_path / "pre.pt", "--save-dir", tmp_path / "run", "--max-update", 1]
    check_refusal(run("fairseq_cli.train", corpus, *TRAIN, *given), "Pre-LN", "encoder.layer_norm", "Post-LN")
