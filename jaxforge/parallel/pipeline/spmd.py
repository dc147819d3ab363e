"""One program for all stages that runs a schedule: a `lax.scan` over the ticks of each phase.

Runs inside `shard_map`, manual over `pp`. Every device holds the layers of its stage and 1/N of
embedding and head, and does the same operations in every tick, each on a microbatch of its own:

    embed      the embedding of the microbatch that the first virtual stage is to forward: every
               device looks up the tokens of its share of the vocabulary, the sum goes to all
    forward    one stage's layers; the input, or what autodiff saves, is kept in a ring of slots
    loss       final norm, head and loss of the microbatch that the last virtual stage takes back:
               its output goes to all devices, and each does its share of the vocabulary
    backward   the layers again from the stored input, and their vector-Jacobian products in
               reverse; each layer's gradient is added where it stays
    embedding  its gradient, from what the first virtual stage gives back

So no stage is dearer than another, nothing is held for the head, and nothing depends on how many
microbatches there are: `1f1b` reuses 2 N - 1 slots. Activations travel to the next stage, and
gradients to the one before, by one `ppermute` each; what follows is in the next tick.

The auxiliary outputs of a layer (`jaxforge.aux_outputs`) are added up on the layer's stage, in its
forward pass. A loss term among them has its cotangent, 1, in the layer's own backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from jaxforge.aux_outputs import AuxOutputs, LossTerms, combine, merge
from jaxforge.config.model import LAYERS
from jaxforge.parallel import collectives
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.pipeline.schedule import Phase, Schedule
from jaxforge.parallel.pipeline.tick_arrays import Actions, Column, TickArrays
from jaxforge.parallel.sharding import constrain
from jaxforge.parallel.stages import only_rows, split_layers

Microbatch = Any
"""A tree of arrays [b, ...]."""
Params = dict[str, Any]
LayerOutputs = tuple[Array, LossTerms]
"""The differentiable outputs of a layer, or their cotangents: x and the loss terms."""
LayerFunction = Callable[[Params, Array, PyTree], tuple[LayerOutputs, AuxOutputs]]
Pull = Callable[[LayerOutputs], tuple[Params, Array, PyTree]]
Result = TypeVar("Result")


class StageFunctions(NamedTuple):
    """Stage functions of a pipelined model; each is differentiable in its parameters and in x.

    Attributes:
        embed: (params, microbatch) -> x [b, s, d], what the first layer takes.
        context: (x, microbatch) -> the properties of its tokens for all layers.
        layer: (its kind, parameters of one layer, x, (context, the layer's non-trainable state)) ->
            (x, loss terms), other auxiliary outputs. A `jax.checkpoint` in it decides what is saved
            between its forward and its backward.
        loss: (params, x, microbatch) -> what the loss tells.
        kinds: the kind of each row of a stage's layers, in arrays [stages, rows].
        is_layer: whether a row holds a layer [stages, rows].
        saves_residuals: whether what autodiff saves is held from the forward of a stage on; else
            the input of the stage is, and its layers run again before their backward.
    """

    embed: Callable[[Params, Microbatch], Array]
    context: Callable[[Array, Microbatch], PyTree]
    layer: Callable[[PyTree, Params, Array, PyTree], tuple[LayerOutputs, AuxOutputs]]
    loss: Callable[[Params, Array, Microbatch], AuxOutputs]
    kinds: PyTree
    is_layer: Bool[np.ndarray, "stages rows"]
    saves_residuals: bool


# Ticks of 4 stages with 6 microbatches under 1F1B, as `jaxforge pipeline` prints them:
#
# tick        0  1  2 |  3  4  5  6  7  8 |  9 10 11
# stage 0 F   0  1  2 |  3  4  5  .  .  . |  .  .  .     F: forward of a microbatch
#         B   .  .  . |  .  .  .  0  1  2 |  3  4  5     B: backward
# stage 3 F   .  .  . |  0  1  2  3  4  5 |  .  .  .
#         B   .  .  . |  0  1  2  3  4  5 |  .  .  .
#
# `arriving` moves down one stage per tick, `returning` up. An item stays in `ring` from the forward
# to the backward of its microbatch on that stage: 6 ticks on stage 0, none on the last stage. The
# three phases (`|`) are three scans, so that the first has no backward code and the last no forward
# code.
#
# Invariant: all devices execute the same operations in every tick, idle stages included. Idle work
# is computed on zeros or stale values, and is masked before it reaches a sum.
class Carry(NamedTuple):
    """Carry of the scan over ticks.

    Attributes:
        arriving: from the stage before: input of the next forward.
        returning: from the stage after: gradient for the next backward.
        ring: [slots, ...] what backwards wait for.
        layers: gradients of the stage's layers, float32.
        outer: gradients of all other parameters, float32.
        loss_aux: auxiliary outputs of the loss so far.
        layer_aux: auxiliary outputs of the stage's layers, by row.
    """

    arriving: Array
    returning: Array
    ring: PyTree
    layers: Params
    outer: Params
    loss_aux: AuxOutputs
    layer_aux: AuxOutputs


def split_pull(pull: Pull, given: PyTree) -> tuple[list[Array], Callable[[list[Array]], Pull]]:
    """Split the result of `jax.vjp` into the arrays to save and a function that rebuilds it.

    That result is a pytree of what autodiff saves. Its leaves that are leaves of `given`, such as
    parameters, are available again in the backward pass, so they are not saved.

    Returns:
        The arrays to save. The function from saved arrays (of any x) to the result of `jax.vjp`.
    """
    leaves, form = jax.tree.flatten(pull)
    given_ids = {id(leaf) for leaf in jax.tree.leaves(given)}
    is_saved = [id(leaf) not in given_ids for leaf in leaves]

    def pull_of(saved: list[Array]) -> Pull:
        of_x = iter(saved)
        both = zip(leaves, is_saved, strict=True)
        return jax.tree.unflatten(form, [next(of_x) if saves else leaf for leaf, saves in both])

    return [leaf for leaf, saves in zip(leaves, is_saved, strict=True) if saves], pull_of


class Stage:
    """The program of one stage, which is that of all.

    To run a schedule, scan `tick` over the rows of each of its phases, from `initial_carry` on.

    Args:
        schedule: for as many stages as `pp` has, and as many microbatches as the batch.
        functions: the model.
        params: this stage's share; `layers` is stacked, chunk after chunk.
        state: the layers' non-trainable state, stacked alike.
        batch: a tree of arrays [m, ...].
    """

    def __init__(
        self,
        schedule: Schedule,
        functions: StageFunctions,
        params: Params,
        state: PyTree,
        batch: Microbatch,
    ) -> None:
        self.schedule, self.functions, self.state, self.batch = schedule, functions, state, batch
        self.layers, self.outer = split_layers(params)
        self.index = jax.lax.axis_index(STAGES)
        of_rows = jax.tree.map(jnp.asarray, (functions.kinds, functions.is_layer))
        self.kinds, self.is_layer = jax.tree.map(lambda of_row: of_row[self.index], of_rows)
        # Under `check_vma`, a scan's carry must vary over the same mesh axes at its start and end.
        self.varying = collectives.varying_axes(batch) | {STAGES}
        self._forward = self._saving if functions.saves_residuals else self._discarding

    def initial_carry(self, axes: Params) -> Carry:
        """Return zeros that vary over the same mesh axes as what is added to them.

        Args:
            axes: logical axes of the parameters; gradients are laid out alike.
        """
        microbatch = self._microbatch(0)
        # `eval_shape` yields the shapes of outputs, of ring items and of auxiliary outputs without
        # tracing an operation into the program.
        idle = _laid_out(self._zeros(jax.eval_shape(self.functions.embed, self.outer, microbatch)))
        _, item, by_layers = jax.eval_shape(functools.partial(self._forward, 0, idle, microbatch))
        whole = self._zeros(idle, stages=False)
        loss_aux = jax.eval_shape(lambda: self.functions.loss(self.outer, whole, microbatch))
        loss_aux = jax.tree.map(lambda leaf: self._zeros(leaf, stages=False), loss_aux)
        layer_aux = jax.tree.map(
            lambda leaf: self._zeros(leaf, (len(self.is_layer), *leaf.shape[1:])), by_layers
        )
        rings = jax.tree.map(
            lambda leaf: self._zeros(leaf, (self.schedule.slots, *leaf.shape)), item
        )
        outer = jax.tree.map(
            lambda p, axes: constrain(jnp.zeros_like(p, jnp.float32), *axes),
            {**self.outer, LAYERS: self.layers}, axes,
        )  # fmt: skip
        layers, outer = split_layers(outer)
        return Carry(idle, idle, rings, layers, outer, loss_aux, layer_aux)

    def tick(
        self, phase: Phase, rows: TickArrays, carry: Carry, row: TickArrays
    ) -> tuple[Carry, None]:
        """Run the actions of all stages in one tick.

        Args:
            phase: which directions its ticks have.
            rows: all ticks of the phase.
            carry: what the ticks before have left.
            row: this tick.
        """
        if phase.forward:
            actions = self._mine(row.forward)
            x = self._input(carry, rows, row, actions)
            y, item, aux = self._forward(actions.chunk, x, self._microbatch(actions.microbatch))
            aux = self._plus_rows(carry.layer_aux, aux, actions.chunk, row.is_forward[self.index])
            # Idle stages write too: the schedule gives them a free slot (`Schedule.spare`), so that
            # no branch is needed here.
            ring = jax.tree.map(
                lambda ring, leaf: jax.lax.dynamic_update_index_in_dim(ring, leaf, actions.slot, 0),
                carry.ring, item,
            )  # fmt: skip
            carry = carry._replace(arriving=self._sent(y, +1), ring=ring, layer_aux=aux)
        if phase.backward:
            actions, is_busy = self._mine(row.backward), row.is_backward[self.index]
            item = jax.tree.map(
                lambda ring: jax.lax.dynamic_index_in_dim(ring, actions.slot, 0, keepdims=False),
                carry.ring,
            )
            microbatch = self._microbatch(actions.microbatch)
            # The ring holds inputs only: the forward of the chunk runs again, now saving what its
            # backward needs. Otherwise the ring holds the residuals of the first forward.
            if not self.functions.saves_residuals:
                _, item, _ = self._saving(actions.chunk, item, microbatch)
            y, saved = item
            carry, d_y = self._loss_backward(carry, rows, row, y, self._is_last(actions))
            d_y = jnp.where(is_busy, d_y, 0)  # nothing comes of an idle stage
            d_x, layers = self._backward(
                actions.chunk, d_y, is_busy, saved, microbatch, carry.layers
            )
            outer = self._embed_backward(carry.outer, rows, row, d_x, actions)
            carry = carry._replace(returning=self._sent(d_x, -1), layers=layers, outer=outer)
        return carry, None

    def _input(self, carry: Carry, rows: TickArrays, row: TickArrays, actions: Actions) -> Array:
        """Return the input of a stage: the embedding, or the output of the stage before."""

        def embed() -> Array:
            return self.functions.embed(self.outer, self._microbatch(row.embeds))

        # Stage 0 takes the embedding; the others take what the last tick sent. Every device looks
        # up its share of the vocabulary, because embedding and head are sharded over the stages.
        nothing = self._zeros(carry.arriving, stages=False)
        entering = self._when(rows.embeds, row.embeds, embed, nothing, cheap=True)
        return jnp.where(self._is_first(actions), entering, carry.arriving)

    def _loss_backward(
        self, carry: Carry, rows: TickArrays, row: TickArrays, y: Array, is_last: Array
    ) -> tuple[Carry, Array]:
        """Add the loss and its gradients; return also the gradient of the stage's output."""

        def head_and_loss() -> tuple[Params, AuxOutputs, Array]:
            microbatch = self._microbatch(row.losses)
            # The last stage broadcasts its output, so that each device can compute its share of the
            # vocabulary of the logits.
            x = self._to_all(jnp.where(is_last, y, 0))

            def loss(outer: Params, x: Array) -> tuple[Array, AuxOutputs]:
                aux = self.functions.loss(outer, x, microbatch)
                return aux.loss, aux

            value, of_loss, aux = jax.vjp(loss, self.outer, x, has_aux=True)
            d_own, d_x = of_loss(jnp.ones_like(value))
            return _plus(carry.outer, d_own), merge(carry.loss_aux, aux), d_x

        unchanged = (carry.outer, carry.loss_aux, self._zeros(y, stages=False))
        d_outer, aux, d_last = self._when(rows.losses, row.losses, head_and_loss, unchanged)
        carry = carry._replace(outer=d_outer, loss_aux=aux)
        return carry, jnp.where(is_last, d_last, carry.returning)

    def _embed_backward(
        self, d_outer: Params, rows: TickArrays, row: TickArrays, d_x: Array, actions: Actions
    ) -> Params:
        """Add the gradient of the embedding, from that of the first stage's input."""

        def backward() -> Params:
            microbatch = self._microbatch(row.embed_backwards)
            d_entering = self._to_all(jnp.where(self._is_first(actions), d_x, 0))
            _, pull = jax.vjp(lambda outer: self.functions.embed(outer, microbatch), self.outer)
            return _plus(d_outer, pull(d_entering)[0])

        return self._when(rows.embed_backwards, row.embed_backwards, backward, d_outer, cheap=True)

    def _discarding(
        self, chunk: Array | int, x: Array, microbatch: Microbatch
    ) -> tuple[Array, PyTree, AuxOutputs]:
        """Return the output of a chunk, x for the ring, and the layers' auxiliary outputs."""
        context = self.functions.context(x, microbatch)

        def run_layer(x: Array, row: Array) -> tuple[Array, AuxOutputs]:
            (y, terms), aux = self._run(row)(self._layer(row), x, self._given(context, row))
            return y, aux._replace(loss_terms=terms)

        y, aux = jax.lax.scan(run_layer, x, self._rows_of(chunk))
        return y, x, aux

    def _saving(
        self, chunk: Array | int, x: Array, microbatch: Microbatch
    ) -> tuple[Array, tuple[Array, list[Array]], AuxOutputs]:
        """Return the output of a chunk, the output and what autodiff saves, and the layers' aux."""
        context = self.functions.context(x, microbatch)

        def run_layer(x: Array, row: Array) -> tuple[Array, tuple[list[Array], AuxOutputs]]:
            given, run, params = self._given(context, row), self._run(row), self._layer(row)
            (y, terms), pull, aux = jax.vjp(run, params, x, given, has_aux=True)
            saved, _ = split_pull(pull, (params, given))
            return y, (saved, aux._replace(loss_terms=terms))

        y, (saved, aux) = jax.lax.scan(run_layer, x, self._rows_of(chunk))
        return y, (y, saved), aux

    def _backward(
        self,
        chunk: Array,
        d_y: Array,
        is_busy: Array,
        saved: list[Array],
        microbatch: Microbatch,
        grads: Params,
    ) -> tuple[Array, Params]:
        """Return the gradient of a chunk's input, and `grads` with those of its layers added."""
        context = self.functions.context(d_y, microbatch)

        def run_layer(carry: tuple[Array, Params], of_layer: tuple[Array, list[Array]]) -> Any:  # noqa: ANN401
            (d_y, grads), (row, saved) = carry, of_layer
            # `jax.vjp` returns a pytree whose structure is static and whose leaves are residuals.
            # Tracing it here on a dummy input gives the structure; the leaves come from the ring.
            # Only the form of this is used: what it has computed is replaced, and so dropped.
            given, run, params = self._given(context, row), self._run(row), self._layer(row)
            (_, terms), pull, _ = jax.vjp(run, params, d_y, given, has_aux=True)
            _, pull_of = split_pull(pull, (params, given))
            counts = is_busy & self.is_layer[row]
            # Loss terms of a layer enter the loss with weight 1; rows without a layer, and idle
            # stages, must contribute nothing.
            d_terms = jax.tree.map(lambda term: jnp.where(counts, jnp.ones_like(term), 0), terms)
            d_layer, d_x, _ = pull_of(saved)((d_y, d_terms))
            grads = jax.tree.map(lambda g, d: g.at[row].add(d.astype(g.dtype)), grads, d_layer)
            return (d_x, grads), None

        rows = self._rows_of(chunk)
        return jax.lax.scan(run_layer, (d_y, grads), (rows, saved), reverse=True)[0]

    def _rows_of(self, chunk: Array | int) -> Array:
        """Return the rows of a chunk's layers among those of the stage."""
        n = jax.tree.leaves(self.layers)[0].shape[0] // self.schedule.chunks
        return chunk * n + jnp.arange(n)

    def _plus_rows(
        self, total: AuxOutputs, aux: AuxOutputs, chunk: Array, is_real: Array
    ) -> AuxOutputs:
        """Add a chunk's auxiliary outputs, but for those of idle stages and empty rows."""
        rows = self._rows_of(chunk)
        real = functools.partial(only_rows, is_real & self.is_layer[rows])
        return combine(
            lambda total, aux: total.at[rows].add(real(aux)),
            lambda total, aux: total.at[rows].max(real(aux)),
            total, aux,
        )  # fmt: skip

    def _run(self, row: Array) -> LayerFunction:
        """Return the function of the layer of a row."""
        kind = jax.tree.map(lambda of_rows: of_rows[row], self.kinds)
        return functools.partial(self.functions.layer, kind)

    def _layer(self, row: Array) -> Params:
        return _row_of(self.layers, row)

    def _given(self, context: PyTree, row: Array) -> tuple[PyTree, PyTree]:
        return context, _row_of(self.state, row)

    def _when(
        self, column: Column, now: Array, actions: Callable[[], Result], otherwise: Result,
        *, cheap: bool = False,
    ) -> Result:  # fmt: skip
        """Run actions that only some ticks of a phase need, by the same branch on all devices.

        Args:
            column: the microbatch of every tick of the phase; -1: none.
            now: that of this tick.
            actions: what is done with it.
            otherwise: what stands in its place.
            cheap: better done in vain than by a branch, with nothing coming of it.
        """
        # `column` is known at trace time: a phase in which no tick, or every tick, needs the action
        # has no branch at all. The predicate of the branch is the same on all devices, so
        # collectives inside it cannot deadlock.
        if (column < 0).all():
            return otherwise
        if (column >= 0).all() or (cheap and self.schedule.chunks == 1):
            return actions()
        return jax.lax.cond(now >= 0, actions, lambda: otherwise)

    def _mine(self, actions: Actions) -> Actions:
        return Actions(*(column[self.index] for column in actions))

    def _microbatch(self, index: Array | int) -> Microbatch:
        return _row_of(self.batch, jnp.maximum(index, 0))

    def _is_first(self, actions: Actions) -> Array:
        return (self.index == 0) & (actions.chunk == 0)

    def _is_last(self, actions: Actions) -> Array:
        last = self.schedule.chunks - 1
        return (self.index == self.schedule.stages - 1) & (actions.chunk == last)

    def _sent(self, x: Array, by: int) -> Array:
        n = self.schedule.stages
        return _laid_out(jax.lax.ppermute(x, STAGES, [(i, (i + by) % n) for i in range(n)]))

    def _to_all(self, x: Array) -> Array:
        """Broadcast a value from the stage that has it; the other stages hold zeros."""
        return _laid_out(collectives.psum(x, LAYERS))

    def _zeros(
        self,
        like: Array | jax.ShapeDtypeStruct,
        shape: tuple[int, ...] | None = None,
        *,
        stages: bool = True,
    ) -> Array:
        axes = self.varying if stages else self.varying - {STAGES}
        zeros = jnp.zeros(like.shape if shape is None else shape, like.dtype)
        return collectives.varying(zeros, axes)


def _row_of(stacked: PyTree, row: Array) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, 0, keepdims=False), stacked)


def _plus(total: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _laid_out(x_BSD: Array) -> Array:
    return constrain(x_BSD, "batch", "seq", None)
