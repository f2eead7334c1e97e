"""The options that a checkpoint was trained with, by fairseq before or after 0.10, by its command line or by hydra."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from ..errors import AdminError


class Options(NamedTuple):
    """As a checkpoint holds them; each part names its kind under `_name`."""

    model: dict[str, Any]
    task: dict[str, Any]
    criterion: dict[str, Any]


def read(state: dict[str, Any], name: str) -> Options:
    """Those of a checkpoint's contents.

    Args:
        name: what errors call it.

    Raises:
        AdminError: it does not say.
    """
    args, cfg = state.get("args"), state.get("cfg")
    if args is not None:
        if not hasattr(args, "__dict__"):
            raise _damaged(f"{name}: its 'args'")
        flat = dict(vars(args))
        return Options(*({**flat, "_name": flat.get(kind)} for kind in ("arch", "task", "criterion")))
    if cfg is None:
        raise AdminError(
            f"{name} has neither 'cfg' nor 'args', which give the model's sizes. Use the file that fairseq-train saved."
        )
    return Options(*(plain(cfg.get(kind), f"{name}: its 'cfg.{kind}'") for kind in Options._fields))


def plain(section: Any, what: str) -> dict[str, Any]:
    """A section of fairseq's configuration, of whatever kind, as a dict of plain values.

    Args:
        section: None has none.
        what: its name in errors.

    Raises:
        AdminError: it is not a section.
    """
    if section is None:
        return {}
    if isinstance(section, Namespace):
        return dict(vars(section))
    if OmegaConf.is_config(section):
        return dict(OmegaConf.to_container(section, resolve=True, enum_to_str=True))  # type: ignore[arg-type]
    if not isinstance(section, Mapping):
        raise _damaged(what)
    return dict(section)


def _damaged(what: str) -> AdminError:
    return AdminError(
        f"{what} is not what fairseq-train saves there: the file is damaged. Copy it again, or take an earlier one."
    )
