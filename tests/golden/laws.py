"""The golden tables of the methods in the authors' code (see omega.py).

laws.tsv has the mean, standard deviation and distribution of every kind of parameter, for each method that their code
trains, over the layers of a model of kinds.SIZES and over 100 seeds. Parameters have the names of today's fairseq,
with a star for the layer; the authors' rezero_weight is our branch_scale. rivals.py describes logits.json and
gradients.json.
"""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).with_name("laws.tsv")
LOGITS = Path(__file__).with_name("logits.json")
GRADIENTS = Path(__file__).with_name("gradients.json")
FUNCTIONS = ("post-ln", "pre-ln", "rezero", "rezero-post-ln", "deepnorm")
METHODS = ("admin", *FUNCTIONS, "looklinear")
"""Our names of the schemes."""


def kind(name: str) -> str:
    """A parameter's name without the number of its layer."""
    return re.sub(r"layers\.\d+", "layers.*", name).replace("rezero_weight", "branch_scale")
