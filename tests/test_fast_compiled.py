"""--admin-fast compile: one graph per kind of layer for any batch, with the plain layers' gradients, in every mode.

All tests but one trace and differentiate the graphs, and run them with torch's own kernels. That one generates code.
"""

from __future__ import annotations

import logging
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import conftest
import pytest
import test_modes
import torch
from conftest import TRAIN
from reference import batch
from test_fast import DROPPED, KINDS, STILL, attended, differences, every_fifth, translation
from test_fast import loss as loss_of_logits
from test_fast_loss import DTYPES, assert_is_fairseqs
from test_modes import QUICK, assert_same_state, last, two_processes
from test_schemes import MECHANISMS
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional

from fairseq_admin.fast import compiled, loss
from fairseq_admin.fast.compiled import CompiledDecoderLayer, CompiledEncoderLayer
from fairseq_admin.method import provenance


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drop other tests' graphs, and use torch's own kernels."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    compiled.compiled.cache_clear()
    counters.clear()


def compare(kind: str, **options: Any) -> dict[str, float]:
    """Differences between a compiled and a plain model, in float64, with the same fixed dropout."""
    rule = {"admin_init": "log"} if options.get("admin_scheme", "admin") == "admin" else {}
    options = {"activation_fn": "relu", **rule, **DROPPED, **options}
    model, loss_of = KINDS[kind](admin_fast="compile", **options)
    plain, _ = KINDS[kind](**options | {"admin_fast": "off"})
    plain.load_state_dict(model.state_dict())
    assert any(isinstance(module, (CompiledEncoderLayer, CompiledDecoderLayer)) for module in model.modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "dropout", every_fifth)
        patch.setattr(functional, "scaled_dot_product_attention", attended)
        patch.setattr("fairseq.utils.softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))
        return differences(model.double(), plain.double(), loss_of)


def test_gradients_are_the_plain_ones() -> None:
    found = compare("translation")
    assert max(found.values()) <= 1e-9, found
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("translation", {"admin_scheme": scheme}) for scheme in MECHANISMS),
        *((kind, {}) for kind in KINDS if kind != "translation"),
        ("translation", {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "encoder_layers": 4}),
        ("translation", {"no_cross_attention": True}),
    ],
)
def test_gradients_of_every_branch(kind: str, options: dict[str, Any]) -> None:
    """Gradients match for every mechanism, kind of model and path through a layer."""
    found = compare(kind, **options)
    assert max(found.values()) <= 1e-9, found


def test_few_graphs_of_many_shapes() -> None:
    """Each stack has two graphs, because its first layer's omega is fixed, and two more for single sentences.

    Sizes that happen to be equal, or multiples of something, make no new graphs. Otherwise, the graph in use would
    depend on earlier batches.
    """
    model, _ = translation(admin_fast="compile", admin_init="log", encoder_layers=3, decoder_layers=3, **STILL)
    for sizes in [(3, 7, 7), (8, 8, 16), (16, 16, 16), (1, 9, 9), (2, 24, 5), (5, 5, 5), (1, 32, 8)]:
        src, lengths, prev = batch(*sizes)
        loss_of_logits(model(src, lengths, prev)[0], prev).backward()
    assert counters["stats"]["unique_graphs"] == 8 and not counters["graph_break"]


def kept_and_gradients(checkpointed: bool) -> tuple[int, list[Tensor]]:
    """The bytes that a compiled model keeps for its backward, without its parameters, and its gradients."""
    options = {"encoder_layers": 1, "decoder_layers": 1, "admin_init": "log", **DROPPED}
    model, loss_of = translation(admin_fast="compile", checkpoint_activations=checkpointed, **options)
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        value = loss_of(model)
    value.backward()
    kept = saved.keys() - {p.data_ptr() for p in model.parameters()}
    return sum(saved[address] for address in kept), [p.grad for p in model.parameters()]


def test_checkpointed_activations_are_compiled_with_the_layer() -> None:
    """Gradients with dropout equal those without checkpointing to the last bit, and only a layer's inputs are kept."""
    (kept_inputs, ours), (kept, theirs) = map(kept_and_gradients, (True, False))
    assert 2 * kept_inputs < kept and all(map(torch.equal, ours, theirs))
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


def test_offloaded_activations_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model, _ = translation(admin_fast="compile", checkpoint_activations=True, offload_activations=True)
    assert "--admin-fast compile: the loss alone, because of --offload-activations" in caplog.text
    assert not any(isinstance(module, (CompiledEncoderLayer, CompiledDecoderLayer)) for module in model.modules())


def test_evaluation_profiling_and_watched_layers_are_plain() -> None:
    """Evaluation, profiling and monitored layers are plain, bit for bit. Nothing is compiled for them."""
    states = []
    for fast in ("compile", "off"):
        model, loss_of = translation(admin_fast=fast, admin_monitor=1, log_interval=1, **DROPPED)
        with torch.no_grad():
            evaluated = loss_of(model.eval())
        model.train().set_num_updates(1)
        torch.manual_seed(3)
        loss_of(model)  # profiles, and the monitor measures it
        states.append({"loss": evaluated, **model.state_dict()})
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_fairseqs(smoothing: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is fairseq's, in several chunks, the last not full, with two graphs."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 104 * 5)
    assert_is_fairseqs(smoothing, dtype, compile=True)
    assert counters["stats"]["unique_graphs"] == 2


def _train(arguments: list[str], log: Path) -> None:
    """Run fairseq-train with graphs on torch's own kernels, and a loss scaler for --amp that works on the CPU."""
    compiled.BACKEND = "aot_eager"
    torch.cuda.amp.GradScaler = partial(torch.amp.GradScaler, "cpu")  # type: ignore[assignment,misc]
    conftest._child("fairseq_cli.train", arguments, log)


def _rank(arguments: list[str], log: Path) -> None:
    compiled.BACKEND = "aot_eager"
    test_modes._rank(arguments, log)


COMPILE = ["--admin-fast", "compile", "--criterion", "label_smoothed_cross_entropy_fast", "--label-smoothing", 0.1]
MODES = {
    "fp32": "",
    "update-freq": "--update-freq 2 --max-tokens 150",
    "memory-efficient fp16": "--memory-efficient-fp16",
    "amp": "--amp --fp16-init-scale 4096",
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODES)
def test_killed_and_started_again(name: str, corpus: Path, tmp_path: Path) -> None:
    """A run killed in mid-epoch ends with the tensors of an undisturbed one. The log says how long compiling took."""
    options = [*TRAIN, *QUICK, *COMPILE, *MODES[name].split(), "--save-interval-updates", 7, "--max-update", 30]

    def start(folder: Path, log: Path) -> Any:
        arguments = [str(word) for word in (corpus, *options, "--save-dir", folder)]
        process = conftest.process(_train, arguments, log)
        process.start()
        return process

    logs = [tmp_path / name for name in ("whole.log", "killed.log", "again.log")]
    start(tmp_path / "whole", logs[0]).join()
    process, deadline = start(tmp_path / "killed", logs[1]), time.monotonic() + 300
    while not (logs[1].exists() and "Saved checkpoint" in logs[1].read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    process.join()
    start(tmp_path / "killed", logs[2]).join()
    whole, killed, again = (log.read_text() for log in logs)
    assert "done training" in whole and "done training" not in killed and "Saved checkpoint" in killed, whole[-3000:]
    assert "(epoch 1 @ " in again and "done training" in again, again[-3000:]
    assert re.search(r"Admin: --admin-fast compile: a graph took [\d.]+ s", whole)
    assert_same_state(last(tmp_path / "killed"), last(tmp_path / "whole"))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_processes_are_equal(corpus: Path, tmp_path: Path) -> None:
    """Two processes over gloo train and stay equal. (fairseq's other wrappers cannot run on CPUs.)"""
    folders = [tmp_path / "0", tmp_path / "1"]
    options = ["--max-tokens", 150, "--max-update", 8, *COMPILE]
    outputs = two_processes(corpus, folders, *options, target=_rank)
    assert "--admin-fast compile: a graph took" in outputs[0]
    states = [last(folder) for folder in folders]
    for state in states:
        del state["model"][provenance.KEY]  # it counts the rank's own tokens
    assert_same_state(*states)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_generated_code_computes_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's code for layers and loss gives the same up to the order of sums, and is cached in the given folder."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "admin_init": "log", **STILL}
    model, loss_of = translation(admin_fast="compile", save_dir=str(tmp_path), **sizes)
    plain, _ = translation(admin_fast="off", **sizes)
    found = differences(model, plain, loss_of)
    # The gradient of a key's bias is 0 up to rounding.
    assert max(value for name, value in found.items() if "k_proj.bias" not in name) < 1e-5, found
    assert_is_fairseqs(0.1, torch.bfloat16, compile=True)
    assert any((tmp_path / "compiled").rglob("*.py"))
