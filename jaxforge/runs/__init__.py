"""Run directories: config, starts, metrics and how they are read."""
