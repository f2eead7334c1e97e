"""The same layers, faster: each computes what fairseq's does (its twin), and gives way to it where it must."""
