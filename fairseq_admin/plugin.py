"""The plugin: importing this module registers it with fairseq.

It registers the models and their presets, the optimizers, a learning-rate schedule and the criterion
`label_smoothed_cross_entropy_fast`. It also lets torch's safe loader read fairseq's checkpoints, lets fairseq broadcast
their fingerprints, turns a user's mistake into one line, and ends fairseq's threads before Python ends.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy

# Importing a model, an optimizer, a schedule or a criterion registers it.
from . import radam, schedule, shutdown  # noqa: F401
from .architectures.language_model import TransformerLMAdminModel
from .architectures.masked_language_model import MaskedLMAdminModel
from .architectures.new_layers_model import DeeperAdminModel
from .architectures.translation_model import TransformerAdminModel
from .checkpoints.files import allow_fairseq_globals, broadcast_fingerprints
from .errors import install_excepthook
from .fast import loss  # noqa: F401

__all__ = ["DeeperAdminModel", "MaskedLMAdminModel", "TransformerAdminModel", "TransformerLMAdminModel"]

# fairseq reads numpy.compat when it generates with a language model or buckets lengths; numpy 2 no longer has it.
if not hasattr(numpy, "compat"):
    numpy.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]

allow_fairseq_globals()
broadcast_fingerprints()
install_excepthook()
