"""`fairseq-admin translate`: raw text in, raw text out, by fairseq or CTranslate2."""
