"""fairseq's moving average of the weights (--store-ema): does it compute the model's function in every scheme?

At every update, fairseq's EMA loads a state dict into its copy of the model, with strict=False. That state dict has no
`version`. It is the copy's own state dict, changed in place.
"""

from __future__ import annotations

from collections.abc import Callable

import new_layers
import pytest
import reference
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA
from kinds import KINDS, logits
from new_layers import HEAD, Task, pretrained
from torch import Tensor, nn

from fairseq_admin.method import provenance


def averaged(model: nn.Module, decay: float = 0.0, fp32: bool = False) -> nn.Module:
    """The averaged model after three updates. With a decay of 0, it forgets all earlier weights."""
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=decay, ema_fp32=fp32))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    for number in range(3):
        average.step(model, number + 1)
    return average.get_model()


def assert_same(average: nn.Module, model: nn.Module, outputs_of: Callable[[nn.Module], Tensor]) -> None:
    expected = model.state_dict()
    assert average.state_dict().keys() == expected.keys()
    for key, tensor in average.state_dict().items():
        assert "version" in key or torch.equal(tensor, expected[key]), key
    outputs = [outputs_of(module.eval()) for module in (average, model)]
    assert torch.equal(*outputs) and outputs[0].isfinite().all()


@pytest.mark.parametrize(("name", "scheme"), [
    *(("translation", it) for it in ("admin", "pre-ln", "deepnorm", "rezero", "b2t", "residual", "peri-ln", "keel")),
    *((name, scheme) for name in ("language", "masked") for scheme in ("admin", "residual")),
])  # fmt: skip
def test_ema_computes_the_models_function(name: str, scheme: str) -> None:
    kind = KINDS[name]
    model, words = kind.build(admin_scheme=scheme, admin_fast="on"), kind.batch()
    logits(model, words)  # profiles ω
    assert_same(averaged(model), model, lambda module: logits(module, words))


PRECISIONS = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]


@pytest.mark.parametrize(("dtype", "fp32"), PRECISIONS)
@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
def test_ema_keeps_the_record_of_omega(dtype: torch.dtype, fp32: bool, decay: float) -> None:
    """Do the records survive averaging? In bfloat16, 125 * 0.99 + 125 * 0.01 is 124.5, not 125."""
    model = reference.build("transformer_admin_tiny")
    model(*reference.batch())
    new = new_layers.build(Task(), more_layers=1, more_scheme="peri-ln", admin_scheme="admin", admin_init="log")
    for module in (model, new):
        records = {key: tensor for key, tensor in module.state_dict().items() if key.endswith(provenance.KEY)}
        assert records and all(map(provenance.decode, records.values()))
        average = averaged(module.to(dtype), decay, fp32).state_dict()
        assert all(provenance.decode(average[key]) == provenance.decode(record) for key, record in records.items())


@pytest.mark.parametrize("scheme", ["pre-ln", "peri-ln"])
def test_ema_of_new_layers_computes_their_function(scheme: str) -> None:
    task = Task()
    model = new_layers.build(task, more_layers=2, more_scheme=scheme)
    model.load_state_dict(pretrained(task))
    words = torch.randint(4, 44, (4, 9), generator=torch.Generator().manual_seed(1))
    assert_same(averaged(model), model, lambda module: module(words, classification_head_name=HEAD)[0])
