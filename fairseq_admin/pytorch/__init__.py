"""Admin in any Post-LN model of PyTorch: `attach`, `profile`, train with anything, `fold`; `diagnose` before.

It imports torch alone: neither fairseq, whose plugin uses the same mathematics, nor transformers.
"""

from .attaching import attach, omegas
from .diagnosing import diagnose
from .folded import fold, folded_state_dict
from .profiling import profile

__all__ = ["attach", "diagnose", "fold", "folded_state_dict", "omegas", "profile"]
