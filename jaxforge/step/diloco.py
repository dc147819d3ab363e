"""DiLoCo: groups of devices train apart and exchange their changes from time to time.

A network between groups that is too slow for the gradients of every update carries one exchange in
`train.outer_interval` updates instead (Douillard et al., 2023, arXiv:2311.08105). With global
weights W and the weights w_g of group g, after H updates of its own:

    gradient of the outer optimizer   D = mean over g of (W - w_g)
    outer optimizer                   W <- W + update(D)
    every group                       w_g <- W; it keeps its moments

Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512) exchanges P fragments of the model
(`step.fragments`) one after another, and lets groups train on while the network carries them. For
H = 4, P = 2 and an overlap of 1, with k = `outer_optimizer.mixing`:

    update   1    2    3    4    5    6    7    8    9
    sent               a         b         a         b     D after the previous update; W <- ...
    used               a         b         a         b     after this update: w_g <- k w_g + (1-k) W

Without overlap, an exchange follows its update. With overlap, a fragment is sent during the next
update, which does not depend on it, so that XLA can run both at the same time. The update is then
in the program once for each fragment, and once without any.

After the last update of a run, W is the mean of the groups' weights, wherever no exchange precedes
it: the updates since the last exchange would be lost otherwise.

A bad update of a group is skipped by the group alone. A group whose weights are not finite does not
count in a mean, and takes over W.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.ema import build_average
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import Path, join, split
from jaxforge.parallel.exchange import mean_over_groups
from jaxforge.parallel.groups import GROUPS, map_over_groups
from jaxforge.state.train_state import Groups, TrainState
from jaxforge.step.fragments import WHOLE, Fragments
from jaxforge.step.guard import select
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep

Count = Float[Array, ""]
"""The number of groups whose weights are finite."""


def make_diloco_step(
    config: JobConfig,
    model: Model,
    outer: optax.GradientTransformationExtraArgs,
    step: TrainStep,
    shardings: TrainState,
    mesh: Mesh | AbstractMesh,
) -> TrainStep:
    """Return the step of groups that train apart, to be traced.

    Its metrics have a leading dimension over the groups (`groups.read_groups`).

    Args:
        config: the config of the run.
        model: the model.
        outer: the outer optimizer (`optim.outer`).
        step: the step of a group.
        shardings: shardings of the state.
        mesh: the mesh with groups (`groups.group_view`).
    """
    section, frozen = config.outer_optimizer, frozen_paths(model.axes, config)
    fragments = Fragments(section.fragments, config.train.outer_interval)
    exchange = Exchange(config, fragments, outer, frozen, shardings, mesh)
    run_groups = map_over_groups(functools.partial(_step_of_group, step), mesh)
    average = build_average(config.train, frozen)

    def train(state: TrainState, batch: Batch, controls: Controls) -> tuple[TrainState, Metrics]:
        values = state.guard, state.counts, state.groups
        (guard, counts, groups), metrics = run_groups(values, batch, (state.step, controls))
        new = dataclasses.replace(
            state, step=state.step + 1, guard=guard, counts=counts, groups=groups
        )
        return new, metrics

    def send_and_train(
        fragment: int, state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        # The groups do not wait for what is sent: it changes nothing that they read.
        return train(exchange.send(fragment, state), batch, controls)

    def send_and_use(fragment: int, state: TrainState) -> TrainState:
        return exchange.use(fragment, exchange.send(fragment, state))

    every = range(fragments.count)

    def diloco_step(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        if section.overlap:
            sending = [functools.partial(send_and_train, i) for i in every]
            due = fragments.due(state.step)
            state, metrics = jax.lax.switch(due, [*sending, train], state, batch, controls)
            using, since = [functools.partial(exchange.use, i) for i in every], section.overlap
        else:
            state, metrics = train(state, batch, controls)
            using, since = [functools.partial(send_and_use, i) for i in every], 0
        due = fragments.due(state.step - since)
        state = jax.lax.switch(due, [*using, lambda state: state], state)
        is_last = state.step == config.train.max_steps
        state = jax.lax.cond(is_last, exchange.finish, lambda state: state, state)
        ema = average(state.ema, state.params, state.step)
        return dataclasses.replace(state, ema=ema), metrics

    return diloco_step


def _step_of_group(
    step: TrainStep, values: tuple[Any, Any, Groups], batch: Batch, shared: tuple[Array, Controls]
) -> tuple[tuple[Any, Any, Groups], Metrics]:
    """Make a step of one group; its state has no average and no outer optimizer."""
    guard, counts, own = values
    number, controls = shared
    state = TrainState(number, own.params, own.opt_state, guard, counts, own.model_state)
    new, metrics = step(state, batch, controls)
    groups = Groups(new.params, new.opt_state, new.model_state)
    return (new.guard, new.counts, groups), metrics


class Exchange:
    """The exchange of changes between groups, and the update of the global weights.

    Args:
        config: the config of the run.
        fragments: the fragments of the model.
        outer: the outer optimizer.
        frozen: paths of the frozen parameters, which all groups have in common.
        shardings: shardings of the state.
        mesh: the mesh with groups.
    """

    def __init__(
        self,
        config: JobConfig,
        fragments: Fragments,
        outer: optax.GradientTransformationExtraArgs,
        frozen: frozenset[Path],
        shardings: TrainState,
        mesh: Mesh | AbstractMesh,
    ) -> None:
        self._share, self._dtype = config.outer_optimizer.share_kept, config.train.outer_dtype
        self._fragments, self._outer, self._frozen = fragments, outer, frozen
        self._shardings = shardings
        sizes = mesh.shape.items()
        self._within = tuple(name for name, size in sizes if name != GROUPS and size > 1)

    def send(self, fragment: int, state: TrainState) -> TrainState:
        """Update a fragment of the global weights by the mean change of the groups.

        Without any finite group, there is nothing to learn from, and the state is unchanged.
        """
        fragments = self._fragments
        changes, model_state, count = self._mean_changes(fragment, state, self._dtype)
        # The state counts exchanges of all fragments, and the optimizer those of one fragment.
        view = _map_counts(lambda n: n // fragments.count, state.opt_state)
        updates, opt_state = self._outer.update(changes, view, state.params)
        return _changed_if(
            count > 0,
            state,
            params=fragments.replace(fragment, _added(state.params, updates), state.params),
            opt_state=_replace_moments(fragments, fragment, opt_state, state.opt_state),
            model_state=model_state if self._has_state(fragment) else state.model_state,
        )

    def use(self, fragment: int, state: TrainState) -> TrainState:
        """Let the groups take over a fragment of the global weights."""
        groups, share = state.groups, self._share
        assert groups is not None

        def mix(own: Array, whole: Array) -> Array:
            whole = jnp.broadcast_to(whole, own.shape)
            mixed = share * own + (1 - share) * whole if share else whole
            return jnp.where(jnp.isfinite(own), mixed, whole).astype(own.dtype)

        def take_over(own: Array, whole: Array) -> Array:
            return jnp.broadcast_to(whole, own.shape)

        own, whole = self._trained(groups.params), self._trained(state.params)
        mixed = self._fragments.replace(fragment, jax.tree.map(mix, own, whole), own, dimension=1)
        model_state = groups.model_state
        if self._has_state(fragment):
            model_state = jax.tree.map(take_over, model_state, state.model_state)
        groups = groups._replace(params=join(groups.params, mixed), model_state=model_state)
        return dataclasses.replace(state, groups=groups)

    def finish(self, state: TrainState) -> TrainState:
        """Let the global weights be the mean of the groups' weights, at the end of a run.

        A fragment that was exchanged after the same update is left as it is: the groups have it.
        """
        changes, model_state, count = self._mean_changes(WHOLE, state, "float32")
        params = _added(state.params, jax.tree.map(jnp.negative, changes))
        return _changed_if(count > 0, state, params=params, model_state=model_state)

    def _mean_changes(
        self, fragment: int, state: TrainState, dtype: str
    ) -> tuple[Params, Params, Count]:
        """Return the mean change W - w_g of a fragment over the groups, 0 elsewhere.

        Also the mean of the non-trainable state, and the number of groups.
        """
        groups, shardings = state.groups, self._shardings
        assert groups is not None

        def specs(tree: PyTree, *leading: str) -> PyTree:
            return jax.tree.map(lambda leaf: P(*leading, *leaf.spec), tree)

        params, model_state = self._trained(shardings.params), shardings.model_state
        run = jax.shard_map(  # every device sends its shards to its peers in the other groups
            functools.partial(self._of_shards, fragment, dtype),
            in_specs=(specs(params), specs(params, GROUPS), specs(model_state, GROUPS)),
            out_specs=(specs(params), specs(model_state), P()),
            check_vma=False,  # means over groups are equal in all of them
        )
        whole, own = self._trained(state.params), self._trained(groups.params)
        changes, means, count = run(whole, own, groups.model_state)
        # The outer optimizer takes all parameters; frozen ones do not change.
        idle = jax.tree.map(jnp.zeros_like, split(state.params, self._frozen)[0])
        return join(changes, idle), means, count

    def _of_shards(
        self, fragment: int, dtype: str, whole: Params, own: Params, model_state: Params
    ) -> tuple[Params, Params, Count]:
        """Compute `_mean_changes` from the shards of a device."""
        rows = self._fragments.of(fragment, whole)
        flat, flat_own = flatten_dict(whole), flatten_dict(own)
        changes = [_float32(flat[path][at]) - _float32(flat_own[path][0][at])
                   for path, at in rows.items()]  # fmt: skip
        is_valid = _is_finite(changes, self._within)
        means, count = mean_over_groups(changes, is_valid, dtype)
        result = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in flat.items()}
        for (path, at), mean in zip(rows.items(), means, strict=True):
            result[path] = result[path].at[at].set(mean)
        # A few numbers per layer.
        leaves, tree = jax.tree.flatten(model_state)
        averages, _ = mean_over_groups([_float32(leaf[0]) for leaf in leaves], is_valid, "float32")
        state = [mean.astype(leaf.dtype) for mean, leaf in zip(averages, leaves, strict=True)]
        return unflatten_dict(result), jax.tree.unflatten(tree, state), count

    def _has_state(self, fragment: int) -> bool:
        """Return whether the non-trainable state is exchanged with a fragment, the last one."""
        return fragment == self._fragments.count - 1

    def _trained(self, params: PyTree) -> PyTree:
        return split(params, self._frozen)[1]


def _changed_if(condition: Bool[Array, ""], state: TrainState, **new: PyTree) -> TrainState:
    """Return the state with new values of some fields if a condition holds."""
    old = {name: getattr(state, name) for name in new}
    return dataclasses.replace(state, **select(condition, new, old))


def _float32(x: Array) -> Float[Array, "..."]:
    return x.astype(jnp.float32)


def _added(params: Params, updates: Params) -> Params:
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def _is_finite(values: list[Array], within: tuple[str, ...]) -> Bool[Array, ""]:
    """Return whether all values of a group are finite, on all of its devices."""
    counts = [jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in values]
    bad = sum(counts, jnp.zeros((), jnp.int32))
    return (jax.lax.psum(bad, within) if within else bad) == 0


def _map_counts(function: Callable[[Array], Array], state: PyTree) -> PyTree:
    """Apply a function to the counts of an optimizer's state, its integers."""
    return jax.tree.map(lambda x: function(x) if _is_count(x) else x, state)


def _is_count(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer) and not x.ndim


def _replace_moments(fragments: Fragments, fragment: int, new: PyTree, old: PyTree) -> PyTree:
    """Return the state of the outer optimizer after an exchange of a fragment."""

    def replace(new: Any, old: Any) -> Any:  # noqa: ANN401  # moments of parameters, or a number
        if isinstance(old, dict):
            return fragments.replace(fragment, new, old)
        return old + 1 if _is_count(old) else new

    return jax.tree.map(replace, new, old, is_leaf=lambda node: isinstance(node, dict))
