"""What the plugin says of itself.

    python -m recipes.steps.plugin

prints for make, a word each, every scheme of the table and every one that folds, has ω, or takes any feed-forward
weights, as SCHEME=admin FOLDS=admin OMEGA=admin FFN=admin. Only the standard library is used: a plan can be printed
before anything is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairseq_admin.errors import DIVERGED
    from fairseq_admin.method.schemes import EVERY, SCHEMES
else:
    from recipes.plugin.errors import DIVERGED
    from recipes.plugin.method.schemes import EVERY, SCHEMES

__all__ = ["DIVERGED", "EVERY", "SCHEMES"]


def main() -> None:
    for name, row in SCHEMES.items():
        words = {"SCHEME": True, "FOLDS": row.folds, "OMEGA": row.omega, "FFN": row.ffn is not None}
        print(*(f"{word}={name}" for word, holds in words.items() if holds))
    print(*(f"MORE={name}" for name in EVERY if not name.startswith("t-fixup")))


if __name__ == "__main__":
    main()
