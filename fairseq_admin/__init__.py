"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

`fairseq_admin.pytorch` brings Admin to any Post-LN model of PyTorch and needs no fairseq, so importing this package
does not import fairseq. If fairseq is loaded already, as with `--user-dir`, the import registers the plugin; otherwise
`register` or the first use of a model class does.
"""

import sys
from typing import TYPE_CHECKING, Any

from .packages import need
from .version import __version__

if TYPE_CHECKING:
    from .plugin import DeeperAdminModel, MaskedLMAdminModel, TransformerAdminModel, TransformerLMAdminModel

__all__ = [
    "DeeperAdminModel",
    "MaskedLMAdminModel",
    "TransformerAdminModel",
    "TransformerLMAdminModel",
    "__version__",
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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    from . import plugin

    return getattr(plugin, name)


if sys.modules.get("fairseq"):
    register()
