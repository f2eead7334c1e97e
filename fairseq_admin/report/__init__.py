"""`fairseq-admin report`: the runs and their results, as one page."""
