"""Training of an attached model: in half precision, with checkpointing, compiled, and in two processes."""

from __future__ import annotations

import copy
import socket

import pytest
import torch
from kinds import assert_equal
from post_ln import QUIET, Stack, X, build, output, trained, with_omega
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fairseq_admin.pytorch as admin

HALVES = [torch.float16, torch.bfloat16]


def gradients(model, batch):
    model.zero_grad()
    output(model, batch).float().square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["bert", "bart", "encoder"])
def test_autocast(name, half):
    """Under autocast, ω = 1 changes no bit, and other ω match the folded model up to its rounding."""
    model, batch = build(name, torch.float32)
    with torch.autocast("cpu", dtype=half):
        stock = output(model, batch)
        admin.attach(model, batch, omega=1)
        assert torch.equal(output(model, batch), stock) and output(model, batch).dtype == stock.dtype
    model, batch = trained(name, torch.float32)
    model.eval()
    with torch.autocast("cpu", dtype=half):
        grown = gradients(model, batch)
        attached = output(model, batch).float()
        admin.fold(model)
        folded = output(model, batch).float()
    assert all(torch.isfinite(gradient).all() for gradient in grown.values())
    # bfloat16 has 8 significant bits; errors add up over a few sub-layers.
    assert (attached - folded).abs().max() < 0.05 * attached.abs().max()


@pytest.mark.parametrize("half", HALVES)
def test_a_model_all_in_half_stays_so(half):
    model, batch = build("bert", half)
    model.eval()
    stock = output(model, batch)
    admin.attach(model, batch, omega=1)
    assert torch.equal(output(model, batch), stock) and stock.dtype == half
    assert output(with_omega(model), batch).dtype == half
    assert next(iter(admin.omegas(model).values())).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_gradient_checkpointing_has_the_same_gradients(name, reentrant):
    model, batch = trained(name)
    plain = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    saving = gradients(model, batch)
    assert plain.keys() == saving.keys()
    for key, gradient in plain.items():
        assert torch.allclose(saving[key], gradient, rtol=1e-9, atol=1e-14), key
    copy.deepcopy(model)  # nothing of the forward is kept


def test_replicas_of_data_parallel_have_omega():
    """DataParallel, the Trainer's default on several GPUs, copies all modules for a forward; hooks are shared."""
    model = with_omega(admin.attach(Stack(), X))
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        replica._modules.update((name, replicas[child]) for name, child in module._modules.items())
        for name, parameter in module._parameters.items():
            replica.__dict__[name] = parameter
    assert torch.equal(replicas[model](X), model(X))


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 compiles neither stock model in one graph")
@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_compiled_in_one_graph(name):
    model, batch = trained(name, **QUIET[name])
    model.eval()
    plain = gradients(model, batch)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    saved = gradients(compiled, batch)
    for key, gradient in plain.items():
        assert torch.allclose(saved[f"_orig_mod.{key}"], gradient, rtol=1e-9, atol=1e-14), key
    assert list(admin.omegas(compiled)) == list(admin.omegas(model))
    admin.fold(compiled, batch)
    assert torch.allclose(output(compiled, batch), output(model, batch), atol=1e-12)


def _rank(rank, port, work, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results[rank] = work(rank)
    torch.distributed.destroy_process_group()


def on_two_ranks(work):
    """Run a function on two ranks. Returns the result of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_rank, (port, work, results), nprocs=2)
        return results[0], results[1]


def step_under_ddp(rank):
    """One step, each rank on its own batch. Returns the folded weights."""
    model, batch = trained("bart", torch.float32)
    batch["input_ids"] = batch["input_ids"].roll(rank * 3, 1)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    wrapped(**batch).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="^DistributedDataParallel is compiled, wrapped or sharded; attach to"):
        admin.attach(DistributedDataParallel(build("bart")[0]), batch)
    with pytest.raises(ValueError, match="^DDP holds on to omega; fold the model inside, ddp.module, and wrap that"):
        admin.fold(wrapped)
    weights = admin.folded_state_dict(wrapped)
    admin.fold(wrapped.module, batch)
    DistributedDataParallel(wrapped.module)(**batch).loss.backward()
    return weights


@pytest.mark.slow
def test_two_processes_have_the_same_weights():
    first, second = on_two_ranks(step_under_ddp)
    assert_equal(first, second)
    trained_alone = admin.folded_state_dict(trained("bart", torch.float32)[0])
    assert trained_alone.keys() == first.keys() and any((first[key] != trained_alone[key]).any() for key in first)


def steps_in_shards(rank):
    """Train a whole model and a sharded one on one batch."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("encoder", "bert"):
        states = []
        for shards in (False, True):
            model, batch = trained(name, torch.float32, **QUIET[name])
            layers = model.bert.encoder.layer if name == "bert" else model.layers
            for module in [*layers, model] if shards else []:
                fully_shard(module, mesh=mesh)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(2):
                output(model, batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append(admin.folded_state_dict(model))
        assert_equal(*states)
    with pytest.raises(ValueError, match="^FSDP has this model in shards; load folded_state_dict"):
        admin.fold(model, batch)
    with pytest.raises(ValueError, match="^FSDPBertForMaskedLM is compiled, wrapped or sharded; attach to the model"):
        admin.attach(fully_shard(build("bert")[0], mesh=mesh), batch)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 has no FSDP on a CPU")
def test_in_shards_it_is_the_same_training():
    """Training with FSDP2 shards is the same, bit for bit. The folded weights are whole on every rank."""
    on_two_ranks(steps_in_shards)
