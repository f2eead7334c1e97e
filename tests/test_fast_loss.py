"""The fast loss: its value, gradients and log equal fairseq's, and it keeps no copy of the logits."""

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

STILL = {"dropout": 0.0, "attention_dropout": 0.0, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several chunks, the last one not full."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 104 * 5)


def both(model: torch.nn.Module, reduce: bool = True, smoothing: float = 0.1, prefix: int = 0) -> list[Any]:
    """Our and fairseq's loss, size and log with --report-accuracy, and the gradients of three times the loss."""
    src, lengths, prev = batch()
    target = prev.roll(-1, 1).masked_fill(prev.eq(PAD), PAD)
    inputs = {"src_tokens": src, "src_lengths": lengths, "prev_output_tokens": prev}
    sample = {"net_input": inputs, "target": target, "ntokens": int(target.ne(PAD).sum())}
    task, results = SimpleNamespace(target_dictionary=dictionary(100)), []
    for name in ("label_smoothed_cross_entropy_fast", "label_smoothed_cross_entropy"):
        model.zero_grad()
        result = CRITERION_REGISTRY[name](task, False, smoothing, prefix, True)(model, sample, reduce=reduce)
        (3 * result[0].sum()).backward()
        results.append([*result, {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}])
    return results


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_value_gradients_and_log_are_fairseqs(smoothing: float, prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, all return values and gradients equal fairseq's."""
    # fairseq always computes softmax in float32.
    monkeypatch.setattr(fairseq.utils, "log_softmax", lambda x, dim, onnx_trace=False: x.log_softmax(dim))
    monkeypatch.setattr(fairseq.utils, "softmax", lambda x, dim, onnx_trace=False: x.softmax(dim))
    ours, expected = both(build("transformer", **STILL).double(), smoothing=smoothing, prefix=prefix)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    assert ours[2]["total"] > 0


def random(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits that are not a leaf, and targets that include padding."""
    torch.manual_seed(1)
    target = torch.randint(4, 104, (rows,))
    target[::5] = PAD
    return (4 * torch.randn(rows, 104)).to(dtype).requires_grad_() * 1, target


def assert_is_fairseqs(smoothing: float, dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
    """Check the loss and its gradient, which is in the logits' memory, against fairseq's.

    Sums are float32. A gradient is rounded to the logits' type once, after scaling. Padding's gradient is 0.
    """
    (logits, target), (others, _) = ((x.to(device), y.to(device)) for x, y in (random(23, dtype), random(23, dtype)))
    ours = loss.smoothed_loss(logits, target, smoothing, PAD, **options)
    lprobs = functional.log_softmax(others, 1, dtype=torch.float32)
    expected = label_smoothed_nll_loss(lprobs, target, smoothing, ignore_index=PAD)
    # A GPU adds about 2,000 numbers in another order.
    torch.testing.assert_close(ours, expected, rtol=1e-5 if device == "cuda" else 1e-6, atol=0)
    gradients = [torch.autograd.grad(128 * value[0], x)[0] for value, x in ((ours, logits), (expected, others))]
    # float16's smallest number is 2^-24. With smoothing, the gradient is a difference of two float32 numbers of about
    # 0.1 / 103, and each of them has been rounded.
    torch.testing.assert_close(
        *gradients, rtol=max(2 * torch.finfo(dtype).eps, 1e-5), atol=2**-20 if smoothing else 2**-24
    )
    assert gradients[0].data_ptr() == logits.data_ptr() and gradients[0][target.eq(PAD)].eq(0).all()


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_is_fairseqs(smoothing: float, dtype: torch.dtype) -> None:
    assert_is_fairseqs(smoothing, dtype)


def test_keeps_the_logits_alone() -> None:
    """The backward keeps only the logits' own memory and a few bytes per row. It writes the gradient there, too.

    So a second backward is refused: the logits have been overwritten.
    """
    logits, target = random(50)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss.smoothed_loss(logits, target, 0.1, PAD)
    assert [tensor.data_ptr() == logits.data_ptr() for tensor in saved if tensor.numel() > 50] == [True]
    value, _ = loss.smoothed_loss(logits, target, 0.1, PAD)
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_loss_per_word_is_fairseqs() -> None:
    """For a loss per word, and for an adaptive softmax, fairseq's loss is used."""
    ours, expected = both(build("transformer", **STILL), reduce=False)
    assert ours[0].numel() > 1 and torch.equal(ours[0], expected[0])
    options = {"adaptive_softmax_cutoff": [20, 50], "share_all_embeddings": False}
    assert not loss._gives_logits(build("transformer", share_decoder_input_output_embed=False, **options, **STILL))
    assert loss._gives_logits(build("transformer", **STILL))
