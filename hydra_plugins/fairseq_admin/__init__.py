"""Hydra imports this module, in every program, before it reads the command line.

In fairseq's programs it registers the plugin, so that `fairseq-hydra-train model=transformer_admin_18l` finds its
models; fairseq itself imports `--user-dir` too late for that. In any other program it does nothing.
"""

import sys

if "fairseq" in sys.modules:
    import fairseq_admin

    fairseq_admin.register()
