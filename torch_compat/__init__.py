"""Conversion of checkpoints between PyTorch and jaxforge; never imports the training loop."""
