"""What the papers measure of a model: fairseq-admin analyze."""
