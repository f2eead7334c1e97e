"""Read the options of a checkpoint: by fairseq's command line, by hydra, or by a version before 0.10."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from ..errors import AdminError


class Options(NamedTuple):
    """A checkpoint's options. Each part has its registered name under `_name`."""

    model: dict[str, Any]
    task: dict[str, Any]
    criterion: dict[str, Any]


def read_options(state: dict[str, Any], name: str) -> Options:
    """Read the options in a checkpoint's contents.

    Args:
        state: the contents.
        name: the checkpoint's name, for messages.

    Raises:
        AdminError: it has none.
    """
    if state.get("args") is not None:
        flat = plain(state["args"])
        return Options(*({**flat, "_name": flat.get(kind)} for kind in ("arch", "task", "criterion")))
    if state.get("cfg") is None:
        raise AdminError(
            f"{name} has neither 'cfg' nor 'args', which give the model's sizes. Use the file that fairseq-train saved."
        )
    return Options(*(plain(state["cfg"].get(kind)) for kind in Options._fields))


def plain(section: Any) -> dict[str, Any]:
    """Turn a section of fairseq's configuration into plain values.

    Args:
        section: a Namespace, a config of omegaconf's, a mapping, or None.

    Returns:
        A new dict; empty for None.
    """
    if isinstance(section, Namespace):
        return dict(vars(section))
    if OmegaConf.is_config(section):
        return dict(OmegaConf.to_container(section, resolve=True, enum_to_str=True))  # type: ignore[arg-type]
    return dict(section or {})
