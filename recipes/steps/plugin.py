"""What the plugin says of itself: its table of schemes."""

from __future__ import annotations

from fairseq_admin.errors import DIVERGED
from fairseq_admin.method.schemes import EVERY, SCHEMES

__all__ = ["DIVERGED", "EVERY", "SCHEMES"]
