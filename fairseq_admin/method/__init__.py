"""What Admin and its rivals compute: the mathematics, the layers, the profiling pass."""
