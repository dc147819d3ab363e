"""Checkpoints as states: readers, writers and the meaning of their tensors."""
