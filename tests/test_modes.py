"""Every training mode on the command line: is ω right in the checkpoint, and does a stopped run resume exactly?

Each mode trains the tiny model once to update 10, keeps the checkpoint of update 7 in mid-epoch, and then resumes from
it. (With β2 = 0.98, radam makes its first step at update 6.)
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import conftest
import numpy
import pytest
import reference
import torch
from conftest import TRAIN, hydra_train, resume, train
from fairseq import options as fairseq_options
from fairseq import tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from reference import PAD
from torch import Tensor, nn

import fairseq_admin.plugin  # noqa: F401  (registers the models)
from fairseq_admin.checkpoints import files
from fairseq_admin.core.omega import omega_from_depth
from fairseq_admin.method import provenance, state_dict
from fairseq_admin.method.norms import shortcut_norms
from fairseq_admin.method.schemes import stacks_of

SEPARATE = [option for option in TRAIN if option != "--share-all-embeddings"]
QUICK = ["--disable-validation"]
TO_10 = ["--max-update", 10]


class Mode(NamedTuple):
    """A row of the table below."""

    options: str = ""
    """Training options. The profiled ω does not depend on them."""
    model: str = ""
    """Model options."""
    train: list[str] = TRAIN
    tolerance: float = 1e-5
    """Relative tolerance of ω. The profile sums about 10^4 float32 numbers pairwise; the plain loop sums in float64."""
    exact: bool = True
    """Whether a resumed run is bit for bit the same."""
    precision: torch.dtype = torch.float32
    """Precision of the saved weights."""


# Storing ω in float16 rounds it. Weights and activations are rounded too; their errors are independent and nearly
# average out in a variance over 10^4 elements. The tolerance allows one rounding for each of the two.
HALF = 2**-11
FP16 = Mode("--fp16 --fp16-no-flatten-grads", tolerance=2 * HALF, exact=False, precision=torch.float16)
# bfloat16 has three bits fewer than float16.
BF16 = Mode("--bf16 --fp16-no-flatten-grads", tolerance=2 * 8 * HALF, exact=False, precision=torch.bfloat16)
MODES = {
    "fp16, ema in fp32": FP16._replace(options=FP16.options + " --store-ema --ema-decay 0.9 --ema-fp32"),
    "memory-efficient fp16": Mode("--memory-efficient-fp16", tolerance=2 * HALF, precision=torch.float16),
    "bf16": BF16,
    "amp": Mode("--amp", "--activation-fn gelu"),
    "update-freq, token budget, quantisation noise": Mode(
        "--update-freq 2 --admin-profile-tokens 64", "--max-tokens 150 --quant-noise-pq 0.5", train=SEPARATE
    ),
    # Each layer counts its own steps, and radam would make too few steps on a layer that is often dropped.
    "layerdrop, ema": Mode(
        "--optimizer adam --weight-decay 0.1 --store-ema --ema-decay 0.9",
        "--encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --layernorm-embedding",
    ),
    "checkpointed activations, rule paper": Mode(
        "--checkpoint-activations --weight-decay 0.1 --admin-init paper",
        "--encoder-layers 3 --decoder-layers 1 --decoder-ffn-embed-dim 32",
    ),
    "rule log": Mode(
        "--admin-init log", "--cross-self-attention --no-cross-attention --encoder-learned-pos --decoder-learned-pos"
    ),
}
"""Most rows combine independent settings. Every row is checked in full."""


def last(folder: Path) -> dict[str, Any]:
    return files.read(folder / "checkpoint_last.pt")


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in every tensor, bit for bit, and in every other leaf."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Check that model, optimizer, learning rate, moving average and data position are the same."""
    assert len(a["model"]) > 50 and a["last_optimizer_state"]["state"]
    assert [key for key in a["model"] if not same(a["model"][key], b["model"][key])] == []
    assert a["model"].keys() == b["model"].keys()
    assert same(a["last_optimizer_state"], b["last_optimizer_state"])
    for key in ("num_updates", "lr_scheduler_state"):
        assert a["optimizer_history"][-1][key] == b["optimizer_history"][-1][key]
    for key in ("ema", "ema_fp32_params", "train_iterator"):
        assert same(a["extra_state"].get(key), b["extra_state"].get(key)), key


def assert_near(a: dict[str, Any], b: dict[str, Any], rounding: float) -> None:
    """Check that the profiled ω are equal, and that the rest differs by no more than half-precision weights explain.

    fairseq's --fp16 and --bf16 do not save the float32 copy of the weights: for any model, a resumed run starts from
    the rounded weights. (On a GPU, sums of gradients have no fixed order either.) An Adam-like update moves a weight by
    about the learning rate, at most 1e-3 here, so three updates from slightly different weights differ by at most 3e-3
    either way.
    """
    assert profiled(a) == profiled(b) and torch.equal(a["model"][provenance.KEY], b["model"][provenance.KEY])
    for key, tensor in a["model"].items():
        torch.testing.assert_close(tensor, b["model"][key], rtol=2 * rounding, atol=6e-3, msg=key)
    assert a["optimizer_history"][-1]["num_updates"] == b["optimizer_history"][-1]["num_updates"]
    assert same(a["extra_state"]["train_iterator"], b["extra_state"]["train_iterator"])


def initial(corpus: Path, *arguments: str, options: list[str] = TRAIN):
    """A run's initial model, with plain layers, and its first training batch, as fairseq makes them."""
    command_line = [str(corpus), *options[2:], *arguments, "--admin-fast", "off"]  # without --user-dir
    cfg = convert_namespace_to_omegaconf(
        fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), command_line)
    )
    numpy.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=cfg.dataset.max_tokens,
        max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions()),
        required_batch_size_multiple=8,
        seed=cfg.common.seed,
    )
    return model, next(batches.next_epoch_itr(shuffle=True))["net_input"]


def expected_omegas(model: nn.Module, source: Tensor, target: Tensor, rule: str) -> dict[str, list[float]]:
    """The ω that the rule gives both stacks, from the depth or from a profile with the layers written out."""
    if rule in ("log", "constant"):
        depths = {side: len(shortcut_norms(stack)) for side, stack in stacks_of(model).items()}
        return {side: [omega_from_depth(rule, depth)] * depth for side, depth in depths.items()}
    for module in model.train().modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.training = False  # in training, quantisation noise overwrites these layers' weights
    torch.manual_seed(1)
    return dict(zip(stacks_of(model), reference.profile_by_hand(model, source, target, rule)))


def check_mode(mode: Mode, corpus: Path, folder: Path) -> None:
    """Is the checkpoint's ω the profiled ω plus the learned change, and does a stopped run resume exactly?"""
    options = [*QUICK, *mode.model.split(), *mode.options.split()]
    whole = train(corpus, folder / "whole", *options, *TO_10, "--save-interval-updates", 7, options=mode.train)
    state = last(folder / "whole")
    weight = state["model"]["encoder.layers.0.fc1.weight"]  # fairseq saves it as float32
    assert torch.equal(weight, weight.to(mode.precision).float())
    assert mode.precision != torch.float32 or not torch.equal(weight, weight.half().float())
    chosen = dict(zip(options, options[1:]))
    rule, tokens = chosen.get("--admin-init", "reference"), int(chosen.get("--admin-profile-tokens", 8192))
    plain, batch = initial(corpus, *mode.model.split(), options=mode.train)
    source, target = batch["src_tokens"], batch["prev_output_tokens"]
    sentences = max(1, tokens // max(source.size(1), target.size(1)))
    assert (sentences < len(source)) == (tokens < 8192), "the budget was to cut this batch, and only then"
    source, target = source[:sentences], target[:sentences]
    check_omegas(state["model"], expected_omegas(plain, source, target, rule), rule, mode.tolerance)

    record = provenance.decode(state["model"][provenance.KEY])
    assert record is not None and record["rule"] == rule and record["version"] == fairseq_admin.__version__
    measured = rule in ("reference", "paper")
    assert whole.output.count("Admin: profiled by rule") == measured
    if measured:
        counts = [int(words.ne(PAD).sum()) for words in (source, target)]
        assert [record["source_tokens"], record["target_tokens"]] == counts and record["seed"] == 1
        assert f"profiled by rule {rule} on {counts[0]} source and {counts[1]} target tokens in" in whole.output
    if "--store-ema" in options:
        average = state["extra_state"]["ema"]
        assert provenance.decode(average[provenance.KEY]) == record
        for key in [key for key in state["model"] if key.endswith("omega_init")]:
            # a·0.9 + a·0.1, ten times, each time rounded
            torch.testing.assert_close(average[key], state["model"][key], rtol=10 * mode.tolerance, atol=0)

    saved = folder / "whole/checkpoint_1_7.pt"
    resumed = resume(corpus, saved, folder / "resumed", *options, *TO_10, options=mode.train)
    assert f"Loaded checkpoint {folder / 'resumed/checkpoint_last.pt'} (epoch 1 @ 7 updates)" in resumed.output
    assert "profiled by rule" not in resumed.output
    if mode.exact:
        assert_same_state(last(folder / "resumed"), state)
    else:
        assert_near(last(folder / "resumed"), state, max(HALF, torch.finfo(mode.precision).eps / 2))


def check_omegas(model: dict[str, Tensor], expected: dict[str, list], rule: str, tolerance: float) -> None:
    """Does every ω exist, match its profile, read back as profiled plus learned, and learn (except the first)?"""
    stacks = state_dict.omegas(model)
    assert {stack: len(part) for stack, part in stacks.items()} == {
        stack: len(part) for stack, part in expected.items()
    }
    for stack, part in stacks.items():
        for i, (name, omega) in enumerate(part.items()):
            norm = f"{stack}.{name}_layer_norm".replace("ffn", "final")
            profiled = model[f"{norm}.omega_init"].double()
            assert (profiled == profiled[0]).all()
            exactly_one = i == 0 and rule in ("reference", "paper")
            assert profiled[0].item() == pytest.approx(expected[stack][i], rel=0 if exactly_one else tolerance)
            learned = model.get(f"{norm}.omega_delta", torch.zeros(1)).double()
            assert torch.equal(omega, profiled + learned)
            assert (learned.abs().max() > 1e-5) == (i > 0), norm


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_omega_is_profiled_and_a_stopped_run_resumes(name: str, corpus: Path, tmp_path: Path) -> None:
    """Does `check_mode` pass in every mode that the CPU can run?"""
    check_mode(MODES[name], corpus, tmp_path)


CUDA_MODES = {
    "fp32": Mode(exact=False),
    "fp16, flat": FP16._replace(options="--fp16"),
    "fp16, not flat": FP16,
    "memory-efficient fp16": FP16._replace(options="--memory-efficient-fp16"),
    "bf16": BF16,
    # Each matrix product rounds to float16 once; a branch has two or three in a row. ω itself stays float32.
    "amp": Mode("--amp", tolerance=2 * HALF, exact=False),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", CUDA_MODES)
def test_omega_is_profiled_and_a_stopped_run_resumes_on_cuda(name: str, corpus: Path, tmp_path: Path) -> None:
    """Does a GPU match the plain loop on the CPU? Dropout is off, because its random numbers depend on the device."""
    options = [option for option in TRAIN if option != "--cpu"] + ["--distributed-world-size", "1"]
    check_mode(CUDA_MODES[name]._replace(model="--dropout 0", train=options), corpus, tmp_path)


def profiled(state: dict[str, Any]) -> dict[str, list]:
    """Every profiled ω."""
    return {key: tensor.tolist() for key, tensor in state["model"].items() if key.endswith(".omega_init")}


def _rank(arguments: list[str], log: Path) -> None:
    """Run one of two ranks. Each saves its own checkpoints, to compare them; fairseq saves only the first rank's."""
    Trainer.should_save_checkpoint_on_current_rank = property(lambda self: True)
    conftest._child("fairseq_cli.train", arguments, log)


def two_processes(corpus: Path, folders: list[Path], *arguments: object) -> list[str]:
    """Train on two CPU processes over gloo. Returns the output of both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        ddp = f"--distributed-world-size 2 --distributed-rank {rank} --distributed-init-method tcp://127.0.0.1:{port} "
        ddp += "--distributed-backend gloo --distributed-no-spawn --ddp-backend legacy_ddp"
        command_line = [corpus, *TRAIN, *ddp.split(), *QUICK, "--save-dir", folder, *arguments]
        processes.append(conftest.process(_rank, list(map(str, command_line)), folder / "log"))
        processes[-1].start()
    try:
        for process in processes:
            process.join(600)
    finally:
        for process in processes:
            process.kill()
    outputs = [(folder / "log").read_text() for folder in folders]
    assert [process.exitcode for process in processes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    return outputs


@pytest.mark.slow
def test_two_processes_train_as_one(corpus: Path, tmp_path: Path) -> None:
    """Do two processes get the same ω as one, bit for bit, stay equal to each other, and resume exactly?"""
    small = ["--max-tokens", 150]
    train(corpus, tmp_path / "one", *QUICK, *small, "--max-update", 1)
    whole = [tmp_path / "whole0", tmp_path / "whole1"]
    outputs = two_processes(corpus, whole, *small, *TO_10, "--save-interval-updates", 7)
    assert outputs[0].count("profiled by rule") == 1  # in fairseq, only the first rank logs
    assert profiled(last(whole[0])) == profiled(last(tmp_path / "one"))
    states = [last(folder) for folder in whole]
    for state in states:
        del state["model"][provenance.KEY]  # it counts the rank's own tokens, and fairseq keeps only the first rank's
    assert_same_state(*states)
    resumed = [tmp_path / "resumed0", tmp_path / "resumed1"]
    for saved, folder in zip(whole, resumed):
        folder.mkdir()
        shutil.copy(saved / "checkpoint_1_7.pt", folder / "checkpoint_last.pt")
    assert "profiled by rule" not in "".join(two_processes(corpus, resumed, *small, *TO_10))
    assert_same_state(last(resumed[0]), last(whole[0]))
    assert_same_state(last(resumed[1]), last(whole[0]))


TIED = "share_all_embeddings: true"


def test_hydra_trains_as_fairseq_train(corpus: Path, tmp_path: Path) -> None:
    """Does fairseq-hydra-train with a preset of hydra's model group match fairseq-train?"""
    train(corpus, tmp_path / "plain", *QUICK, *TO_10)
    hydra = hydra_train(corpus, tmp_path / "hydra", "transformer_admin_tiny model.share_all_embeddings=true")
    assert hydra.status == 0 and hydra.output.count("profiled by rule reference") == 1, hydra.output[-4000:]
    assert same(last(tmp_path / "hydra")["model"], last(tmp_path / "plain")["model"])


@pytest.mark.slow
def test_hydra_in_bf16_keeps_omega_and_resumes(corpus: Path, tmp_path: Path) -> None:
    """Does memory-efficient bf16, which only fairseq-hydra-train can run, keep ω and resume bit for bit?"""
    config = [f"_name: transformer_admin_tiny, {TIED}", "bf16: true, memory_efficient_bf16: true"]
    assert hydra_train(corpus, tmp_path / "whole", *config).status == 0
    state = last(tmp_path / "whole")
    weight = state["model"]["encoder.layers.0.fc1.weight"]  # fairseq saves it as float32
    assert torch.equal(weight, weight.bfloat16().float())
    model, batch = initial(corpus)
    expected = expected_omegas(model, batch["src_tokens"], batch["prev_output_tokens"], "reference")
    check_omegas(state["model"], expected, "reference", BF16.tolerance)  # only training may move ω from its profile
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint_1_7.pt", tmp_path / "resumed/checkpoint_last.pt")
    assert "profiled by rule" not in hydra_train(corpus, tmp_path / "resumed", *config).output
    assert_same_state(last(tmp_path / "resumed"), state)
