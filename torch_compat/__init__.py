"""Conversion of checkpoints between PyTorch and jaxforge; never imports the training loop."""

import jaxforge as jaxforge  # removes the working directory from sys.path first
