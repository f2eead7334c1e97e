"""A batch is one argument: a tuple holds positional arguments, a mapping keywords; anything else is the only argument.

For a model that takes one tuple or one mapping, write `(batch,)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.undisturbed import undisturbed
from ..errors import AdminError


def arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """The positional and the keyword arguments of a batch.

    Raises:
        AdminError: the batch is a DataLoader, whose batches may also hold labels.
    """
    if isinstance(batch, DataLoader):
        raise AdminError("a DataLoader is not a batch; give one batch, with only what the model's forward takes.")
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return batch if isinstance(batch, tuple) else (batch,), {}


def call(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def argument_names(module: nn.Module) -> list[str]:
    """The names of the positional arguments of a module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a builtin function, such as torch.relu
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def by_name(model: nn.Module, batch: Any) -> dict[str, Any]:
    """The arguments of a batch, in order, by their names in the model's forward, or by position if without a name."""
    args, kwargs = arguments(batch)
    names = argument_names(model)
    names += [f"argument {position}" for position in range(len(names), len(args))]
    return {**dict(zip(names, args)), **kwargs}


def forward_call(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]) -> tuple[tuple, dict]:
    """The positional and the keyword arguments that a loss gives to a model's forward for a batch of the training.

    Raises:
        AdminError: the loss does not call the model.
    """
    calls: list[tuple[tuple, dict]] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with undisturbed(model):
        loss(model, batch)
    hook.remove()
    if not calls:
        raise AdminError("loss(model, batch) did not call the model that it was given; expected model(...) in it.")
    return calls[0]


def as_batch(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as one batch."""
    return {**by_name(model, args), **kwargs} if kwargs else args
