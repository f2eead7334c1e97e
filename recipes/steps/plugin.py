"""What the plugin says of itself, without torch and fairseq: its table of schemes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_admin.errors import DIVERGED
    from fairseq_admin.method.schemes import EVERY, SCHEMES
else:
    from recipes.plugin.errors import DIVERGED
    from recipes.plugin.method.schemes import EVERY, SCHEMES

__all__ = ["DIVERGED", "EVERY", "SCHEMES"]
