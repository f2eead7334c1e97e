"""Admin in any Post-LN model of PyTorch: `diagnose` a new model, `attach`, train with anything, `fold`.

This package imports only torch: neither fairseq, whose plugin shares the mathematics in `core`, nor transformers.
"""

from .attaching import attach, fold, folded_state_dict, omegas
from .coordinate_check import coordinate_check
from .diagnosing import diagnose

__all__ = ["attach", "coordinate_check", "diagnose", "fold", "folded_state_dict", "omegas"]
