"""What the plugin of fairseq and Admin for PyTorch share. It imports only torch."""
