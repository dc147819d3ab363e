"""Names of the weights of a checkpoint; commands import this module without the others."""

from typing import Literal, get_args

Weights = Literal["raw", "ema"]
"""Weights of a checkpoint: the parameters, or their average (`train.ema_decay`)."""
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
