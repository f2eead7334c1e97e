"""Hydra imports what is in this folder before it reads a command line.

So `fairseq-hydra-train model=transformer_admin_18l` finds the names that importing fairseq_admin registers; fairseq
itself imports --user-dir after that.
"""

import fairseq_admin  # noqa: F401
