"""DiLoCo: groups of devices train apart and exchange their changes from time to time.

A network between groups that is too slow for the gradients of every update carries one exchange in
`train.outer_interval` updates instead (Douillard et al., 2023, arXiv:2311.08105). With global
weights W and the weights w_g of group g, after H updates of its own:

    gradient of the outer optimizer   D = mean over g of (W - w_g)
    outer optimizer                   W <- W + update(D)
    every group                       w_g <- W; it keeps its moments

Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512) exchanges P fragments of the model in
turn, so that the network always has little to carry, and lets groups train on while it does. For
H = 4, P = 2 and an overlap of 1, after the updates

    update   1    2    3    4    5    6    7    8
    sent          a         b         a         b      D is computed, and W is updated
    used               a         b         a           w_g <- k w_g + (1 - k) W

where k is `outer_optimizer.mixing`. A fragment is every P-th layer of each kind, from one layer on;
the first also has the parameters before the layers, and the last those after them.

A bad update of a group is skipped by the group alone. A group whose weights are not finite does not
count in the mean, and takes over W.
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
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import EMBEDDINGS, Model, Params
from jaxforge.optim.ema import build_average
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import Path, join, split
from jaxforge.parallel.exchange import mean_over_groups
from jaxforge.parallel.groups import GROUPS, map_over_groups
from jaxforge.parallel.stages import is_stack
from jaxforge.state.train_state import Groups, TrainState
from jaxforge.step.train_step import Batch, Controls, Metrics, TrainStep

Branch = Callable[[TrainState], TrainState]


class Fragments:
    """The fragments of a model, which are exchanged one after another.

    Args:
        count: number of fragments.
        interval: updates from one exchange of a fragment to the next.
    """

    def __init__(self, count: int, interval: int) -> None:
        self.count, self._apart = count, interval // count

    def due(self, updates: Int[Array, ""]) -> Int[Array, ""]:
        """Return the fragment that is due after a number of updates; `count` if none is."""
        turn, since = jnp.divmod(updates, self._apart)
        is_due = (since == 0) & (turn > 0)
        return jnp.where(is_due, (turn - 1) % self.count, self.count)

    def rows(self, fragment: int, path: Path, n: int) -> slice | None:
        """Return the rows [n, ...] of a parameter that are in a fragment; None if there are none.

        A share of a pipeline stage has the same rows as the whole, because `fragments` divides the
        layers of a stage.
        """
        if is_stack(path[0]):
            return slice(fragment, n, self.count) if fragment < n else None
        is_first = path[0] in EMBEDDINGS
        return slice(0, n) if fragment == (0 if is_first else self.count - 1) else None

    def replace(self, fragment: int, new: Params, old: Params, dimension: int = 0) -> Params:
        """Return `old` with the rows of a fragment from `new`.

        Args:
            fragment: number of the fragment.
            new: a tree of parameters, or of some of them.
            old: a tree like `new`.
            dimension: dimension of the rows.
        """

        def replace_leaf(path: Path, new: Array, old: Array) -> Array:
            rows = self.rows(fragment, path, old.shape[dimension])
            if rows is None:
                return old
            if rows.step in (None, 1) and self.count == 1:
                return new
            at = (slice(None),) * dimension + (rows,)
            return old.at[at].set(new[at])

        flat_new, flat_old = flatten_dict(new), flatten_dict(old)
        return unflatten_dict(
            {path: replace_leaf(path, flat_new[path], leaf) for path, leaf in flat_old.items()}
        )


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
    train_apart = map_over_groups(functools.partial(_step_of_group, step), mesh)
    average_changes = _build_mean_change(config, fragments, frozen, shardings, mesh)
    average_of_weights = build_average(config.train, frozen)
    share = section.share_kept

    def exchange(fragment: int, state: TrainState) -> TrainState:
        """Update the rows of a fragment of the global weights by the mean change of the groups."""
        assert state.groups is not None
        changes, model_state, count = average_changes(fragment, state)
        # The state counts exchanges of all fragments, and the optimizer those of one fragment.
        view = _map_counts(lambda n: n // fragments.count, state.opt_state)
        updates, opt_state = outer.update(changes, view, state.params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), state.params, updates)
        params = fragments.replace(fragment, params, state.params)
        opt_state = _replace_moments(fragments, fragment, opt_state, state.opt_state)
        new = dataclasses.replace(
            state, params=params, opt_state=opt_state, model_state=model_state
        )
        # Without any finite group, there is nothing to learn from.
        new = jax.tree.map(lambda n, o: jnp.where(count > 0, n, o), new, state)
        return new if section.overlap else use(fragment, new)

    def use(fragment: int, state: TrainState) -> TrainState:
        """Let the groups take over the rows of a fragment of the global weights."""
        groups = state.groups
        assert groups is not None

        def mix(own: Array, whole: Array) -> Array:
            mixed = (
                share * own + (1 - share) * whole if share else jnp.broadcast_to(whole, own.shape)
            )
            return jnp.where(jnp.isfinite(own), mixed, whole).astype(own.dtype)

        def take_over(own: Array, whole: Array) -> Array:
            return jnp.broadcast_to(whole, own.shape)

        own, whole = split(groups.params, frozen)[1], split(state.params, frozen)[1]
        mixed = fragments.replace(fragment, jax.tree.map(mix, own, whole), own, dimension=1)
        model_state = groups.model_state
        if fragment == fragments.count - 1:
            model_state = jax.tree.map(
                lambda own, whole: jnp.broadcast_to(whole, own.shape),
                model_state,
                state.model_state,
            )
        params = join(groups.params, mixed)
        return dataclasses.replace(
            state, groups=groups._replace(params=params, model_state=model_state)
        )

    def diloco_step(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        values = state.guard, state.counts, state.groups
        (guard, counts, groups), metrics = train_apart(values, batch, (state.step, controls))
        state = dataclasses.replace(
            state, step=state.step + 1, guard=guard, counts=counts, groups=groups
        )
        # A conditional instead of a selection: the exchange runs only when it is due.
        state = _when_due(fragments, state.step, exchange, state)
        if section.overlap:
            state = _when_due(fragments, state.step - section.overlap, use, state)
        ema = average_of_weights(state.ema, state.params, state.step)
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


def _when_due(
    fragments: Fragments,
    updates: Int[Array, ""],
    act: Callable[[int, TrainState], TrainState],
    state: TrainState,
) -> TrainState:
    """Act on the fragment that is due after a number of updates, if there is one."""
    branches: list[Branch] = [functools.partial(act, i) for i in range(fragments.count)]
    return jax.lax.switch(fragments.due(updates), [*branches, lambda state: state], state)


def _build_mean_change(
    config: JobConfig,
    fragments: Fragments,
    frozen: frozenset[Path],
    shardings: TrainState,
    mesh: Mesh | AbstractMesh,
) -> Callable[[int, TrainState], tuple[Params, Params, Float[Array, ""]]]:
    """Return a function of (fragment, state).

    It returns the mean change W - w_g of the weights over the groups, 0 outside of the fragment;
    the mean of the non-trainable state; and the number of groups whose weights are finite.
    """
    dtype = config.train.outer_dtype
    within = tuple(name for name, size in mesh.shape.items() if name != GROUPS and size > 1)

    def specs(tree: PyTree, *leading: str) -> PyTree:
        return jax.tree.map(lambda leaf: P(*leading, *leaf.spec), tree)

    params = shardings.params
    of_params, of_state = split(params, frozen)[1], shardings.model_state

    def mean_change(
        fragment: int, whole: Params, own: Params, model_state: Params
    ) -> tuple[Params, Params, Float[Array, ""]]:
        flat, flat_own = flatten_dict(whole), flatten_dict(own)
        rows = {path: fragments.rows(fragment, path, leaf.shape[0]) for path, leaf in flat.items()}
        sent = [path for path in flat if rows[path] is not None]
        changes = [
            flat[path][rows[path]].astype(jnp.float32) - flat_own[path][0][rows[path]]
            for path in sent
        ]
        is_valid = _is_finite(changes, within)
        means, count = mean_over_groups(changes, is_valid, dtype)
        result = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in flat.items()}
        for path, mean in zip(sent, means, strict=True):
            result[path] = result[path].at[rows[path]].set(mean)
        # A few numbers per layer, and used by the last fragment only.
        leaves, tree = jax.tree.flatten(model_state)
        of_group = [leaf[0].astype(jnp.float32) for leaf in leaves]
        state_means, _ = mean_over_groups(of_group, is_valid, "float32")
        state = [mean.astype(leaf.dtype) for mean, leaf in zip(state_means, leaves, strict=True)]
        return unflatten_dict(result), jax.tree.unflatten(tree, state), count

    def of_state_now(fragment: int, state: TrainState) -> tuple[Params, Params, Float[Array, ""]]:
        groups = state.groups
        assert groups is not None
        is_last = fragment == fragments.count - 1
        run = jax.shard_map(  # every device sends its shards to its peers in the other groups
            functools.partial(mean_change, fragment),
            in_specs=(specs(of_params), specs(of_params, GROUPS), specs(of_state, GROUPS)),
            out_specs=(specs(of_params), specs(of_state), P()),
            check_vma=False,  # means over groups are equal in all of them
        )
        whole, own = (split(tree, frozen)[1] for tree in (state.params, groups.params))
        changes, model_state, count = run(whole, own, groups.model_state)
        # The outer optimizer takes all parameters; frozen ones do not change.
        idle = jax.tree.map(jnp.zeros_like, split(state.params, frozen)[0])
        return join(changes, idle), model_state if is_last else state.model_state, count

    return of_state_now


def _is_finite(values: list[Array], within: tuple[str, ...]) -> Bool[Array, ""]:
    """Return whether all values of a group are finite, on all of its devices."""
    bad = sum(
        (jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in values), jnp.zeros((), jnp.int32)
    )
    return (jax.lax.psum(bad, within) if within else bad) == 0


def _map_counts(function: Callable[[Array], Array], state: PyTree) -> PyTree:
    """Apply a function to the counts of an optimizer's state, its integers."""
    return jax.tree.map(
        lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.integer) and not x.ndim else x, state
    )


def _replace_moments(fragments: Fragments, fragment: int, new: PyTree, old: PyTree) -> PyTree:
    """Return the state of the outer optimizer after an exchange of a fragment."""

    def replace(new: Any, old: Any) -> Any:  # noqa: ANN401  # moments of parameters, or a number
        if isinstance(old, dict):
            return fragments.replace(fragment, new, old)
        return old + 1 if jnp.issubdtype(old.dtype, jnp.integer) else new

    return jax.tree.map(replace, new, old, is_leaf=lambda node: isinstance(node, dict))
