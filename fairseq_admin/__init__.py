"""Admin for fairseq: `fairseq-train DATA --user-dir fairseq_admin --arch transformer_admin_18l ...`.

Importing the package registers the model, its architectures and `--optimizer radam`, lets torch's safe loader read
fairseq's checkpoints, and shows users' mistakes as one line instead of a traceback.
"""

__version__ = "0.1.0"

from . import checkpoint, errors, model, radam  # noqa: F401  (importing model and radam registers them)

checkpoint.allow_fairseq_globals()
errors.install_excepthook()
