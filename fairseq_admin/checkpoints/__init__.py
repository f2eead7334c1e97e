"""Read, write, average, fold and compare checkpoints."""
