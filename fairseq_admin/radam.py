"""`--optimizer radam`: rectified Adam (Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond").

torch does the arithmetic. In two points we follow the optimizer of the authors' Transformer-Clinic instead. While the
variance is intractable (ρ_t ≤ 5: the first five steps at β2 = 0.98) it makes no step; torch and microsoft/deepnmt make
a momentum step. Weight decay is decoupled, p ← p - lr·wd·p, in those steps too.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, List, NamedTuple

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import register_optimizer
from omegaconf import II
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.radam import radam

from .errors import AdminError
from .fast.radam import fused_step, has_kernel, rectification
from .rates import ByGroup, refuse_other_groups

# Do not import annotations from __future__ in this file: fairseq reads the types of RAdamConfig.

CHUNK = 2**22
"""Elements of half precision updated at once, in 34 MB that are kept. A larger parameter is updated alone, in its own 8
bytes an element."""
MOMENTS = "exp_avg", "exp_avg_sq"


def chunks(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut parameters into chunks.

    Args:
        params: the parameters, in order.

    Yields:
        Lists with at most CHUNK elements in all. A list with a larger parameter holds only that parameter.
    """
    chunk: list[Tensor] = []
    elements = 0
    for p in params:
        if chunk and elements + p.numel() > CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(p)
        elements += p.numel()
    if chunk:
        yield chunk


def float_copies(params: list[Tensor], block: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Make float32 tensors for half parameters and for their gradients, one after another in a block of memory.

    Args:
        params: parameters of half precision.
        block: the memory. None: allocate it.

    Returns:
        The tensors for the parameters, and those for the gradients.
    """
    both = [*params, *params]
    ends = list(accumulate(p.numel() for p in both))
    if block is None:
        block = params[0].new_empty(ends[-1], dtype=torch.float32)
    views = [block.as_strided(p.size(), p.stride(), end - p.numel()) for p, end in zip(both, ends)]
    return views[: len(params)], views[len(params) :]


def plain_step(
    params: list[Tensor], grads: list[Tensor], moments: list[Tensor], squares: list[Tensor], step: int,
    grad_scale: float | Tensor, **options: float,
) -> None:  # fmt: skip
    """Update parameters by torch's RAdam, as `fast.radam.fused_step` does by its kernel.

    Args:
        params: float32, updated in place.
        grads: their gradients, divided by `grad_scale` in place.
        moments, squares: the running means of the gradients and of their squares, updated in place.
        step: number of this update, from 1.
        grad_scale: divisor of the gradients.
        options: lr, beta1, beta2, eps and weight_decay.
    """
    if torch.is_tensor(grad_scale) or grad_scale != 1:  # reading a tensor would wait for the device
        torch._foreach_div_(grads, grad_scale)
    decay = 1 - options["lr"] * options["weight_decay"]
    held = [] if rectification(step, options["beta2"]) else [p * decay for p in params]
    before = [torch.tensor(step - 1.0) for _ in params]  # torch counts by itself
    radam(params, grads, moments, squares, before, decoupled_weight_decay=True, **options)  # type: ignore[arg-type]
    for p, value in zip(params, held):
        p.copy_(value)


class Chunk(NamedTuple):
    """Parameters of one type and one number of steps, updated at once.

    They share the tensor that counts their steps: a thousand such tensors cost more than the kernel. Half parameters
    have `float_copies`, unless they are too large.
    """

    params: list[Tensor]
    moments: list[Tensor]
    squares: list[Tensor]
    step: Tensor
    copies: tuple[list[Tensor], list[Tensor]] | None


class RAdam(Optimizer):
    """Rectified Adam without steps while the variance is intractable. Its state is always float32.

    Example:
        >>> import torch
        >>> from fairseq_admin.radam import RAdam
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = RAdam([weight], lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
        >>> for step in range(6):
        ...     optimizer.zero_grad()
        ...     weight.square().sum().backward()
        ...     optimizer.step()
        ...     print(step + 1, bool((weight < 1).all()))
        1 False
        2 False
        3 False
        4 False
        5 False
        6 True

    Args:
        params: tensors, or groups, as for torch's optimizers.
        lr: the learning rate.
        betas: β1 and β2.
        eps: added to the root of the second moment.
        weight_decay: decoupled, multiplied by the learning rate.
    """

    fused = True
    """Whether to use torch's fused kernel, if the device has it. Otherwise the reference, torch's RAdam, is used."""

    supports_flat_params = True
    supports_memory_efficient_fp16 = True
    # Otherwise fairseq would replace the state that load_state_dict has built by the checkpoint's tensors on the CPU.
    disable_mem_eff_fp16_loading_hack = True

    # torch wraps these methods for its compiler. The wrapper would load the compiler, at a cost of 65 MB and one
    # second.
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    _load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.chunks_by_group: dict[int, tuple[list[bool], list[Chunk]]] = {}

    @property
    def supports_step_with_scale(self) -> bool:
        """Whether a step accepts a scale of its gradients. A step of half-precision parameters does.

        Such gradients are divided in float32. With float32 parameters, fairseq's wrapper of float32 copies (--bf16)
        would not reset its factor after a step with a scale.
        """
        return self.param_groups[0]["params"][0].dtype != torch.float32

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the moments in float32.

        Args:
            state_dict: a state that `state_dict` returned.

        Raises:
            AdminError: the state belongs to other parameters.
        """
        refuse_other_groups(self, state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        moments = [{k: m for k, m in state_dict["state"].get(i, {}).items() if k != "step"} for i in saved]
        if any(m.shape != p.shape for p, ms in zip(params, moments) for m in ms.values()):
            raise AdminError(
                f"the checkpoint's optimizer state is of {len(saved)} tensors of other shapes than this run's (is it "
                "another model, or pruned?). Give --reset-optimizer to start with a new state."
            )
        self.chunks_by_group.clear()
        self._load_state_dict(state_dict)
        for p, i, both in zip(params, saved, moments):
            for name, moment in both.items():
                self.state[p][name] = moment.to(p.device, torch.float32, copy=True)
            if i in state_dict["state"]:
                self.state[p]["step"] = torch.tensor(float(state_dict["state"][i]["step"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, scale: float | Tensor = 1.0):
        """Make a step. Gradients are divided by `scale` first.

        Half-precision gradients are divided in float32, where the quotient is not too small.

        Args:
            closure: computes the loss again.
            scale: the loss scale, times other divisors of fairseq's.

        Returns:
            The closure's loss. None: there is no closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for chunk in self._chunks(number, group["params"]):
                self._step_chunk(group, chunk, scale)
        return loss

    def _chunks(self, number: int, params: list[Tensor]) -> list[Chunk]:
        """Chunk those parameters of a group that have gradients.

        Float32 parameters that have taken the same number of steps are one chunk. A layer that layerdrop skipped has
        taken fewer steps than its neighbours. Chunks are kept, with their copies in one block, until other parameters
        have gradients: for small parameters, making them takes a third of a step.
        """
        without = [p.grad is None for p in params]
        if self.chunks_by_group.get(number, ((),))[0] != without:
            by_step: dict[float, list[Tensor]] = {}
            for p in params:
                if p.grad is not None:
                    by_step.setdefault(float(self.state[p].get("step", 0)), []).append(p)
            block = None
            if params[0].dtype != torch.float32:
                block = params[0].new_empty(2 * min(CHUNK, sum(p.numel() for p in params)), dtype=torch.float32)
            self.chunks_by_group[number] = without, []
            for step, equal in by_step.items():
                for part in [equal] if block is None else chunks(equal):
                    self.chunks_by_group[number][1].append(self._chunk(part, torch.tensor(step), block))
        return self.chunks_by_group[number][1]

    def _chunk(self, params: list[Tensor], step: Tensor, block: Tensor | None) -> Chunk:
        """Make a chunk of parameters with this number of steps. Parameters without a state get one."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states):
            if not state:
                state.update({name: torch.zeros_like(p, dtype=torch.float32) for name in MOMENTS})
            state["step"] = step
        kept = block is not None and params[0].numel() <= CHUNK
        moments, squares = ([state[name] for state in states] for name in MOMENTS)
        return Chunk(params, moments, squares, step, float_copies(params, block) if kept else None)

    def _step_chunk(self, group: dict[str, Any], chunk: Chunk, scale: float | Tensor) -> None:
        masters, grads = chunk.params, [gradient for p in chunk.params if (gradient := p.grad) is not None]
        if masters[0].dtype != torch.float32:
            halves, (masters, grads) = grads, chunk.copies or float_copies(chunk.params)
            torch._foreach_copy_(masters, chunk.params)
            torch._foreach_copy_(grads, halves)
        update = fused_step if self.fused and has_kernel(masters[0].device) else plain_step
        options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
        options |= zip(("beta1", "beta2"), group["betas"])
        update(masters, grads, chunk.moments, chunk.squares, int(chunk.step) + 1, grad_scale=scale, **options)
        chunk.step.add_(1)
        if masters is not chunk.params:
            torch._foreach_copy_(chunk.params, masters)


@dataclass
class RAdamConfig(FairseqDataclass):
    """Options of --optimizer radam, named as fairseq's adam names them."""

    adam_betas: Any = field(default=(0.9, 0.98), metadata={"help": "beta1 and beta2, e.g. '(0.9, 0.98)'"})
    adam_eps: float = field(default=1e-8, metadata={"help": "added to the root of the second moment"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay, multiplied by the lr"})
    lr: List[float] = II("optimization.lr")


def _betas(value: Any) -> tuple[float, float]:
    try:
        beta1, beta2 = (float(b) for b in (ast.literal_eval(value) if isinstance(value, str) else value))
    except (ValueError, SyntaxError, TypeError):
        raise AdminError(f"--adam-betas is {value!r}; two numbers were expected, e.g. '(0.9, 0.98)'.") from None
    if not (0 <= beta1 < 1 and 2 / 3 < beta2 < 1):  # else ρ_t stays below 5
        raise AdminError(
            f"--adam-betas is {value!r}; expected beta1 from 0 to 1 and beta2 from 2/3 to 1, both below 1, e.g. "
            "'(0.9, 0.98)'. With a beta2 up to 2/3, radam never makes a step."
        )
    return beta1, beta2


def _not_negative(option: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise AdminError(f"{option} is {value}; a number of at least 0 was expected.")
    return value


@register_optimizer("radam", dataclass=RAdamConfig)
class FairseqRAdam(ByGroup):
    """fairseq's handle on `RAdam`.

    Args:
        cfg: the options of `RAdam`.
        params: the parameters of the model.
    """

    def __init__(self, cfg: RAdamConfig, params) -> None:
        super().__init__(cfg)
        self._optimizer = RAdam(self.grouped(params), **self.optimizer_config)
        self.has_experts = any(hasattr(p, "expert") for p in self.params)

    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None) -> Tensor:
        """Clip as fairseq does, with one operation for all norms instead of one each."""
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        grads = [gradient for p in params if (gradient := p.grad) is not None]
        if not grads or self.has_experts:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, dtype=torch.float32)))
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp_(max=1))
        return norm

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The arguments of `RAdam`. As in fairseq, a resumed run takes all but the rate from the checkpoint."""
        return {
            "lr": next(iter(self.cfg.lr)) if isinstance(self.cfg.lr, Iterable) else self.cfg.lr,
            "betas": _betas(self.cfg.adam_betas),
            "eps": _not_negative("--adam-eps", self.cfg.adam_eps),
            "weight_decay": _not_negative("--weight-decay", self.cfg.weight_decay),
        }
