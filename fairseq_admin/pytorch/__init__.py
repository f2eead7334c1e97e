"""Admin in any Post-LN model of PyTorch: `diagnose` a new model, `attach`, `profile`, train with anything, `fold`.

This package imports only torch: neither fairseq, whose plugin uses the same mathematics, nor transformers.
"""

from .attaching import attach, fold, folded_state_dict, omegas
from .diagnosing import diagnose
from .profiling import profile

__all__ = ["attach", "diagnose", "fold", "folded_state_dict", "omegas", "profile"]
