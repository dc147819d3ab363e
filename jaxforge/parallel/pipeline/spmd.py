"""Execution of a pipeline schedule by one program on all stages: a `lax.scan` per phase.

The program runs inside `shard_map`, manual over `pp`. Every device holds the layers of its stage
and 1/N of embedding and head. In every tick, all devices execute the same operations, each on its
own microbatch:

    embed      Embedding of the microbatch that enters the first virtual stage. Each device looks up
               the tokens of its share of the vocabulary; the sum is sent to all devices.
    forward    Layers of one chunk. Their input, or the residuals of autodiff, is stored in a slot.
    loss       Final norm, head and loss of the microbatch whose backward the last virtual stage
               runs. Its output is sent to all devices; each computes its share of the vocabulary.
    backward   Forward of the layers from the stored input, unless residuals are stored. Then their
               vector-Jacobian products in reverse; each layer's gradient is added on its stage.
    embedding  Gradient of the embedding, from the gradient of the first virtual stage's input.

So all stages take the same time, and nothing is stored for the head. Memory does not depend on the
number of microbatches under `1f1b`, which reuses 2 N - 1 slots. One `ppermute` sends activations to
the next stage, and another sends gradients to the previous stage, for the next tick.

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
from jaxforge.parallel.layer_switch import LayerResult, arrays_of_layer, change_if, run_layer
from jaxforge.parallel.mesh import STAGES
from jaxforge.parallel.pipeline.schedule import Actions, Column, Phase, Schedule, TickArrays
from jaxforge.parallel.sharding import constrain, split_over_tp
from jaxforge.parallel.stages import Locations, only_rows, split_layers

Microbatch = Any
"""A tree of arrays [b, ...]."""
Params = dict[str, Any]
LayerOutputs = tuple[Array, LossTerms]
"""The differentiable outputs of a layer, or their cotangents: x and the loss terms."""
LayerFunction = Callable[[Params, Array, PyTree], tuple[LayerOutputs, AuxOutputs]]
Pull = Callable[[LayerOutputs], tuple[Params, Array, PyTree]]
Result = TypeVar("Result")


class Branch(NamedTuple):
    """Layers with the same structure.

    Attributes:
        stacks: names of the stacks that hold the parameters of a row.
        layer: (kind, parameters of the row by stack, x, (context, non-trainable state of the row by
            stack)) -> ((x, loss terms), other auxiliary outputs). A row is a layer, or the layers
            of a period. A `jax.checkpoint` inside decides which residuals are saved.
    """

    stacks: tuple[str, ...]
    layer: Callable[[PyTree, Params, Array, PyTree], tuple[LayerOutputs, AuxOutputs]]


class StageFunctions(NamedTuple):
    """Functions of a pipelined model. Each is differentiable in its parameters and in x.

    Attributes:
        embed: (params, microbatch) -> input of the first layer, x [b, s, d].
        context: (x, microbatch) -> properties of the tokens that all layers use.
        branches: structures of layers. With one branch, stages have equal layers. Otherwise there
            is a branch for each stack, in the order of `Locations.stack`.
        loss: (params, x, microbatch) -> auxiliary outputs, which include the loss.
        kinds: kinds of the layers in arrays [stages, rows].
        is_layer: whether a row of a stage holds a layer [stages, rows].
        locations: parameters of each row [stages, rows]; None: there is one branch.
        saves_residuals: whether residuals are stored from the forward of a chunk to its backward.
            Otherwise the input of the chunk is stored, and the layers run again.
    """

    embed: Callable[[Params, Microbatch], Array]
    context: Callable[[Array, Microbatch], PyTree]
    branches: tuple[Branch, ...]
    loss: Callable[[Params, Array, Microbatch], AuxOutputs]
    kinds: PyTree
    is_layer: Bool[np.ndarray, "stages rows"]
    locations: Locations | None
    saves_residuals: bool


# Ticks of 4 stages with 6 microbatches under 1F1B:
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
# is computed on zeros or stale values, and is masked before it reaches a sum. Only if stages have
# different layers does the layer of a row depend on the stage (`layer_switch`).
class Carry(NamedTuple):
    """Carry of the scan over ticks.

    Attributes:
        arriving: input of the next forward [b, s, d], from the previous stage.
        returning: output gradient of the next backward [b, s, d], from the next stage.
        ring: stored inputs, or outputs and residuals, of chunks [slots, ...].
        layers: gradients of the stage's layers, float32.
        outer: gradients of all other parameters, float32.
        loss_aux: sum of the auxiliary outputs of the loss.
        layer_aux: merged auxiliary outputs of the stage's layers, by row.
    """

    arriving: Array
    returning: Array
    ring: PyTree
    layers: Params
    outer: Params
    loss_aux: AuxOutputs
    layer_aux: AuxOutputs


def split_pull(pull: Pull, known: PyTree) -> tuple[list[Array], Callable[[list[Array]], Pull]]:
    """Split the result of `jax.vjp` into the arrays to save and a function that rebuilds it.

    The result of `jax.vjp` is a pytree of residuals. Leaves that are also leaves of `known`, such
    as parameters, are available in the backward pass and need not be saved.

    Returns:
        The arrays to save, and a function that returns the result of `jax.vjp` for saved arrays,
        also for those of another x.
    """
    leaves, structure = jax.tree.flatten(pull)
    known_ids = {id(leaf) for leaf in jax.tree.leaves(known)}
    is_saved = [id(leaf) not in known_ids for leaf in leaves]

    def rebuild(saved: list[Array]) -> Pull:
        arrays = iter(saved)
        pairs = zip(leaves, is_saved, strict=True)
        merged = [next(arrays) if saves else leaf for leaf, saves in pairs]
        return jax.tree.unflatten(structure, merged)

    return [leaf for leaf, saves in zip(leaves, is_saved, strict=True) if saves], rebuild


class Stage:
    """The program of a stage, which is the same on all stages.

    To run a schedule, scan `tick` over the ticks of each phase, starting with `initial_carry`.

    Args:
        schedule: schedule for the stages of `pp` and the microbatches of the batch.
        functions: functions of the model.
        params: parameters of this stage; stacks of layers have rows, chunk after chunk.
        state: non-trainable state of the layers, stacked like their parameters.
        batch: tree of arrays [m, ...] of all microbatches.
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
        self.kinds, self.is_layer = self._of_stage((functions.kinds, functions.is_layer))
        self.locations = self._of_stage(functions.locations)
        # Under `check_vma`, a scan's carry must vary over the same mesh axes at its start and end.
        self.varying = collectives.varying_axes(batch) | {STAGES}
        self._forward = (
            self._forward_with_residuals if functions.saves_residuals else self._forward_only
        )

    def initial_carry(self, axes: Params) -> Carry:
        """Return a carry of zeros, which vary over the mesh axes of the values added to them.

        Args:
            axes: logical axes of the parameters, which are those of the gradients, too.
        """
        microbatch = self._microbatch(0)
        # `eval_shape` yields the shapes of outputs, of ring items and of auxiliary outputs without
        # tracing an operation into the program.
        idle = jax.eval_shape(self.functions.embed, self.outer, microbatch)
        idle = split_over_tp(self._zeros(idle))
        _, item, chunk_aux = jax.eval_shape(functools.partial(self._forward, 0, idle, microbatch))
        # The loss is the same on all stages, so that its outputs do not vary over `pp`.
        x = self._zeros(idle, stages=False)
        loss_aux = jax.eval_shape(lambda: self.functions.loss(self.outer, x, microbatch))
        loss_aux = jax.tree.map(lambda leaf: self._zeros(leaf, stages=False), loss_aux)
        layer_aux = jax.tree.map(
            lambda leaf: self._zeros(leaf, (len(self.is_layer), *leaf.shape[1:])), chunk_aux
        )
        rings = jax.tree.map(
            lambda leaf: self._zeros(leaf, (self.schedule.slots, *leaf.shape)), item
        )
        outer = jax.tree.map(
            lambda p, axes: constrain(jnp.zeros_like(p, jnp.float32), *axes),
            {**self.outer, **self.layers}, axes,
        )  # fmt: skip
        layers, outer = split_layers(outer)
        return Carry(idle, idle, rings, layers, outer, loss_aux, layer_aux)

    def tick(
        self, phase: Phase, rows: TickArrays, carry: Carry, row: TickArrays
    ) -> tuple[Carry, None]:
        """Run the actions of all stages in one tick.

        Args:
            phase: phase of the tick, which has forwards, backwards or both.
            rows: all ticks of the phase.
            carry: carry of the previous ticks.
            row: this tick.
        """
        if phase.forward:
            actions = self._action_of_stage(row.forward)
            x = self._input(carry, rows, row, actions)
            y, item, aux = self._forward(actions.chunk, x, self._microbatch(actions.microbatch))
            is_real = row.is_forward[self.index]
            aux = self._merge_layer_aux(carry.layer_aux, aux, actions.chunk, is_real)
            # Idle stages write too: the schedule gives them a free slot (`Schedule.idle_slots`), so
            # that no branch is needed here.
            ring = jax.tree.map(
                lambda ring, leaf: jax.lax.dynamic_update_index_in_dim(ring, leaf, actions.slot, 0),
                carry.ring, item,
            )  # fmt: skip
            carry = carry._replace(arriving=self._send(y, +1), ring=ring, layer_aux=aux)
        if phase.backward:
            actions, is_busy = self._action_of_stage(row.backward), row.is_backward[self.index]
            item = jax.tree.map(
                lambda ring: jax.lax.dynamic_index_in_dim(ring, actions.slot, 0, keepdims=False),
                carry.ring,
            )
            microbatch = self._microbatch(actions.microbatch)
            # The ring holds inputs only: the forward of the chunk runs again, now saving what its
            # backward needs. Otherwise the ring holds the residuals of the first forward.
            if not self.functions.saves_residuals:
                _, item, _ = self._forward_with_residuals(actions.chunk, item, microbatch)
            y, saved = item
            carry, d_y = self._loss_backward(carry, rows, row, y, self._is_last(actions))
            d_y = jnp.where(is_busy, d_y, 0)  # so that gradients of idle stages are zero
            d_x, layers = self._backward(
                actions.chunk, d_y, is_busy, saved, microbatch, carry.layers
            )
            outer = self._embed_backward(carry.outer, rows, row, d_x, actions)
            carry = carry._replace(returning=self._send(d_x, -1), layers=layers, outer=outer)
        return carry, None

    def _input(self, carry: Carry, rows: TickArrays, row: TickArrays, actions: Actions) -> Array:
        """Return the input of a stage: the embedding, or the output of the stage before."""

        def embed() -> Array:
            return self.functions.embed(self.outer, self._microbatch(row.embeds))

        # Stage 0 takes the embedding; the others take what the last tick sent. Every device looks
        # up its share of the vocabulary, because embedding and head are sharded over the stages.
        zeros = self._zeros(carry.arriving, stages=False)
        embedding = self._run_if(rows.embeds, row.embeds, embed, zeros, cheap=True)
        return jnp.where(self._is_first(actions), embedding, carry.arriving)

    def _loss_backward(
        self, carry: Carry, rows: TickArrays, row: TickArrays, y: Array, is_last: Array
    ) -> tuple[Carry, Array]:
        """Add the loss and its gradients; return also the gradient of the stage's output."""

        def head_and_loss() -> tuple[Params, AuxOutputs, Array]:
            microbatch = self._microbatch(row.losses)
            # The last stage broadcasts its output, so that each device can compute its share of the
            # vocabulary of the logits.
            x = self._broadcast(jnp.where(is_last, y, 0))

            def loss(outer: Params, x: Array) -> tuple[Array, AuxOutputs]:
                aux = self.functions.loss(outer, x, microbatch)
                return aux.loss, aux

            value, pull, aux = jax.vjp(loss, self.outer, x, has_aux=True)
            d_outer, d_x = pull(jnp.ones_like(value))
            return _add(carry.outer, d_outer), merge(carry.loss_aux, aux), d_x

        unchanged = (carry.outer, carry.loss_aux, self._zeros(y, stages=False))
        d_outer, aux, d_last = self._run_if(rows.losses, row.losses, head_and_loss, unchanged)
        carry = carry._replace(outer=d_outer, loss_aux=aux)
        return carry, jnp.where(is_last, d_last, carry.returning)

    def _embed_backward(
        self, d_outer: Params, rows: TickArrays, row: TickArrays, d_x: Array, actions: Actions
    ) -> Params:
        """Add the gradient of the embedding, from that of the first stage's input."""

        def backward() -> Params:
            microbatch = self._microbatch(row.embed_backwards)
            d_embedding = self._broadcast(jnp.where(self._is_first(actions), d_x, 0))
            _, pull = jax.vjp(lambda outer: self.functions.embed(outer, microbatch), self.outer)
            return _add(d_outer, pull(d_embedding)[0])

        column, now = rows.embed_backwards, row.embed_backwards
        return self._run_if(column, now, backward, d_outer, cheap=True)

    def _forward_only(
        self, chunk: Array | int, x: Array, microbatch: Microbatch
    ) -> tuple[Array, PyTree, AuxOutputs]:
        """Return the output of a chunk, its input for the ring, and its auxiliary outputs."""
        context = self.functions.context(x, microbatch)

        def run(branch: Branch, x: Array, row: Array) -> LayerResult[AuxOutputs]:
            layer, params, constants = self._layer_inputs(context, branch, row)
            (y, terms), aux = layer(params, x, constants)
            return y, ([], aux._replace(loss_terms=terms))

        y, (_, aux) = jax.lax.scan(self._select_branch(run), x, self._rows_of(chunk))
        return y, x, aux

    def _forward_with_residuals(
        self, chunk: Array | int, x: Array, microbatch: Microbatch
    ) -> tuple[Array, tuple[Array, list[Array]], AuxOutputs]:
        """Return the output of a chunk, (output, residuals) for the ring, and auxiliary outputs."""
        context = self.functions.context(x, microbatch)

        def run(branch: Branch, x: Array, row: Array) -> LayerResult[AuxOutputs]:
            layer, params, constants = self._layer_inputs(context, branch, row)
            (y, terms), pull, aux = jax.vjp(layer, params, x, constants, has_aux=True)
            saved, _ = split_pull(pull, (params, constants))
            return y, (saved, aux._replace(loss_terms=terms))

        y, (saved, aux) = jax.lax.scan(self._select_branch(run), x, self._rows_of(chunk))
        return y, (y, saved), aux

    def _select_branch(
        self, run: Callable[[Branch, Array, Array], LayerResult[Result]]
    ) -> Callable[[Array, Array], LayerResult[Result]]:
        """Return (x, row) -> the result of `run` for the branch of the row."""
        branches = self.functions.branches
        if self.locations is None:
            return functools.partial(run, branches[0])
        of_rows = self.locations.stack

        def run_row(x: Array, row: Array) -> LayerResult[Result]:
            layers = [functools.partial(run, branch, x, row) for branch in branches]
            return run_layer(of_rows[row], layers, x, self.varying)

        return run_row

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

        def run_row(carry: tuple[Array, Params], inputs: tuple[Array, list[Array]]) -> Any:  # noqa: ANN401
            (d_y, grads), (row, saved) = carry, inputs

            def run(branch: Branch, d_y: Array, row: Array) -> LayerResult[None]:
                # `jax.vjp` returns a pytree whose structure is static and whose leaves are
                # residuals. Tracing it here on a dummy input (d_y) gives the structure; the leaves
                # come from the ring. The compiler removes the computation, because its results are
                # not used.
                layer, params, constants = self._layer_inputs(context, branch, row)
                (_, terms), pull, _ = jax.vjp(layer, params, d_y, constants, has_aux=True)
                like, rebuild = split_pull(pull, (params, constants))
                is_real = is_busy & self.is_layer[row]
                # Loss terms of a layer enter the loss with weight 1. Rows without a layer, and idle
                # stages, must not contribute.
                d_terms = jax.tree.map(
                    lambda term: jnp.where(is_real, jnp.ones_like(term), 0), terms
                )
                d_layer, d_x, _ = rebuild(arrays_of_layer(saved, like))((d_y, d_terms))
                return d_x, (jax.tree.leaves(d_layer), None)

            d_x, (d_layer, _) = self._select_branch(run)(d_y, row)
            return (d_x, self._add_row(grads, row, d_layer)), None

        rows = self._rows_of(chunk)
        return jax.lax.scan(run_row, (d_y, grads), (rows, saved), reverse=True)[0]

    def _add_row(self, grads: Params, row: Array, d_layer: list[Array]) -> Params:
        """Add the gradients of a row, which are leaves in the order of its parameters."""
        if self.locations is None:
            return _add_leaves(grads, row, d_layer)
        for i, branch in enumerate(self.functions.branches):
            (stack,), at = branch.stacks, self._row_in_stack(branch, row)
            like = jax.tree.leaves(_row_of(self.layers[stack], at))
            add = functools.partial(_add_leaves, row=at, leaves=arrays_of_layer(d_layer, like))
            is_in_stack = self.locations.stack[row] == i
            grads = {**grads, stack: change_if(is_in_stack, add, grads[stack])}
        return grads

    def _rows_of(self, chunk: Array | int) -> Array:
        """Return the rows of a chunk's layers among those of the stage."""
        n = len(self.is_layer) // self.schedule.chunks
        return chunk * n + jnp.arange(n)

    def _row_in_stack(self, branch: Branch, row: Array) -> Array:
        """Return the row of a layer in the stack of its branch."""
        if self.locations is None:
            return row
        (stack,) = branch.stacks
        n = jax.tree.leaves(self.layers[stack])[0].shape[0] // self.schedule.chunks
        chunk = row // (len(self.is_layer) // self.schedule.chunks)
        return chunk * n + self.locations.row[row]

    def _merge_layer_aux(
        self, total: AuxOutputs, aux: AuxOutputs, chunk: Array, is_real: Array
    ) -> AuxOutputs:
        """Merge the auxiliary outputs of a chunk, except those of idle stages and empty rows."""
        rows = self._rows_of(chunk)
        mask = functools.partial(only_rows, is_real & self.is_layer[rows])
        return combine(
            lambda total, aux: total.at[rows].add(mask(aux)),
            lambda total, aux: total.at[rows].max(mask(aux)),
            total, aux,
        )  # fmt: skip

    def _layer_inputs(
        self, context: PyTree, branch: Branch, row: Array
    ) -> tuple[LayerFunction, Params, tuple[PyTree, PyTree]]:
        """Return the function of a row's layer, its parameters, and its other inputs."""
        at = self._row_in_stack(branch, row)
        params = {stack: self.layers[stack] for stack in branch.stacks}
        state = {stack: self.state[stack] for stack in branch.stacks if stack in self.state}
        constants = context, _row_of(state, at)
        kind = jax.tree.map(lambda kinds: kinds[row], self.kinds)
        return functools.partial(branch.layer, kind), _row_of(params, at), constants

    def _run_if(
        self, column: Column, now: Array, action: Callable[[], Result], otherwise: Result,
        *, cheap: bool = False,
    ) -> Result:  # fmt: skip
        """Run an action that only some ticks of a phase need, with the same branch on all devices.

        Args:
            column: microbatch of the action in each tick of the phase; -1: no action.
            now: microbatch of the action in this tick.
            action: computation for that microbatch.
            otherwise: result without the action.
            cheap: whether to prefer unnecessary computation over a branch. Its result must be
                masked, or zero.
        """
        # `column` is known at trace time: a phase in which no tick, or every tick, needs the action
        # has no branch at all. The predicate of the branch is the same on all devices, so
        # collectives inside it cannot deadlock.
        if (column < 0).all():
            return otherwise
        if (column >= 0).all() or (cheap and self.schedule.chunks == 1):
            return action()
        return jax.lax.cond(now >= 0, action, lambda: otherwise)

    def _of_stage(self, by_stage: PyTree) -> PyTree:
        """Return the entries of this stage, from arrays with one entry per stage."""
        return jax.tree.map(lambda rows: rows[self.index], jax.tree.map(jnp.asarray, by_stage))

    def _action_of_stage(self, actions: Actions) -> Actions:
        return Actions(*(column[self.index] for column in actions))

    def _microbatch(self, index: Array | int) -> Microbatch:
        return _row_of(self.batch, jnp.maximum(index, 0))

    def _is_first(self, actions: Actions) -> Array:
        return (self.index == 0) & (actions.chunk == 0)

    def _is_last(self, actions: Actions) -> Array:
        last = self.schedule.chunks - 1
        return (self.index == self.schedule.stages - 1) & (actions.chunk == last)

    def _send(self, x: Array, by: int) -> Array:
        n = self.schedule.stages
        return split_over_tp(jax.lax.ppermute(x, STAGES, [(i, (i + by) % n) for i in range(n)]))

    def _broadcast(self, x: Array) -> Array:
        """Broadcast a value from the stage that has it; the other stages hold zeros."""
        return split_over_tp(collectives.psum(x, LAYERS))

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


def _add_leaves(grads: PyTree, row: Array, leaves: list[Array]) -> PyTree:
    d_layer = jax.tree.unflatten(jax.tree.structure(grads), leaves)
    return jax.tree.map(lambda g, d: g.at[row].add(d.astype(g.dtype)), grads, d_layer)


def _add(total: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, grads)
