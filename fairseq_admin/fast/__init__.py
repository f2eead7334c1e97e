"""What trains faster and computes the same: layers, loss and optimizer, each with the plain one that it stands for."""
