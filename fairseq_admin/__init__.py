"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

`attach`, `fold` and `diagnose`, of `fairseq_admin.pytorch`, bring Admin to any Post-LN model of PyTorch. They need no
fairseq, so importing this package does not import fairseq. If fairseq is loaded already, as with `--user-dir`, the
import registers the plugin; otherwise `register` or the first use of a model class does.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .packages import need
from .version import __version__

if TYPE_CHECKING:
    from .plugin import DeeperAdminModel, MaskedLMAdminModel, TransformerAdminModel, TransformerLMAdminModel
    from .pytorch import attach, diagnose, fold

MODULES = {
    "DeeperAdminModel": ".plugin",
    "MaskedLMAdminModel": ".plugin",
    "TransformerAdminModel": ".plugin",
    "TransformerLMAdminModel": ".plugin",
    "attach": ".pytorch",
    "diagnose": ".pytorch",
    "fold": ".pytorch",
}
"""The modules that are imported when one of these names is first used."""
__all__ = [
    "DeeperAdminModel",
    "MaskedLMAdminModel",
    "TransformerAdminModel",
    "TransformerLMAdminModel",
    "__version__",
    "attach",
    "diagnose",
    "fold",
    "register",
]


def register() -> None:
    """Register the models, losses, optimizers and schedule with fairseq. A second call does nothing.

    Raises:
        AdminError: fairseq is not installed.
    """
    need("fairseq")
    from . import plugin  # noqa: F401


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if MODULES[name] == ".plugin":
        register()
    return getattr(importlib.import_module(MODULES[name], __name__), name)


if sys.modules.get("fairseq"):
    register()
