"""`attach` and `fold` with ω where a branch is written; it will replace those of the parent package.

Not exported yet: it is held against the old ones first. See its tests, tests/test_pytorch_grammar.py.
"""

from .attaching import attach, fold, folded_state_dict, omegas

__all__ = ["attach", "fold", "folded_state_dict", "omegas"]
