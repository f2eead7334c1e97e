"""What trains faster and computes the same: layers, loss and optimizer, each next to the plain one that it stands for."""
