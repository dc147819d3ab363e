"""The loop around the step, on the host."""
