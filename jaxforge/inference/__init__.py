"""Trained models in use: opened on any mesh, continuing prompts, evaluated."""

from jaxforge.inference.trained import TrainedModel, open_run

__all__ = ["TrainedModel", "open_run"]
