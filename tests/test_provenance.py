"""The record of ω's origin survives common operations on a state dict's tensors."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_record_survives_casts(dtype):
    tensor = provenance.encode(RECORD).to(dtype)
    assert tensor.shape == (provenance.LENGTH,) and provenance.decode(tensor) == RECORD
    assert provenance.decode(torch.zeros_like(tensor)) is None  # not profiled yet


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((provenance.LENGTH,), 7.0),
        torch.full((provenance.LENGTH,), 200.0),  # not UTF-8
        (provenance.encode(RECORD) + provenance.encode({"rule": "log", "version": "0.1.0"})) / 2,
        provenance.encode([1, 2]),  # JSON, but not a record
    ],
)
def test_garbage_is_refused(tensor):
    with pytest.raises(AdminError, match="holds no record of omega.s origin"):
        provenance.decode(tensor)


def test_another_rule_on_resume_is_refused():
    """A loaded ω is not set again, so another --admin-init on resume would have no effect. It is refused."""
    state = reference.build("transformer_admin_tiny", admin_init="log").state_dict()
    match = "omega is by --admin-init log; --admin-init constant would change nothing. Give --admin-init log"
    with pytest.raises(AdminError, match=match):
        reference.build("transformer_admin_tiny", admin_init="constant").load_state_dict(dict(state))
    reference.build("transformer_admin_tiny", admin_init="log").load_state_dict(dict(state))
