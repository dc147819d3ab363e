"""Memory estimate of an update per device, from shapes and before compilation.

All sizes are bytes of one device. Of what a device holds of an array, parts are rounded up where a
mesh axis does not divide a dimension.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.linear import is_matrix
from jaxforge.model.transformer import Model
from jaxforge.parallel.mesh import STAGES, data_parallel_size
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.parallel.sharding import Axes, compute_axes, mesh_axes
from jaxforge.step.cross_entropy import tiling_on_device

_F32 = 4
_HEADROOM_OF_EXPERTS = 1.5  # rows that a device has room for, relative to an even load

_LAYERS_ON_THEIR_WAY = 2  # between device and host, where activations are offloaded


class StepMemory(NamedTuple):
    """Peak memory of a step on one device, in bytes.

    Attributes:
        state: parameters, optimizer state and counters, as they are stored.
        weights: copies of the weights in the compute dtype, whole over the data axes: of all
            layers (`grad_sync = "update"`) or of those at work.
        gradients: sums over microbatches (float32) and those of the microbatch at work.
        activations: saved by the forward for the backward, by `train.activation_checkpointing`.
        working: the largest of what one layer's backward, the loss and the optimizer need in
            addition.
    """

    state: int
    weights: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """Their sum, which is what must fit."""
        return sum(self)


def step_memory(
    config: JobConfig,
    model: Model,
    mesh: Mesh | AbstractMesh,
    grad_sync: str,
    state: int,
) -> StepMemory:
    """Estimate the peak memory of `train_step`.

    With c bytes of the compute dtype and P parameters of a device when its weights are whole over
    the data axes (its share of tp, pp and ep), and p of them stored:

                    "update"                    "microbatch"
        weights     c P                         2 c (a layer), c (embedding and head)
        gradients   c P; 4 P more to add up     4 p; (8 + c) p more to add up

    There is something to add up with several microbatches: XLA then has the shards of the weights
    in the compute dtype as well, and two sums. Pipeline stages add up row by row, so that they hold
    4 P or 4 p alone. Activations are those of one microbatch, in a pipeline of as
    many as its schedule has in flight.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        model: as of `build_model`.
        mesh: sizes of the axes; no device is asked anything.
        grad_sync: "update" or "microbatch".
        state: bytes that a device holds of the training state.
    """
    sizes = _Sizes(config, model, mesh)
    whole = grad_sync == "update"
    return StepMemory(
        state=state,
        weights=sizes.weights(whole),
        gradients=sizes.gradients(whole),
        activations=sizes.activations(),
        working=max(sizes.layer(whole), sizes.loss(), sizes.updating()),
    )


class _Sizes:
    """Sizes of a step on one device of a mesh."""

    def __init__(self, config: JobConfig, model: Model, mesh: Mesh | AbstractMesh) -> None:
        self.config, self.model, self.mesh = config, model, mesh
        self.bytes = jnp.dtype(model.dtype).itemsize
        dp = data_parallel_size(mesh)
        self.rows = -(-config.train.microbatch_size(dp) // dp)
        self.length = config.train.seq_len // mesh.shape["cp"]
        self.tokens = self.rows * self.length
        self.tp = mesh.shape["tp"]
        self.n_layers = len(model.stack.rows()) // mesh.shape[STAGES]
        self.pipelined = mesh.shape[STAGES] > 1
        self.adds_up = config.train.grad_accum_steps > 1

    def weights(self, whole: bool) -> int:
        """Copies in the compute dtype."""
        if whole:
            return sum(
                self._elements(leaf, compute_axes(axes)) * self._itemsize(leaf, axes)
                for _, leaf, axes in self._leaves()
            )
        ends = sum(
            self._elements(leaf, compute_axes(axes))
            for path, leaf, axes in self._leaves()
            if path[0] not in self.model.config.stacks
        )
        return self.bytes * (2 * self._layer_elements() + ends)

    def gradients(self, whole: bool) -> int:
        """Return the bytes of all gradients until the optimizer has them."""
        total = 0
        for _, leaf, axes in self._leaves():
            elements = self._elements(leaf, compute_axes(axes) if whole else axes)
            of_one = self._itemsize(leaf, axes) if whole else leaf.dtype.itemsize
            copied = self.bytes if leaf.dtype != self.model.dtype else 0  # cast where it lies
            to_add_up = _F32 if whole else 2 * _F32 + copied
            if self.pipelined:
                total += elements * _F32
            else:
                total += elements * (of_one + to_add_up * self.adds_up)
        return total

    def activations(self) -> int:
        """Return the bytes of activations that the forward saves for the backward pass."""
        save = self.config.train.activation_checkpointing
        if not self.pipelined:
            offloads = "activations" in self.config.train.offload
            layers = min(self.n_layers, _LAYERS_ON_THEIR_WAY) if offloads else self.n_layers
            return layers * self.tokens * self._saved_per_token(save)
        d = self.config.distributed
        schedule = SCHEDULES[d.pp_schedule](d.pp, self.config.train.grad_accum_steps, d.chunks)
        layers = self.n_layers // d.chunks
        entering = self.tokens * self._share(self.model.config.dim) * self.bytes
        if save in ("full", "nothing_saveable"):
            at_work = self._saved_per_token("dots_with_no_batch_dims_saveable")
            return schedule.slots * entering + layers * self.tokens * at_work
        held = {"none": "dots_saveable", "selective": "dots_with_no_batch_dims_saveable"}
        of_one = layers * self.tokens * self._saved_per_token(held.get(save, save))
        return (schedule.slots + 1) * (entering + of_one)

    def layer(self, whole: bool) -> int:
        """One layer's backward: what it recomputes, gradients of that and of its weights."""
        inside = self._saved_per_token("none")
        recomputed = 0 if self.config.train.activation_checkpointing == "none" else inside
        wide = self.bytes if whole else _F32
        return self.tokens * (recomputed + inside) + self._scores() + wide * self._layer_elements()

    def loss(self) -> int:
        """Logits and their gradient, hidden states, the gradient of the head."""
        train, c = self.config.train, self.model.config
        entries = -(-c.vocab_size // (self.tp * self.mesh.shape[STAGES]))
        tile = tiling_on_device(
            train, self.rows, self.length, entries, self.model.runtime.loss_tile
        )
        logits = self.rows * tile.tokens * tile.vocab * (_F32 + self.bytes)
        hidden = self.tokens * c.dim * (2 * self.bytes + _F32)
        return logits + hidden + entries * c.dim * (self.bytes + _F32)

    def updating(self) -> int:
        """Muon's whole matrices of the largest parameter, and what they become."""
        if self.config.optimizer.name != "muon":
            return 0
        wholes = (self._elements(leaf, compute_axes(axes)) for _, leaf, axes in self._leaves())
        return 2 * _F32 * max(wholes)

    def _scores(self) -> int:
        """Attention scores of one layer where they are arrays of XLA's, and their gradient."""
        heads, length = self._share(self.model.config.n_heads), self.config.train.seq_len
        parts = {"reference": 1, "blockwise": 8}  # of the queries at a time
        kernel = self.model.runtime.attention
        if kernel not in parts:
            return 0
        return 2 * _F32 * heads * length * self.tokens // parts[kernel]

    def _saved_per_token(self, save: str) -> int:
        """Bytes that a token leaves in a layer under a policy of rematerialisation.

        Of the values of a block of Llama's shape, x stands for what enters it, q, k, v and o for
        attention's, g, u and a for those of the feed-forward's width.
        """
        c = self.model.config
        dim, stream = c.dim, self._share(c.dim)
        heads, kv = self._share(c.n_heads * c.head_size), self._share(c.kv_heads * c.head_size)
        width = self._width()
        products = heads + 2 * kv + (1 + c.is_gated) * width + 2 * dim
        if save in ("full", "nothing_saveable"):
            return self.bytes * stream
        if save == "dots_with_no_batch_dims_saveable":
            return self.bytes * (stream + products)
        if save == "dots_saveable":
            return self.bytes * (stream + products + heads) + self._scores_per_token()
        norms = 2 * (self.bytes * dim + 2 * _F32 * stream)
        feed_forward = self.bytes * (2 + c.is_gated) * width
        attention = 0 if save == "selective" else self.bytes * (2 * heads + 2 * kv)
        return self.bytes * 2 * stream + norms + feed_forward + attention

    def _scores_per_token(self) -> int:
        """Saved results of products within attention."""
        heads, length = self._share(self.model.config.n_heads), self.config.train.seq_len
        values = {"reference": length, "blockwise": length // 2}
        return _F32 * heads * values.get(self.model.runtime.attention, 0)

    def _width(self) -> int:
        """Values of a token between the matrices of a feed-forward, or of all of its experts."""
        c = self.model.config
        dense = self._share(c.ffn_dim)
        if not c.is_moe:
            return dense
        spread = _HEADROOM_OF_EXPERTS if self.mesh.shape["ep"] > 1 else 1
        rows = math.ceil(spread * c.moe_top_k)
        per_row = self._share(c.expert_dim) + c.dim  # the row itself travels, or is sorted
        experts = rows * per_row + self._share(c.shared_expert_dim)
        return experts if all(c.has_experts) else max(dense, experts)

    def _layer_elements(self) -> int:
        """Elements of the largest layer's weights, whole over the data axes."""
        of_stack = dict.fromkeys(self.model.config.stacks, 0)
        for path, leaf, axes in self._leaves():
            if path[0] in of_stack:
                one_layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
                of_stack[path[0]] += self._elements(one_layer, compute_axes(axes[1:]))
        return max(of_stack.values())

    def _leaves(self) -> Iterator[tuple[tuple[str, ...], jax.ShapeDtypeStruct, Axes]]:
        axes = flatten_dict(self.model.axes)
        for path, leaf in flatten_dict(self.model.abstract).items():
            yield path, leaf, axes[path]

    def _elements(self, leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
        """Elements of an array that a device holds, laid out by `axes`."""
        return math.prod(
            -(-size // math.prod(self.mesh.shape[name] for name in mesh_axes(axis)))
            for size, axis in zip(leaf.shape, axes, strict=True)
        )

    def _itemsize(self, leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
        """Bytes of an element of a weight that is used: vectors stay as they are stored."""
        return self.bytes if is_matrix(axes) else leaf.dtype.itemsize

    def _share(self, size: int) -> int:
        """Return the share of a dimension under tp."""
        return -(-size // self.tp)
