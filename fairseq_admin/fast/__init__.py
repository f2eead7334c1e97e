"""Faster layers, loss and optimizer for training.

Each of them computes the same as a plain version, which its docstring names.
"""
