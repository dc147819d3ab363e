"""PyTorch's side of checkpoints: names, layouts, conversions. Never imports jaxforge's loop."""
