"""Replay of a run's steps from the nearest checkpoint, and an account of what happened."""
