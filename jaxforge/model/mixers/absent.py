"""Absence of a mixer, for layers that have a feed-forward only."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import PyTree

from jaxforge.config.model import NO_MIXER, ModelConfig
from jaxforge.model.cost import MixerCost
from jaxforge.model.linear import Declare
from jaxforge.model.mixer import Mixer, SavedValues, register_mixer


@register_mixer(NO_MIXER)
class NoMixer(Mixer):
    """Mixer without parameters, state and cost; blocks do not call it."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        """Declare nothing."""

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> PyTree:
        """Return the empty tree."""
        return None

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> PyTree:
        """Return the empty tree."""
        return None

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return a cost of zero."""
        return MixerCost(0)

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return sizes of zero."""
        return SavedValues(0, 0, 0)
