"""Rectified Adam through torch's fused AdamW kernel. The plain one is `plain_step` in ../radam.py, torch's RAdam.

AdamW and RAdam differ in the step size and in the place of ε (Liu et al. 2020, "On the Variance of the Adaptive
Learning Rate and Beyond", algorithm 2; t counts from 1):

    AdamW    p ← p - η λ p - η m / (1 - β1^t) / (sqrt(v) / b + ε),    b = sqrt(1 - β2^t)
    RAdam    p ← p - η λ p - η r m / (1 - β1^t) · b / (sqrt(v) + ε)

so RAdam is AdamW with the step size η r, the decay λ / r and, as ε, ε / b.
"""

from __future__ import annotations

import math
from itertools import compress
from typing import Any

import torch
from fairseq import optim
from fairseq.optim import fp16_optimizer
from torch import Tensor


def rectification(step: int, beta2: float) -> float:
    """r, or 0 while the variance is intractable (ρ_t ≤ 5).

    ρ_t = ρ_∞ - 2 t β2^t / (1 - β2^t)   and   ρ_∞ = 2 / (1 - β2) - 1      algorithm 2
    """
    limit = 2 / (1 - beta2) - 1
    rho = limit - 2 * step * beta2**step / (1 - beta2**step)
    if rho <= 5:
        return 0.0
    return math.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))


def has_kernel(device: torch.device) -> bool:
    """Whether torch has the kernel for this device."""
    return device.type in ("cpu", "cuda") and hasattr(torch, "_fused_adamw_")


def fused_step(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    squares: list[Tensor],
    step: int,
    *,
    grad_scale: float | Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update parameters and both moments in place. All tensors are float32, on one device.

    Parameters do not move while the variance is intractable, except by weight decay, which is decoupled.

    Args:
        step: the number of this step, from 1, for all parameters.
        grad_scale: divides the gradients.
    """
    device = params[0].device
    if torch.is_tensor(grad_scale):
        divisor: Tensor | None = grad_scale.to(device, torch.float32)
    else:
        divisor = None if grad_scale == 1 else torch.full((), grad_scale, device=device)
    r = rectification(step, beta2)
    if not r:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._fused_adamw_(
        params,
        grads,
        moments,
        squares,
        [],
        [torch.full((), float(step), device=device)] * len(params),
        lr=lr * r,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay / r if r else 0.0,
        # With a step size of 0, avoid 0 / 0.
        eps=eps / math.sqrt(1 - beta2**step) if r else 1.0,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )


class FP16Optimizer(fp16_optimizer.FP16Optimizer):
    """fairseq's FP16Optimizer, with one operation for all copies that are not flat.

    Checkpoints contain the name of this class, so the name must stay.
    """

    _needs_sync: bool
    fp32_params: Any

    @classmethod
    def build_optimizer(cls, cfg: Any, params: Any, **kwargs: Any) -> Any:
        """Build an optimizer as fairseq does.

        Only a fast model gets this class, and only for the first optimizer that is built after the model. All other
        optimizers are of fairseq's class.
        """
        if getattr(cfg.get("model"), "admin_fast", "off") == "off":
            return fp16_optimizer.FP16Optimizer.build_optimizer(cfg, params, **kwargs)
        optim.FP16Optimizer = fp16_optimizer.FP16Optimizer
        return super().build_optimizer(cfg, params, **kwargs)

    @torch.no_grad()
    def _sync_fp16_grads_to_fp32(self) -> None:
        if self._needs_sync and not self.has_flat_params:
            halves, floats = ([p.grad for p in params] for params in (self.fp16_params, self.fp32_params))
            if set(map(type, halves + floats)) == {Tensor}:  # else fairseq fills in zeros for missing gradients
                torch._foreach_copy_(floats, halves)
                self._needs_sync = False
        super()._sync_fp16_grads_to_fp32()

    @torch.no_grad()
    def _sync_fp32_params_to_fp16(self) -> None:
        if self.has_flat_params:
            super()._sync_fp32_params_to_fp16()
        else:
            trained = [p.requires_grad for p in self.fp16_params]
            halves, floats = (list(compress(params, trained)) for params in (self.fp16_params, self.fp32_params))
            torch._foreach_copy_(halves, floats)

    def zero_grad(self) -> None:
        params = self.fp32_params
        if self.has_flat_params:
            return super().zero_grad()
        self.fp32_params = [p32 for p, p32 in zip(self.fp16_params, params) if not p.requires_grad]  # never copied to
        super().zero_grad()
        self.fp32_params, self._needs_sync = params, True  # a step without a backward then fills in zero gradients
