"""`[optimizer]`: the update rule."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxforge.config.section import Section
from jaxforge.registry import Registry

OPTIMIZERS = Registry("optimizer.name", "adamw", "lion", "schedule_free_adamw", "muon")
"""Update rules: `optim.optimizer`."""

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a running mean."""


class OptimizerConfig(Section):
    """Update rule and its constants."""

    name: Annotated[str, OPTIMIZERS] = "adamw"
    """Update rule."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of every parameter with more than one dimension."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decays of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    fused: bool = True
    """Without effect: XLA fuses the update."""
    muon_momentum: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Momentum of Muon."""
    muon_ns_steps: PositiveInt = 5
    """Newton-Schulz iterations of Muon."""
    muon_adam_lr: PositiveFloat | None = None
    """Learning rate of the parameters that Muon leaves to AdamW; not set means lr."""
    schedule_free_warmup_steps: NonNegativeInt = 0
    """Updates over which schedule-free AdamW warms up."""
