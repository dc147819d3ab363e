"""Mixers of a layer with several mixers side by side, or with none."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import PyTree

from jaxforge.config.model import NO_MIXER, ModelConfig
from jaxforge.model.cost import MixerCost
from jaxforge.model.mixer import Mixer, SavedValues, register_mixer


class CombinedMixers(Mixer):
    """Several mixers, or none, that read the same input and whose outputs are added.

    A block declares them under their own names and calls each one (`mixer.add_outputs`), so that
    this class has no instances. It answers for all of them: decoding states by name, and sums.
    """

    parts: ClassVar[Mapping[str, type[Mixer]]]

    @classmethod
    def of(cls, parts: Mapping[str, type[Mixer]]) -> type["CombinedMixers"]:
        """Return the class of layers with these mixers, by name."""
        classes = parts.values()
        return type(cls.__name__, (cls,), {
            "parts": parts,
            "scores_pairs": any(mixer.scores_pairs for mixer in classes),
            "is_recurrent": any(mixer.is_recurrent for mixer in classes),
        })  # fmt: skip

    @classmethod
    def _states(cls, state_of: Callable[[str, type[Mixer]], PyTree]) -> PyTree:
        return {name: state_of(name, mixer) for name, mixer in cls.parts.items()} or None

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> PyTree:
        """Return the decoding states by name; None without mixers."""
        return cls._states(lambda _, mixer: mixer.empty_cache(config, batch, length, dtype))

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> PyTree:
        """Return the logical axes of the decoding states."""
        return cls._states(lambda _, mixer: mixer.cache_axes(config))

    @classmethod
    def extend_cache(cls, cache: PyTree, tokens: int) -> PyTree:
        """Return decoding states with room for more tokens."""
        return cls._states(lambda name, mixer: mixer.extend_cache(cache[name], tokens))

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer."""
        costs = [mixer.cost(config) for mixer in cls.parts.values()]
        return MixerCost(*map(sum, zip(MixerCost(0), *costs, strict=True)))

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of the saved values of all mixers."""
        sizes = [mixer.saved_values(config, share) for mixer in cls.parts.values()]
        return SavedValues(*map(sum, zip(SavedValues(0, 0, 0), *sizes, strict=True)))

    @classmethod
    def working_values(cls, config: ModelConfig, share: Callable[[int], int]) -> int:
        """Return the sum over all mixers: the compiler may compute their gradients together."""
        return sum(mixer.working_values(config, share) for mixer in cls.parts.values())


register_mixer(NO_MIXER)(CombinedMixers.of({}))
