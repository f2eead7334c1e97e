"""Faster layers, loss and optimizer for training. Each computes the same as a plain one, which its docstring names."""
