"""`fairseq-admin translate`: raw text in, raw text out, by any of three engines."""
