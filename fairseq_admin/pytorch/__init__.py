"""Admin in any Post-LN model of PyTorch: `diagnose` a new model, `attach`, train with anything, `fold`.

This package imports only torch: neither fairseq, whose plugin shares the mathematics in `core`, nor transformers.
"""

from .attaching import attach, fold, folded_state_dict, omegas
from .diagnosing import diagnose

__all__ = ["attach", "diagnose", "fold", "folded_state_dict", "omegas"]
