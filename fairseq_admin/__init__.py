"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

Importing the package registers the models, their architectures, optimizers, a learning-rate schedule and a criterion
(`--criterion label_smoothed_cross_entropy_fast`), lets torch's safe loader read fairseq's checkpoints, and shows users'
mistakes as one line instead of a traceback.
"""

import logging
from types import SimpleNamespace

import numpy

# On import, fairseq logs that tensorboardX is missing, which only speech needs.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

# fairseq reads numpy.compat when it generates with a language model or buckets lengths; numpy 2 no longer has it.
if not hasattr(numpy, "compat"):
    numpy.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]

from . import errors  # noqa: E402

errors.install_excepthook()  # first: the other imports take seconds, in which a user may press Ctrl-C

# Importing a model, an optimizer, a schedule or a criterion registers it.
from . import loading, radam, schedule  # noqa: E402, F401
from .architectures.deeper_model import DeeperAdminModel  # noqa: E402
from .architectures.language_model import TransformerLMAdminModel  # noqa: E402
from .architectures.masked_language_model import MaskedLMAdminModel  # noqa: E402
from .architectures.translation_model import TransformerAdminModel  # noqa: E402
from .checkpoints.files import allow_fairseq_globals  # noqa: E402
from .fast import loss  # noqa: E402, F401
from .version import __version__  # noqa: E402

__all__ = ["DeeperAdminModel", "MaskedLMAdminModel", "TransformerAdminModel", "TransformerLMAdminModel", "__version__"]

allow_fairseq_globals()
loading.end_before_python()
