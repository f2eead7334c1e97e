"""Reading, writing, averaging, folding and comparing checkpoints."""
