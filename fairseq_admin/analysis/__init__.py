"""`fairseq-admin analyze`: the papers' measurements, on your own model."""
