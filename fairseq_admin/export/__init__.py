"""`fairseq-admin export`: a model as a folder that another engine reads, checked before it is there."""
