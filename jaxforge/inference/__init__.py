"""Inference with trained models on any mesh: generation, conversation, evaluation."""

from jaxforge.inference.trained import TrainedModel, open_run

__all__ = ["TrainedModel", "open_run"]
