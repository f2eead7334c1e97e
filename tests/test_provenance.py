"""The record of where ω came from survives what happens to a state dict's tensors."""

from __future__ import annotations

import pytest
import reference
import torch

from fairseq_admin.errors import AdminError
from fairseq_admin.method import provenance

RECORD = {
    "rule": "reference",
    "source_tokens": 8192,
    "target_tokens": 8011,
    "seed": 18446744073709551615,
    "version": "0.1.0",
}


def test_round_trip():
    assert provenance.decode(provenance.encode(RECORD)) == RECORD


def test_shape_and_type():
    tensor = provenance.encode(RECORD)
    assert tensor.shape == (256,) and tensor.dtype == torch.float32


def test_nothing_yet():
    assert provenance.decode(torch.zeros(provenance.LENGTH)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_survives_casts(dtype):
    assert provenance.decode(provenance.encode(RECORD).to(dtype)) == RECORD


@pytest.mark.parametrize("copies", [2, 3, 5, 7, 10])
def test_survives_averages_in_half_precision(copies):
    # As fairseq's average does: half is summed as float, divided, and cast back.
    total = sum(provenance.encode(RECORD).half().float() for _ in range(copies))
    assert provenance.decode((total / copies).half()) == RECORD


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
def test_survives_exponential_moving_average(decay):
    # fairseq's EMA in float32: ema ← decay · ema + (1 - decay) · p. Each step rounds by 6e-8 of at most 255; a record
    # would be lost at an error of 0.5.
    record = provenance.encode(RECORD)
    ema = record.clone()
    for _ in range(2000):
        ema.mul_(decay).add_(record, alpha=1 - decay)
    assert provenance.decode(ema) == RECORD


def test_state_dict_of_a_module():
    module = torch.nn.Module()
    module.register_buffer(provenance.KEY, provenance.encode(RECORD))
    assert provenance.decode(module.half().state_dict()[provenance.KEY]) == RECORD


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((provenance.LENGTH,), 7.0),
        torch.full((provenance.LENGTH,), 1e9),
        torch.full((provenance.LENGTH,), 200.0),  # not UTF-8
        (provenance.encode(RECORD) + provenance.encode({"rule": "log", "version": "0.1.0"})) / 2,
        provenance.encode([1, 2]),  # JSON, but not a record
    ],
)
def test_garbage_is_refused(tensor):
    with pytest.raises(AdminError, match="no record of where omega came from: were different runs averaged"):
        provenance.decode(tensor)


def test_another_rule_on_resume_is_refused():
    """ω that was loaded is not set again, so another --admin-init would be a promise that nothing keeps."""
    state = reference.build("transformer_admin_tiny", admin_init="log").state_dict()
    match = "omega is by --admin-init log; --admin-init constant would change nothing. Give --admin-init log"
    with pytest.raises(AdminError, match=match):
        reference.build("transformer_admin_tiny", admin_init="constant").load_state_dict(dict(state))
    reference.build("transformer_admin_tiny", admin_init="log").load_state_dict(dict(state))
