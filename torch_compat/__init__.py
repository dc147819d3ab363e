"""PyTorch's side of checkpoints: names, layouts, conversions. Never imports jaxforge's loop."""

import jaxforge as jaxforge  # takes the working directory from the path before other imports
