"""The fast loss: is it fairseq's, in value, gradients and log, and does it keep no copy of the logits?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fairseq.utils
import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from reference import PAD, batch, build, dictionary
from torch import Tensor
from torch.nn import functional

from fairseq_admin.fast import loss

NAMES = ("label_smoothed_cross_entropy_fast", "label_smoothed_cross_entropy")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, and the last one not full."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 104 * 5)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq computes softmax in float32, whatever the model is in."""
    monkeypatch.setattr(fairseq.utils, "log_softmax", lambda x, dim, onnx_trace=False: x.log_softmax(dim))
    monkeypatch.setattr(fairseq.utils, "softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))


def criterion(name: str, smoothing: float = 0.1, prefix: int = 0) -> Any:
    """With --report-accuracy."""
    return CRITERION_REGISTRY[name](SimpleNamespace(target_dictionary=dictionary(100)), False, smoothing, prefix, True)


def sample() -> dict[str, Any]:
    src, lengths, prev = batch()
    target = prev.roll(-1, 1).masked_fill(prev.eq(PAD), PAD)
    inputs = {"src_tokens": src, "src_lengths": lengths, "prev_output_tokens": prev}
    return {"net_input": inputs, "target": target, "ntokens": int(target.ne(PAD).sum())}


def both(model: torch.nn.Module, reduce: bool = True, scale: float = 1.0, **options: Any) -> list[tuple]:
    """Of ours and fairseq's: loss, gradients and what is logged."""
    results = []
    for name in NAMES:
        model.zero_grad()
        value, size, log = criterion(name, **options)(model, sample(), reduce=reduce)
        (value.sum() * scale).backward()
        grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        results.append((value.detach(), grads, {**log, "size": size}))
    return results


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_is_fairseqs(smoothing: float, prefix: int, exact: None) -> None:
    """In float64, everything that is returned, and every gradient."""
    model = build("transformer", dropout=0.0, attention_dropout=0.0, encoder_layers=1, decoder_layers=1).double()
    ours, theirs = both(model, smoothing=smoothing, prefix=prefix, scale=3.0)
    assert abs(ours[0] - theirs[0]) <= 1e-12 * theirs[0]
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert list(ours[2]) == list(theirs[2]) and 0 < ours[2]["total"] == theirs[2]["total"]
    for name, value in theirs[2].items():
        torch.testing.assert_close(torch.as_tensor(ours[2][name]), torch.as_tensor(value), rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Sums are in float32, and a gradient is rounded to the logits' type once, after it is scaled."""
    torch.manual_seed(1)
    logits, target = (4 * torch.randn(23, 104)).to(dtype), torch.randint(0, 104, (23,))
    target[::5] = PAD
    found = []
    for way in ("ours", "plain"):
        x = logits.clone().requires_grad_()
        if way == "ours":
            value, nll = loss.smoothed_loss(x * 1, target, 0.0, PAD)
        else:
            lprobs = functional.log_softmax(x * 1, 1, dtype=torch.float32)
            value, nll = label_smoothed_nll_loss(lprobs, target, 0.0, ignore_index=PAD)
        (value * 128).backward()
        found.append((value.detach(), nll.detach(), x.grad))
    (a, b, c), (d, e, f) = found
    assert a.dtype == b.dtype == torch.float32 and c.dtype == dtype
    torch.testing.assert_close((a, b), (d, e), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        c, f, rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=2**-24
    )  # float16's smallest number


def test_padding_has_no_gradient() -> None:
    logits, target = torch.randn(6, 104, requires_grad=True), torch.tensor([4, PAD, 5, 6, PAD, 7])
    loss.smoothed_loss(logits * 1, target, 0.1, PAD)[0].backward()
    assert logits.grad[target.eq(PAD)].eq(0).all() and logits.grad[target.ne(PAD)].ne(0).all()


def test_keeps_the_logits_alone() -> None:
    """What is saved for the backward is the logits' own memory, and a few bytes a row; their gradient is there, too."""
    logits = torch.randn(50, 104, requires_grad=True) * 1
    logits.retain_grad()
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        value, _ = loss.smoothed_loss(logits, torch.randint(4, 104, (50,)), 0.1, PAD)
    assert [it.data_ptr() == logits.data_ptr() for it in saved if it.numel() > 50] == [True]


def test_a_second_backward_is_refused() -> None:
    """The logits are gone by then."""
    logits = torch.randn(50, 104, requires_grad=True) * 1
    value, _ = loss.smoothed_loss(logits, torch.randint(4, 104, (50,)), 0.1, PAD)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_gives_way() -> None:
    """To fairseq's for a loss of each word, and for an adaptive softmax."""
    model = build("transformer", dropout=0.0, attention_dropout=0.0)
    (ours, *_), (theirs, *_) = both(model, reduce=False)
    assert ours.numel() > 1 and torch.equal(ours, theirs)
    adaptive = build(
        "transformer",
        share_all_embeddings=False,
        share_decoder_input_output_embed=False,
        adaptive_softmax_cutoff=[20, 50],
        dropout=0.0,
        attention_dropout=0.0,
    )
    assert not loss._gives_logits(adaptive) and loss._gives_logits(model)
