"""Training of an attached model: in half precision, with checkpointing, compiled, and in two processes.

Its ω are compared with those of fairseq's layers.
"""

from __future__ import annotations

import copy
import itertools
import socket
from functools import partial

import pytest
import reference
import torch
from kinds import assert_equal
from post_ln import QUIET, build, output, trained
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
    assert all(torch.isfinite(gradient).all() for gradient in grown.values()) and "omega" in " ".join(grown)
    # bfloat16 has 8 significant bits; errors add up over a few sub-layers.
    assert (attached - folded).abs().max() < 0.05 * attached.abs().max()


@pytest.mark.parametrize("half", HALVES)
def test_a_model_all_in_half_stays_so(half):
    model, batch = build("bert", half)
    model.eval()
    stock = output(model, batch)
    admin.attach(model, batch, omega=1)
    assert torch.equal(output(model, batch), stock) and stock.dtype == half
    assert next(iter(admin.profile(model, batch).values())).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bert", "bart"])
def test_gradient_checkpointing_has_the_same_gradients(name, reentrant):
    model, batch = trained(name)
    plain = gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    saving = gradients(model, batch)
    assert plain.keys() == saving.keys() and len([key for key in plain if "omega" in key]) > 5
    for key, gradient in plain.items():
        assert torch.allclose(saving[key], gradient, rtol=1e-9, atol=1e-14), key


def test_replicas_that_run_at_once_have_their_own_shortcuts():
    """Replicas keep separate shortcuts. DataParallel (the Trainer's default on several GPUs) shares hooks."""
    model, batch = build("bert")
    admin.attach(model, batch)
    (site,) = {hook.__self__ for hook in model.bert.encoder.layer[1].output.LayerNorm._forward_pre_hooks.values()}
    site.set_omega(3)
    replicas = [(site.norm, torch.ones(2, 16)), (copy.deepcopy(site.norm).to("meta"), torch.ones(2, 16, device="meta"))]
    for _, x in replicas:
        site.capture(["x"], "x", site.norm, (x,), {})
    (total, *_), (other, *_) = (site.scale(norm, (x,)) for norm, x in replicas)
    assert total.eq(3).all() and other.is_meta and not site.shortcuts


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
    """Attach, profile and make one step, each rank on its own batch. Returns ω before and after."""
    model, batch = build("bart", torch.float32)
    batch["input_ids"] = batch["input_ids"].roll(rank * 3, 1)
    admin.attach(model, batch)
    wrapped = DistributedDataParallel(model)
    admin.profile(wrapped, batch)
    omega = {key: value.clone() for key, value in admin.omegas(wrapped).items()}
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    wrapped(**batch).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="^DistributedDataParallel is compiled, wrapped or sharded; attach to"):
        admin.attach(DistributedDataParallel(build("bart")[0]), batch)
    with pytest.raises(ValueError, match="^DDP holds on to omega; fold the model inside, ddp.module, and wrap that"):
        admin.fold(wrapped)
    trained = admin.omegas(wrapped)
    admin.fold(wrapped.module, batch)
    DistributedDataParallel(wrapped.module)(**batch).loss.backward()
    return omega, trained


@pytest.mark.slow
def test_two_processes_have_the_first_ones_omega():
    (first, after_first), (second, after_second) = on_two_ranks(step_under_ddp)
    model, batch = build("bart", torch.float32)
    admin.attach(model, batch)
    admin.profile(model, batch)
    for key, omega in admin.omegas(model).items():
        assert torch.equal(first[key], omega) and torch.equal(second[key], omega)
        assert torch.equal(after_first[key], after_second[key]) and not torch.equal(after_first[key], omega)


def steps_in_shards(rank):
    """Train a whole model and a sharded one on one batch, with ω profiled before or after sharding.

    BERT passes x to a module inside the layer; torch's encoder passes x to the layer, or computes it there.
    """
    mesh = init_device_mesh("cpu", (2,))
    for name, before in itertools.product(("encoder", "bert"), (True, False)):
        states = []
        for shards in (False, True):
            model, batch = build(name, torch.float32, **QUIET[name])
            admin.attach(model, batch)
            if before:
                admin.profile(model, batch)
            layers = model.bert.encoder.layer if name == "bert" else model.layers
            for module in [*layers, model] if shards else []:
                fully_shard(module, mesh=mesh)
            if not before:
                admin.profile(model, batch)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(2):
                output(model, batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            states.append(
                admin.folded_state_dict(model) | {f"{name} ω": it for name, it in admin.omegas(model).items()}
            )
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


def profile_by_hand(model, batch, rule):
    """ω of an nn.Transformer, with its layers written out."""
    memory, omegas = None, []
    for side, name in (("encoder", "src"), ("decoder", "tgt")):
        x, padding, mask = (batch.get(f"{name}{argument}") for argument in ("", "_key_padding_mask", "_mask"))
        profile = reference.Profile(rule, ~padding.t())
        for layer in getattr(model, side).layers:
            x = profile(x, partial(layer._sa_block, attn_mask=mask, key_padding_mask=padding), layer.norm1)
            if side == "decoder":
                attend = partial(layer._mha_block, mem=memory, attn_mask=None, key_padding_mask=None)
                x = profile(x, attend, layer.norm2)
            x = profile(x, layer._ff_block, layer.norm3 if side == "decoder" else layer.norm2)
        memory = getattr(model, side).norm(x)
        omegas += profile.omega
    return omegas


@pytest.mark.parametrize("rule", ["reference", "paper"])
def test_the_profile_is_that_of_the_layers_written_out(rule):
    """Also with dropout, as in training: both draw the same."""
    model, batch = build("transformer")
    admin.attach(model.eval(), batch)
    torch.manual_seed(3)
    omegas = admin.profile(model, batch, rule=rule)
    names = {"encoder": (1, 2), "decoder": (1, 2, 3)}
    assert list(omegas) == [f"{side}.layers.{i}.norm{n}" for side in names for i in range(2) for n in names[side]]
    assert all(omega.eq(omegas[name]).all() for name, omega in admin.omegas(model).items())
    torch.manual_seed(3)
    expected = profile_by_hand(model.train(), batch, rule)
    # ω is float32.
    assert [omega.item() for omega in omegas.values()] == pytest.approx(expected, rel=1e-6) and max(expected) > 1.2
