"""`fairseq-admin export`: write a model as a folder for another engine, and check it before the folder appears."""
