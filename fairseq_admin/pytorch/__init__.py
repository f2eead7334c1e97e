"""Admin in any Post-LN model of PyTorch."""
