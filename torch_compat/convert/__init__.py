"""The commands that convert, inspect and verify checkpoints."""
