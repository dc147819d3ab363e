"""Attention to the keys and values of an earlier layer, as in Gemma 3n and 4.

The last `model.n_kv_shared_layers` layers have no matrices of keys and values. They attend to those
of the last earlier layer with the same mixer, in its rotary positions, and need no cache.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxforge.config.mixers import GLOBAL_ATTENTION
from jaxforge.config.model import ATTENTION, SHARED_MIXERS, ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers.attention import Attention, Keys, KVCache


class SharedAttention(Attention):
    """Attention to the keys and values of a layer of `Attention`."""

    source = ATTENTION
    name = SHARED_MIXERS[ATTENTION]
    # A limit on the logits of a layer would change the keys of others.
    scale_logits = Mixer.scale_logits

    def _keys(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Keys:
        keys: Keys = context.keys[self.source]
        return keys

    @classmethod
    def empty_cache(  # type: ignore[override]
        cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype
    ) -> None:
        """Return None: the layer has no state of its own."""

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> None:  # type: ignore[override]
        """Return None: the layer has no state of its own."""

    @classmethod
    def extend_cache(cls, cache: None, tokens: int) -> None:  # type: ignore[override]
        """Return None: the layer has no state of its own."""


class SharedGlobalAttention(SharedAttention):
    """Attention to the keys and values of a layer of `GlobalAttention`."""

    source = GLOBAL_ATTENTION
    name = SHARED_MIXERS[GLOBAL_ATTENTION]
    is_wide = True


CLASSES: dict[str, type[Mixer]] = {
    each.name: each for each in (SharedAttention, SharedGlobalAttention)
}
"""Classes by name. They are not registered, because `n_kv_shared_layers` selects them."""
