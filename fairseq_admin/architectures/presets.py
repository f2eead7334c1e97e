"""The `--arch` presets of our models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    register_model_architecture,
)
from hydra.core.config_store import ConfigStore

from ..errors import AdminError


def refuse_fully_sharded(args: Namespace) -> None:
    """Refuse fairscale's sharding, under which a model has its weights only while it runs.

    Args:
        args: the command line's options.

    Raises:
        AdminError: --ddp-backend is fully_sharded.
    """
    if getattr(args, "ddp_backend", None) == "fully_sharded":
        raise AdminError(
            "--ddp-backend fully_sharded was given; our models cannot be sharded. Leave it out. To save memory give "
            "--checkpoint-activations, --memory-efficient-fp16, or a smaller --max-tokens with a larger --update-freq."
        )


def _preset(fill: Callable[..., None], sizes: dict[str, int], args: Namespace) -> None:
    refuse_fully_sharded(args)
    fill(args, **sizes)


def register_presets(name: str, model: type, fill: Callable[..., None], **presets: dict[str, int]) -> None:
    """Register a model's presets with fairseq, and as choices of hydra's group `model`.

    fairseq calls a preset with all options of the command line, before it reads any data.

    Args:
        name: the registered name of the model.
        model: the class of the model.
        fill: sets the options that the command line does not: fill(args, **sizes).
        presets: the sizes of each --arch.
    """
    assert MODEL_REGISTRY[name] is model, f"another plugin took the name {name}"
    for arch, sizes in presets.items():
        register_model_architecture(name, arch)(partial(_preset, fill, sizes))
        options: Any = MODEL_DATACLASS_REGISTRY.get(name, FairseqDataclass)()
        options._name = arch
        ConfigStore.instance().store(arch, options, group="model", provider="fairseq_admin")
    if name not in presets:  # under the model's own name, fairseq registered an empty preset
        ARCH_CONFIG_REGISTRY[name] = partial(_preset, fill, {})
