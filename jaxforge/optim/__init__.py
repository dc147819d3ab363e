"""Optimizers and learning-rate schedules, as one optax chain."""
