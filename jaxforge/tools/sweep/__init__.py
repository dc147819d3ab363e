"""Sweeps: many runs of a config, over a grid of keys or a ladder of sizes."""
