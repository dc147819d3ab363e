"""Mixers: the part of a layer that exchanges information between the tokens of a sequence.

A mixer is one file of `model/mixers/`: its parameters, its forward pass over sequences and packed
documents, its decoding state, its cost and its memory. `model.mixer` and `model.mixer_pattern`
choose the mixer of each layer.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxforge.aux_outputs import Max
from jaxforge.config.model import MIXERS, ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.cost import MixerCost
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare


class MixerOut(NamedTuple):
    """Outputs of a mixer.

    Attributes:
        y: output to add to the residual stream.
        cache: the next decoding state, if the mixer was given one.
        amax: amax of the linear layers, if the layer records them.
        captured: values of the mixer that the layer captures, by name (`config.points`).
    """

    y: Float[Array, "b s d"]
    cache: PyTree = None
    amax: Mapping[str, Max] = {}
    captured: Mapping[str, Array] = {}


class SavedValues(NamedTuple):
    """Values per token that the backward pass of a mixer needs, as numbers of elements per device.

    Attributes:
        projections: results of products with matrices, without the output of the mixer.
        mixed: results of other products, which are the input of the last matrix.
        inside: further values that are saved without rematerialization.
    """

    projections: int
    mixed: int
    inside: int


class Mixer(nnx.Module):
    """Base class of mixers, declared for all layers of a stack at once.

    Args:
        config: the `[model]` section.
        declare: declares the parameters, each with its logical axes.
    """

    scores_pairs: ClassVar[bool] = False
    """Whether the mixer scores pairs of tokens with an attention kernel (`Runtime.attention`)."""

    is_recurrent: ClassVar[bool] = False
    """Whether the decoding state summarizes all earlier tokens; padding must not enter it."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        raise NotImplementedError

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: PyTree = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Mix the tokens of `x` and, with a decoding state, all earlier tokens.

        Args:
            x_BSD: normalized residual stream.
            context: positions and documents of the tokens. With a decoding state, `positions` are
                given, and every row is one document.
            cache: decoding state; None in training and evaluation.
            settings: settings of the layer.
            precision: precision of linear layers in 8 bits.
        """
        raise NotImplementedError

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> PyTree:
        """Return the decoding state of one layer before the first token.

        Args:
            config: the model.
            batch: number of sequences, the first dimension of each array.
            length: number of tokens that the state must have room for.
            dtype: dtype of activations.
        """
        raise NotImplementedError

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> PyTree:
        """Return the logical axes of each array of the decoding state, in the same tree."""
        raise NotImplementedError

    @classmethod
    def extend_cache(cls, cache: PyTree, tokens: int) -> PyTree:
        """Return a decoding state with room for more tokens; the same if its size is constant.

        Arrays may have a leading dimension of layers.
        """
        return cache

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer."""
        raise NotImplementedError

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of saved values.

        Args:
            config: the model.
            share: size of a dimension that `tp` splits -> size on one device.
        """
        raise NotImplementedError

    @classmethod
    def working_values(cls, config: ModelConfig, share: Callable[[int], int]) -> int:
        """Return the float32 numbers per token that the backward pass of one layer also needs.

        They exist for one layer at a time, under any rematerialization. 0 if the mixer computes a
        few tokens at a time.

        Args:
            config: the model.
            share: size of a dimension that `tp` splits -> size on one device.
        """
        return 0


AnyMixer = TypeVar("AnyMixer", bound=Mixer)


def register_mixer(name: str) -> Callable[[type[AnyMixer]], type[AnyMixer]]:
    """Register the decorated subclass of `Mixer` as `model.mixer = name`.

    Parameters of the mixer in layer i are named `layers.{i}.{name}.*`.
    """
    return MIXERS.register(name)


def parameter_shapes(config: ModelConfig, mixer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixer's parameters in one layer, by name."""

    def declared() -> nnx.Module:
        module: nnx.Module = MIXERS[mixer](
            config, Declare(nnx.Rngs(params=jax.random.key(0)), jnp.dtype(jnp.float32))
        )
        return module

    state = nnx.state(nnx.eval_shape(declared), nnx.Param)
    return {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
