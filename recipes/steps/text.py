"""The package's text, for the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_admin.text.bpe import BPE, remove_bpe
    from fairseq_admin.text.tokens import Text
else:
    from recipes.plugin.text.bpe import BPE, remove_bpe
    from recipes.plugin.text.tokens import Text

__all__ = ["BPE", "Text", "remove_bpe"]
