"""A PyTorch model and ours, run on the same weights and the same batch, value by value."""
