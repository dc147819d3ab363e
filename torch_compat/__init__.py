"""PyTorch's side of checkpoints: names, layouts and conversions. Imports jaxforge, never its loop."""
