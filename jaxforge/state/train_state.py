"""Train state: parameters, optimizer state, guard and counters."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, Params, join
from jaxforge.parallel.groups import on_mesh_of_run, relabeled
from jaxforge.parallel.sharding import param_shardings
from jaxforge.state.progress import Progress

T = TypeVar("T")

_LOW_BITS = 30  # of `WideCount.low`: a sum of two fits into int32


class WideCount(NamedTuple):
    """Device counter, high · 2^30 + low: JAX's integers have 32 bits by default.

    Attributes:
        high: multiple of 2^30, int32.
        low: remainder below 2^30, int32.
    """

    high: Int[Array, ""]
    low: Int[Array, ""]

    @classmethod
    def of(cls, value: int) -> "WideCount":
        """Return a count of `value`."""
        high, low = divmod(value, 1 << _LOW_BITS)
        return cls(jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32))

    def plus(self, n: Int[Array, ""] | int) -> "WideCount":
        """Return the count increased by `n`, 0 <= n < 2^30."""
        low = self.low + n
        return WideCount(self.high + (low >> _LOW_BITS), low & ((1 << _LOW_BITS) - 1))

    def __int__(self) -> int:
        return (int(self.high) << _LOW_BITS) + int(self.low)


WINDOW = 128
"""Number of recent good losses that define a spike."""


class GuardState(NamedTuple):
    """Counts of bad steps and a window of recent good losses; part of the checkpoint.

    Attributes:
        consecutive: latest steps in a row whose update was not applied.
        total: steps of the whole run whose update was not applied.
        nonfinite: steps whose loss or gradient norm was not finite, applied or not.
        spikes: steps whose loss was a spike, applied or not.
        good: steps that were neither.
        losses: ring buffer of the losses of the last good steps; unused entries are NaN.
        loss_scale: loss scale of the next step; 0 for the initial scale, None for unscaled losses.
        loss_scale_tracker: steps without overflow since the scale changed.
    """

    consecutive: Int[Array, ""]
    total: Int[Array, ""]
    nonfinite: Int[Array, ""]
    spikes: Int[Array, ""]
    good: Int[Array, ""]
    losses: Float[Array, "128"]
    loss_scale: Float[Array, ""] | None = None
    loss_scale_tracker: Int[Array, ""] | None = None

    @classmethod
    def fresh(cls, skipped: int = 0, *, scales_loss: bool = False) -> "GuardState":
        """Return the state without recorded losses, after a number of skipped steps."""
        # A separate array per count: the step donates the state, and a buffer cannot be donated
        # twice.
        consecutive, total, nonfinite, spikes, good = (
            jnp.asarray(n, jnp.int32) for n in (0, skipped, 0, 0, 0)
        )
        losses = jnp.full(WINDOW, jnp.nan, jnp.float32)
        scale = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)) if scales_loss else ()
        return cls(consecutive, total, nonfinite, spikes, good, losses, *scale)

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name, without the loss scale if there is none."""
        return {name: leaf for name, leaf in self._asdict().items() if leaf is not None}


class Counts(NamedTuple):
    """Device counters that `Progress` copies: only the device knows which steps were applied.

    Attributes:
        samples: sequences drawn from the data by attempted steps.
        tokens: tokens of applied updates, including padding and masked tokens.
        valid_tokens: tokens of applied updates that have a label.
        padding: padding tokens of applied updates.
    """

    samples: WideCount
    tokens: WideCount
    valid_tokens: WideCount
    padding: WideCount

    @classmethod
    def of(cls, progress: Progress) -> "Counts":
        """Return the counts of `progress`, as a checkpoint holds them."""
        return cls(*(WideCount.of(getattr(progress, name)) for name in cls._fields))


class Groups(NamedTuple):
    """Parameters and moments of groups that train apart; arrays have a first dimension over them.

    Attributes:
        params: the parameters.
        opt_state: the optimizer's state.
        model_state: non-trainable state of the model.
    """

    params: Params
    opt_state: PyTree
    model_state: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Train state as one pytree: donated to the step, written to checkpoints.

    Attributes:
        step: steps attempted, bad ones included; each consumed one batch.
        params: the parameters.
        opt_state: the optimizer's state, which counts updates made.
        guard: counts of bad steps and recent good losses.
        counts: counts of samples and tokens.
        model_state: non-trainable state of the model.
        ema: exponential moving average of the trained parameters; empty without `train.ema_decay`.
        groups: what the groups have that train apart (`train.outer_interval`), or None. Then
            `params` and `model_state` are the global ones, `opt_state` is that of the outer
            optimizer, and `guard` and `counts` have a leading dimension over the groups.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: PyTree
    guard: GuardState
    counts: Counts
    model_state: Params = dataclasses.field(default_factory=dict)
    ema: Params = dataclasses.field(default_factory=dict)
    groups: Groups | None = None

    @property
    def variables(self) -> Params:
        """Parameters and non-trainable state, as functions of the model take them."""
        return self._on_mesh_of_run(join(self.params, self.model_state))

    @property
    def averaged_variables(self) -> Params:
        """The average of the trained parameters, frozen parameters, and non-trainable state."""
        return self._on_mesh_of_run(join(join(self.params, self.ema), self.model_state))

    def _on_mesh_of_run(self, variables: Params) -> Params:
        return variables if self.groups is None else relabeled(variables, on_mesh_of_run)


def init_train_state(
    model: Model,
    params: Params,
    optimizer: optax.GradientTransformation,
    model_state: Params | None = None,
    ema: Params | None = None,
) -> TrainState:
    """Return the state before the first step for given parameters.

    Args:
        model: the model.
        params: the parameters.
        optimizer: the optimizer.
        model_state: non-trainable state; by default the initial one.
        ema: average of the trained parameters (`start_average`); None without an average.
    """
    step, counts = jnp.zeros((), jnp.int32), Counts.of(Progress())
    initial = model.initial_state() if model_state is None else model_state
    guard = GuardState.fresh(scales_loss=model.scales_loss)
    return TrainState(step, params, optimizer.init(params), guard, counts, initial, ema or {})


def start_average(params: Params, dtype: str) -> Params:
    """Return the average of the parameters before any update: a copy in new arrays."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)


def state_shardings(
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
) -> TrainState:
    """Return the NamedSharding of every array of a state without an average.

    Moments are sharded like the parameters.

    Args:
        model: the model.
        optimizer: the optimizer.
        mesh: the mesh.

    Raises:
        UserError: the mesh splits a parameter, or the blocks of its moments, into unequal parts.
    """
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    params = param_shardings(model.abstract, model.axes, mesh)
    # Traced, because only the trace knows the memory space in which each moment is kept.
    traced = jax.jit(optimizer.init).trace(model.abstract)
    shapes = traced.out_info

    def like_params(node: Any) -> Any:  # noqa: ANN401  # moments of all parameters or of some
        if not isinstance(node, dict):
            return replicated
        return jax.tree.map(_like_parameter, node, part_like(node, params), part_like(node, whole))

    whole: Any = model.abstract
    opt_state = jax.tree.map(like_params, shapes, is_leaf=lambda node: isinstance(node, dict))
    jax.tree_util.tree_map_with_path(_check_blocks, shapes, opt_state)
    spaces = [leaf.memory_space for leaf in traced.jaxpr.out_avals]
    in_memory = jax.tree.unflatten(jax.tree.structure(shapes), spaces)
    opt_state = jax.tree.map(_in_memory, opt_state, in_memory)
    fresh = functools.partial(GuardState.fresh, scales_loss=model.scales_loss)
    counters = jax.eval_shape(lambda: (fresh(), Counts.of(Progress())))
    guard, counts = jax.tree.map(lambda _: replicated, counters)
    model_state = param_shardings(*model.state, mesh)
    return TrainState(replicated, params, opt_state, guard, counts, model_state)


def _like_parameter(
    leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, parameter: jax.ShapeDtypeStruct
) -> NamedSharding:
    """Return the sharding of an array of the optimizer state, given that of its parameter.

    Dimensions with the size of the parameter's are split like it. These are all dimensions of a
    moment, the first ones of a count per expert or a mean per row, and one side of the matrices of
    SOAP. Scales of 8-bit moments are split like the moments. Others, which optax may have, are
    replicated.
    """
    n = len(leaf.shape)
    # A spec may be shorter than the shape; a moment may have fewer dimensions than its parameter.
    axes = [*sharding.spec, *[None] * n][:n]
    if leaf.shape != parameter.shape[:n] and leaf.dtype != jnp.uint8:  # not scales
        is_matrix = n == len(parameter.shape)
        sizes = zip(axes, leaf.shape, parameter.shape, strict=False)
        axes = [axis if is_matrix and size == whole else None for axis, size, whole in sizes]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _in_memory(sharding: NamedSharding, space: object) -> NamedSharding:
    """Return the sharding with the memory kind of a memory space."""
    if space == jax.memory.Space.Device:
        return sharding
    on_host = sharding.with_memory_kind("pinned_host")
    if on_host.memory_kind is None:  # devices that are only compiled for, such as absent GPUs
        kind = sharding.mesh.devices.flat[0].device_kind
        raise UserError(
            f'train.offload = ["optimizer"]: JAX does not know the host memory of {kind}. Remove '
            '"optimizer" from train.offload'
        )
    return on_host


def _check_blocks(
    path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> None:
    """Check that every block of 8-bit moments is on one device: scales divide like the values."""
    for dimension, (size, axes) in enumerate(zip(leaf.shape, sharding.spec, strict=False)):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        if size % parts:
            keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            split_by = " x ".join(name for name in names if sharding.mesh.shape[name] > 1)
            raise UserError(
                f'train.opt_state_dtype = "8bit": the moments of {".".join(keys)} have {size} '
                f"blocks along dimension {dimension}, not divisible by {split_by} = {parts}. "
                f'Change distributed.{names[0]}, or set train.opt_state_dtype = "bfloat16"'
            )


def part_like(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `whole` at the paths of `part`: some parameters have no moment."""
    return {
        name: part_like(node, whole[name]) if isinstance(node, dict) else whole[name]
        for name, node in part.items()
    }


def with_counts(state: TrainState, progress: Progress) -> TrainState:
    """Return the state with the counts of `progress`, on the devices of the state."""
    counts = placed_like(Counts.of(progress), state.counts)
    return dataclasses.replace(state, counts=counts)


def placed_like(counters: T, like: T) -> T:
    """Return counters of a run on the devices of `like`.

    If these are counters of several groups, the first group has all counts, because their sum is
    read, and each has all other values.
    """

    def on_devices(value: Array, like: Array) -> Array:
        whole = np.broadcast_to(np.asarray(value), like.shape).copy()
        if like.ndim > value.ndim and np.issubdtype(whole.dtype, np.integer):
            whole[1:] = 0
        # `jax.device_put` compares the values of all processes first, and NaNs differ.
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])

    return jax.tree.map(on_devices, counters, like)
