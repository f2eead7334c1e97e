"""Admin and its rivals: the mathematics, the layers, the profiling pass."""
