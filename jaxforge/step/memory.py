"""Memory estimate of an update per device, from shapes and before compilation.

All sizes are bytes of one device. Shards are rounded up if a mesh axis does not divide a dimension.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.experts import filled_rows
from jaxforge.model.linear import is_matrix
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers import mixer_class
from jaxforge.model.transformer import Model
from jaxforge.optim.freezing import frozen_paths
from jaxforge.parallel.groups import group_view
from jaxforge.parallel.mesh import STAGES, data_parallel_size
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.parallel.sharding import Axes, compute_axes, mesh_axes
from jaxforge.step.logit_tiles import tiling_on_device

_F32 = 4

_LAYERS_IN_TRANSFER = 2  # between device and host with offloaded activations


class StepMemory(NamedTuple):
    """Peak memory of a step on one device, in bytes.

    Attributes:
        state: parameters, their average, optimizer state and counters, as they are stored; and the
            frozen model.
        weights: copies of the weights in the compute dtype, gathered over the data axes: of all
            layers (`grad_sync = "update"`) or of the current layers.
        gradients: sums over microbatches (float32) and gradients of the current microbatch.
        activations: values that the forward pass saves for the backward pass, as
            `train.activation_checkpointing` selects.
        working: the largest additional need of a layer's backward pass, the loss and the optimizer.
    """

    state: int
    weights: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """The sum of all parts, which must fit on a device."""
        return sum(self)


def step_memory(
    config: JobConfig,
    model: Model,
    mesh: Mesh | AbstractMesh,
    state: int,
    frozen: int = 0,
) -> StepMemory:
    """Estimate the peak memory of `train_step`.

    Let c be the bytes of the compute dtype. Of a device, let P be the parameters gathered over the
    data axes (its share of tp, pp and ep), and p the stored ones:

                    "update"                     "microbatch"
        weights     c P                          2 c (a layer), c (embedding and head)
        gradients   c P; accumulation: + 4 P     4 p; accumulation: + (8 + c) p

    Accumulation means several microbatches. In "microbatch", XLA then also holds the shards of the
    weights in the compute dtype, and two sums. Pipeline stages accumulate row by row and hold only
    4 P or 4 p. Activations are those of one microbatch; in a pipeline, of all microbatches that its
    schedule has in flight.

    Args:
        config: a config that `rules.check` has passed for the mesh, without "auto" in
            `train.grad_sync` and `train.activation_checkpointing`.
        model: result of `build_model`, for any recomputation.
        mesh: sizes of the axes; devices are not used.
        state: bytes of the training state on a device.
        frozen: bytes of the frozen model on a device (`frozen_model.frozen_bytes`).
    """
    config, mesh = group_view(config, mesh)  # groups that train apart are jobs of their own
    sizes = _Sizes(config, model, mesh)
    whole = config.train.grad_sync == "update"
    return StepMemory(
        state=state + frozen,
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
        self.accumulates = config.train.grad_accum_steps > 1

    def weights(self, whole: bool) -> int:
        """Return the bytes of weights in the compute dtype."""
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
        """Return the bytes of all gradients before the optimizer runs."""
        total = 0
        frozen = frozen_paths(self.model.axes, self.config)
        for path, leaf, axes in self._leaves():
            if path in frozen:
                continue
            elements = self._elements(leaf, compute_axes(axes) if whole else axes)
            grad = self._itemsize(leaf, axes) if whole else leaf.dtype.itemsize
            cast = self.bytes if leaf.dtype != self.model.dtype else 0  # shard in the compute dtype
            accumulation = _F32 if whole else 2 * _F32 + cast
            if self.pipelined:
                total += elements * _F32
            else:
                total += elements * (grad + accumulation * self.accumulates)
        return total

    def activations(self) -> int:
        """Return the bytes of activations that the forward saves for the backward pass."""
        save = self.config.train.activation_checkpointing
        if not self.pipelined:
            # Embeddings of all layers and their gradient.
            of_layers = 2 * self.bytes * (self.model.config.layer_embedding_dim or 0)
            embeddings = self.n_layers * self.tokens * self._share(of_layers)
            offloads = "activations" in self.config.train.offload
            layers = min(self.n_layers, _LAYERS_IN_TRANSFER) if offloads else self.n_layers
            saved = layers * self.tokens * self._saved_per_token(save)
            return saved + self._modules(save) + embeddings
        d = self.config.distributed
        schedule = SCHEDULES[d.pp_schedule](d.pp, self.config.train.grad_accum_steps, d.chunks)
        layers = self.n_layers // d.chunks
        inputs = self.tokens * self._share(self.model.config.stream_dim) * self.bytes
        modules = self._modules(save)  # of one microbatch: the loss and its gradient are one tick
        if save in ("full", "nothing_saveable"):
            current = self._saved_per_token("dots_with_no_batch_dims_saveable")
            return schedule.slots * inputs + layers * self.tokens * current + modules
        effective = {"none": "dots_saveable", "selective": "dots_with_no_batch_dims_saveable"}
        saved = layers * self.tokens * self._saved_per_token(effective.get(save, save))
        return (schedule.slots + 1) * (inputs + saved) + modules

    def _modules(self, save: str) -> int:
        """Return the bytes that modules of multi-token prediction save."""
        inputs = 2 * self.bytes * self._share(self.model.config.dim)  # of the input projection
        depths = self.model.config.mtp_depth
        return depths * self.tokens * (self._saved_per_token(save) + inputs)

    def layer(self, whole: bool) -> int:
        """Return the bytes of one layer's backward pass: values, their gradients, weight grads."""
        c, runtime = self.model.config, self.model.runtime
        inside = max(mixer.saved_values(c, self._share).inside for mixer in self._mixers())
        fused = self._saved_per_token("none")
        values = fused if runtime.fuses_elementwise else self._all_per_token(inside)
        recomputed = 0 if self.config.train.activation_checkpointing == "none" else values
        grad = self.bytes if whole else _F32
        working = max(mixer.working_values(c, self._share) for mixer in self._mixers())
        if c.latent_attention.has_indexer:  # devices gather the keys of a sequence
            working *= self.mesh.shape["cp"]
        per_token = recomputed + values + _F32 * working + self._copies_per_token()
        return self.tokens * per_token + self._scores() + grad * self._layer_elements()

    def _copies_per_token(self) -> int:
        """Return the bytes of rows that are copied for gradients of experts' weights.

        On Hopper these read rows in blocks of one expert each (`kernels/grouped_mosaic.py`): inputs
        and gradients of the products into and out of an expert.
        """
        c = self.model.config
        if self.model.runtime.grouped != "mosaic_gpu":
            return 0
        width = 2 * c.expert_embed_dim + (2 + c.is_gated) * self._share(c.expert_dim)
        return self.bytes * self._rows_per_token() * width

    def loss(self) -> int:
        """Return the bytes of logits, their gradient, hidden states and the head's gradient."""
        train, c = self.config.train, self.model.config
        entries = -(-c.vocab_size // (self.tp * self.mesh.shape[STAGES]))
        tile = tiling_on_device(
            train, self.rows, self.length, entries, self.model.runtime.loss_tile
        )
        logits = self.rows * tile.tokens * tile.vocab * (_F32 + self.bytes)
        hidden = self.tokens * c.dim * (2 * self.bytes + _F32)
        result = logits + hidden + entries * c.dim * (self.bytes + _F32)
        # The gradients of hidden states and head wait until the backward pass of their depth.
        waiting = self.bytes * c.dim * (self.tokens + entries)
        return result + c.mtp_depth * waiting

    def updating(self) -> int:
        """Return the bytes of Muon's input and result for the largest parameter, both gathered."""
        if self.config.optimizer.name != "muon":
            return 0
        sizes = (self._elements(leaf, compute_axes(axes)) for _, leaf, axes in self._leaves())
        return 2 * _F32 * max(sizes)

    def _scores(self) -> int:
        """Return the bytes of a layer's attention scores and their gradient, 0 for kernels."""
        heads, length = self._share(self.model.config.n_heads), self.config.train.seq_len
        parts = {"reference": 1, "blockwise": 8}  # blocks of queries, computed one at a time
        shares = [1 / parts[name] for name in self._kernels() if name in parts]
        if not shares or not self._has_scores():
            return 0
        return int(2 * _F32 * heads * length * self.tokens * max(shares))

    def _saved_per_token(self, save: str) -> int:
        """Return the bytes that a layer saves per token under a rematerialization policy."""
        c = self.model.config
        dim, stream, width = c.dim, self._share(c.stream_dim), self._width()
        mixers = [mixer.saved_values(c, self._share) for mixer in self._mixers()]
        mixer = max(mixers, key=sum)  # the largest layer counts
        products = mixer.projections + (1 + c.is_gated) * width + 2 * dim
        products += stream if c.n_streams > 1 else 0  # between the parts of the layer
        if save in ("full", "nothing_saveable"):
            return self.bytes * stream
        if save == "dots_with_no_batch_dims_saveable":
            return self.bytes * (stream + products)
        if save == "dots_saveable":
            return self.bytes * (stream + products + mixer.mixed) + self._scores_per_token()
        if save == "none" and not self.model.runtime.saves_elementwise:
            return self.bytes * (stream + products - dim + mixer.mixed) + self._scores_per_token()
        return self._all_per_token(mixer.inside if save != "selective" else 0)

    def _all_per_token(self, inside: int) -> int:
        """Return the bytes per token of all values of a layer, with these values of its mixer."""
        c, stream = self.model.config, self._share(self.model.config.stream_dim)
        norms = 2 * (self.bytes * c.dim + 2 * _F32 * stream)
        feed_forward = self.bytes * (2 + c.is_gated) * self._width()
        return self.bytes * (2 * stream + inside) + norms + feed_forward

    def _scores_per_token(self) -> int:
        """Return the bytes of saved attention products per token."""
        heads, length = self._share(self.model.config.n_heads), self.config.train.seq_len
        values = {"reference": length, "blockwise": length // 2}
        if not self._has_scores():
            return 0
        return _F32 * heads * max(values.get(name, 0) for name in self._kernels())

    def _kernels(self) -> tuple[str, ...]:
        return self.model.runtime.attention_kernels

    def _has_scores(self) -> bool:
        """Return whether some layers score all pairs of tokens with the attention kernel."""
        # Sparse attention scores as many pairs at a time as fit into a constant size.
        has_indexer = self.model.config.latent_attention.has_indexer
        return not has_indexer and any(mixer.scores_pairs for mixer in self._mixers())

    def _mixers(self) -> list[type[Mixer]]:
        """Return the mixers of each kind of layer."""
        return [
            mixer_class(name) for name in {parts.mixer for parts in self.model.config.layer_parts}
        ]

    def _width(self) -> int:
        """Return the hidden width per token of a feed-forward, or of all of a token's experts."""
        c = self.model.config
        dense = self._share(max(map(c.dense_width, c.layer_parts)))
        if not c.is_moe:
            return dense
        rows = self._rows_per_token()
        per_row = self._share(c.expert_dim) + c.expert_embed_dim  # the row is sorted or sent
        experts = rows * per_row + self._share(c.shared_expert_dim)
        experts += 2 * (c.moe_latent_dim or 0)  # what experts read and write
        has_dense = any(parts.feed_forward == "dense" for parts in c.layer_parts)
        return max(dense, experts) if has_dense else experts

    def _rows_per_token(self) -> int:
        """Return the rows of a device's buffer of experts, relative to its tokens."""
        c = self.model.config
        return math.ceil(c.moe_top_k / filled_rows(c, self.mesh.shape["ep"]))

    def _layer_elements(self) -> int:
        """Return the elements of the largest layer's weights, gathered over the data axes."""
        elements = dict.fromkeys(self.model.config.stacks, 0)
        for path, leaf, axes in self._leaves():
            if path[0] in elements:
                layer = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
                elements[path[0]] += self._elements(layer, compute_axes(axes[1:]))
        return max(elements.values())

    def _leaves(self) -> Iterator[tuple[tuple[str, ...], jax.ShapeDtypeStruct, Axes]]:
        axes = flatten_dict(self.model.axes)
        for path, leaf in flatten_dict(self.model.abstract).items():
            yield path, leaf, axes[path]

    def _elements(self, leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
        """Return the elements of a device's shard of an array with logical axes `axes`."""
        return math.prod(
            -(-size // math.prod(self.mesh.shape[name] for name in mesh_axes(axis)))
            for size, axis in zip(leaf.shape, axes, strict=True)
        )

    def _itemsize(self, leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
        """Return the bytes per element of a weight in use: vectors keep their stored dtype."""
        return self.bytes if is_matrix(axes) else leaf.dtype.itemsize

    def _share(self, size: int) -> int:
        """Return the share of a dimension under tp."""
        return -(-size // self.tp)
