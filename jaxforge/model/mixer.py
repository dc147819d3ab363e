"""Mixers: the part of a layer that exchanges information between the tokens of a sequence.

A mixer is one file of `model/mixers/`: its parameters, its forward pass over sequences and packed
documents, its decoding state, its cost and its memory. `model.mixer_pattern` selects the mixers of
each layer. Several mixers of a layer read the same input, and their outputs are added.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.aux_outputs import AuxOutputs, join
from jaxforge.config.model import MIXERS, ModelConfig
from jaxforge.kernels.context_parallel import context_size
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.cost import MixerCost
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare, times
from jaxforge.parallel.sharding import Axes, automatic_axes, automatic_spec


class MixerOut(NamedTuple):
    """Outputs of a mixer.

    Attributes:
        y: output to add to the residual stream.
        cache: the next decoding state, if the mixer was given one.
        captured: values of the mixer that the layer captures, by name (`config.points`).
        aux: auxiliary outputs in training.
        keys: keys and values for later layers, if the settings ask for them.
    """

    y: Float[Array, "b s d"]
    cache: PyTree = None
    captured: Mapping[str, Array] = {}
    aux: AuxOutputs = AuxOutputs()
    keys: PyTree = None


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
            precision: precision of linear layers in 8 bits, an argument of their calls.
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
    def empty_aux(cls, config: ModelConfig) -> AuxOutputs:
        """Return the auxiliary outputs of a layer without this mixer, of the same names."""
        return AuxOutputs()

    @classmethod
    def scale_logits(
        cls, config: ModelConfig, params: dict[str, Any], factors: Float[Array, "l heads"]
    ) -> dict[str, Any]:
        """Return parameters of stacked layers that multiply the logits of each head by a factor.

        For `optimizer.qk_clip`. The mixer must also capture `config.eval.MAX_LOGITS`.

        Args:
            config: the model.
            params: parameters of the mixer.
            factors: factors of at most 1.
        """
        raise NotImplementedError

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


def states_by_mixer(cache: PyTree, names: Sequence[str]) -> dict[str, PyTree]:
    """Return the decoding state of each mixer of a layer.

    The state of a layer is that of its mixer; of several mixers, it is a tree by name.
    """
    return {names[0]: cache} if len(names) == 1 else {**dict.fromkeys(names), **(cache or {})}


def add_outputs(outs: Mapping[str, MixerOut], factors: Mapping[str, float]) -> MixerOut:
    """Return the outputs of a layer: the sum of its mixers' outputs, and all other values.

    Args:
        outs: outputs by name of the mixer, at least one.
        factors: factors of outputs by name of the mixer; 1 by default.
    """
    y_BSD = functools.reduce(
        operator.add, (times(out.y, factors.get(name, 1.0)) for name, out in outs.items())
    )
    states = {name: out.cache for name, out in outs.items() if out.cache is not None}
    first, *further = outs
    cache = (states or None) if further else states.get(first)
    captured = {name: value for out in outs.values() for name, value in out.captured.items()}
    aux = join(*(out.aux for out in outs.values()))
    return MixerOut(y_BSD, cache, captured, aux, outs[first].keys)


def mix_shares(
    mix: Callable[[Any, Any, Array | None], Array],
    weights: PyTree,
    tokens: PyTree,
    segment_ids: Int[Array, "b s"] | None,
    *,
    weight_axes: PyTree,
    channels: Axes,
) -> Float[Array, "b s heads *v"]:
    """Call `mix` on each device's share, if devices share sequences, as it communicates.

    Args:
        mix: computes values of heads from weights, tokens and their documents.
        weights: tree of parameters.
        tokens: tree of arrays [b, s, channels].
        segment_ids: document of each token, for packed rows.
        weight_axes: logical axes of each array of `weights`, in the same tree.
        channels: logical axis of the channels of each array of `tokens`.
    """
    names = automatic_axes()
    if context_size() == 1 or not names:
        return mix(weights, tokens, segment_ids)
    of_weights = jax.tree.map(lambda _, axes: automatic_spec(*axes), weights, weight_axes)
    specs = [automatic_spec("batch", "context", axis) for axis in channels]
    of_tokens = jax.tree.unflatten(jax.tree.structure(tokens), specs)
    of_ids = None if segment_ids is None else automatic_spec("batch", "context")
    run = jax.shard_map(
        mix,
        in_specs=(of_weights, of_tokens, of_ids),
        out_specs=automatic_spec("batch", "context", "heads"),
        axis_names=names,
        check_vma=False,  # results of collectives vary as `out_specs` says
    )
    return run(weights, tokens, segment_ids)


AnyMixer = TypeVar("AnyMixer", bound=Mixer)


def register_mixer(name: str) -> Callable[[type[AnyMixer]], type[AnyMixer]]:
    """Register the decorated subclass of `Mixer` as a name of `model.mixer_pattern`.

    Parameters of the mixer in layer i are named `layers.{i}.{name}.*`.
    """
    return MIXERS.register(name)
