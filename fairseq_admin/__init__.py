"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

And for any Post-LN model of PyTorch: `fairseq_admin.pytorch`, which needs no fairseq. Importing the package registers
the plugin (see `plugin`) with fairseq where fairseq is loaded, or else when it first is.
"""

from typing import TYPE_CHECKING, Any

from . import lazy
from .version import __version__

if TYPE_CHECKING:
    from .plugin import DeeperAdminModel, MaskedLMAdminModel, TransformerAdminModel, TransformerLMAdminModel

__all__ = ["DeeperAdminModel", "MaskedLMAdminModel", "TransformerAdminModel", "TransformerLMAdminModel", "__version__"]

lazy.register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import plugin

    return getattr(plugin, name)
