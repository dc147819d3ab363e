"""Pre-training of decoder language models in JAX, with the loop semantics of PyTorch's loops."""
