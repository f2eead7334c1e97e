"""Admin in any Post-LN model of PyTorch: `attach`, `profile`, train with anything, `fold`.

It imports torch alone: neither fairseq, whose plugin uses the same mathematics, nor transformers.
"""

from .attaching import attach, omegas
from .folded import fold, folded_state_dict
from .profiling import profile

__all__ = ["attach", "fold", "folded_state_dict", "omegas", "profile"]
