"""The options that a checkpoint was trained with, by fairseq before or after 0.10, by its command line or by hydra."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from ..errors import AdminError


class Options(NamedTuple):
    """As a checkpoint holds them; each part names its kind under `_name`."""

    model: dict[str, Any]
    task: dict[str, Any]
    criterion: dict[str, Any]


def read(state: dict[str, Any], name: str) -> Options:
    """Those of a checkpoint's contents, which errors call `name`; refused if it does not say."""
    if state.get("args") is not None:
        flat = plain(state["args"])
        return Options(*({**flat, "_name": flat.get(kind)} for kind in ("arch", "task", "criterion")))
    if state.get("cfg") is None:
        raise AdminError(
            f"{name} has neither 'cfg' nor 'args', which give the model's sizes. Use the file that fairseq-train saved."
        )
    return Options(*(plain(state["cfg"].get(kind)) for kind in Options._fields))


def plain(section: Any) -> dict[str, Any]:
    """A section of fairseq's configuration as a dict of plain values; None has none."""
    if isinstance(section, Namespace):
        return dict(vars(section))
    if OmegaConf.is_config(section):
        return dict(OmegaConf.to_container(section, resolve=True, enum_to_str=True))  # type: ignore[arg-type]
    return dict(section or {})
