"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

Importing the package registers the models, their architectures and `--optimizer radam`, lets torch's safe loader read
fairseq's checkpoints, and shows users' mistakes as one line instead of a traceback.
"""

import logging

__version__ = "0.1.0"

# Said at the import of fairseq: that it lacks tensorboardX, for speech.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

# Importing a model or an optimizer registers it.
from . import checkpoint, errors, language_model, masked_lm, model, radam  # noqa: E402, F401

checkpoint.allow_fairseq_globals()
errors.install_excepthook()
