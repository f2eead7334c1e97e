"""`fairseq-admin report`: what was run and what came out, as one page."""
