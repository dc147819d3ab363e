"""Time estimate of an update, from sizes and before compilation.

The model of jax-ml.github.io/scaling-book. Matrix products run at a fraction of the peak. If every
microbatch gathers weights and reduces gradients, these collectives overlap with the products.
Tensor-parallel exchanges and the pipeline's bubble are added.
"""

import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.axes import data_parallel
from jaxforge.config.job import JobConfig
from jaxforge.model.flops import causal_flops_per_token
from jaxforge.model.transformer import Model, active_parameter_count, parameter_count
from jaxforge.parallel.groups import group_view
from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.rates import EFFICIENCY, rate_along

_BF16, _F32 = 2, 4
_RECOMPUTED = {
    "gpu": {"dots_with_no_batch_dims_saveable": 0.08, "selective": 0.13, "full": 0.22},
    "tpu": {"selective": 0.01, "none": 0.03, "full": 0.15},
    "cpu": {"dots_with_no_batch_dims_saveable": 0.01, "selective": 0.03, "full": 0.04},
}
"""Additional time of a microbatch, as a fraction: recomputation, and copies of saved values.

From plans of Llama 2 7B on 8 H100, of Llama 3.2 1B on v5e and of depth 12 on v6e. CPUs were
measured (docs/remat.md). On GPUs, "none" unrolls layers. On TPUs, writing and reading more values
takes longer than computing attention and elementwise operations again.
"""

_ADDED_BYTES = 10
"""Bytes that a microbatch moves for each gathered gradient, to add it to the sum in float32."""
_SLICED_BYTES = 12
"""Bytes that a loop over layers moves for each gathered weight: it copies the weights of a layer in
both passes, and their gradients."""


def update_seconds(config: JobConfig, model: Model, mesh: Mesh | AbstractMesh, chip: Chip) -> float:
    """Return a rough estimate of an update's seconds, good enough to rank candidates.

    Args:
        config: a config that `rules.check` has passed.
        model: model of the config.
        mesh: mesh of the target devices.
        chip: the device.
    """
    config, mesh = group_view(config, mesh)  # exchanges between groups are rare
    train, c, sizes = config.train, config.model, mesh.shape
    dp, microbatches = data_parallel(sizes), train.grad_accum_steps
    # tokens: of a microbatch on one device. tp and pp split the products of each token.
    tokens = train.microbatch_size(dp) // dp * train.seq_len // sizes["cp"]
    split = sizes["tp"] * sizes["pp"]
    peak = chip.peak_flops * EFFICIENCY[chip.platform].by_kind["products"]
    recompute = 1 + _recomputed(train.activation_checkpointing, chip.platform)
    computing = tokens / split * causal_flops_per_token(c, train.seq_len) * recompute / peak
    # tp: each half of a layer (attention, feed-forward) gathers and scatters the residual stream,
    # in the forward and in the backward pass: 2 halves x 2 collectives x 2 passes = 8.
    stream = 8 * c.n_layers / sizes["pp"] * tokens * c.stream_dim * _BF16
    computing += _exchange(stream, mesh, ("tp",), chip)
    # cp: queries, keys, values and outputs in the forward pass, its recomputation and the backward.
    heads = (c.n_heads + c.kv_heads) * (c.head_size + c.value_head_size)
    attention = 3 * c.n_layers / split * tokens * heads * _BF16
    computing += _exchange(attention, mesh, ("cp",), chip)
    if c.is_moe:
        # ep: rows go to their experts and back, in the forward and in the backward pass.
        rows = 4 * c.n_layers * tokens * c.moe_top_k * c.dim * _BF16
        computing += _exchange(rows, mesh, ("ep",), chip)
    bubble = 1 + (sizes["pp"] - 1) / (microbatches * config.distributed.chunks)
    weights = _weights_per_device(model, sizes)
    gathers = _exchange(weights * _BF16, mesh, ("dp_shard", "cp"), chip)
    reduces = gathers * model.runtime.sent_dtype.itemsize / _BF16
    stored = weights / (sizes["dp_shard"] * sizes["cp"])
    replicas = _exchange(2 * _F32 * stored, mesh, ("dp_replicate",), chip)
    if train.grad_sync == "update":
        has_loop = train.activation_checkpointing != "none"
        moved = weights * (_ADDED_BYTES + has_loop * _SLICED_BYTES)
        moving = moved / (chip.bandwidth * EFFICIENCY[chip.platform].memory)
        return microbatches * (computing + moving) * bubble + gathers + reduces + replicas
    exchanging = 2 * gathers + reduces + replicas  # the backward pass gathers weights again
    waiting = max(exchanging - computing, EFFICIENCY[chip.platform].waited * exchanging)
    return microbatches * (computing + waiting) * bubble


def _recomputed(save: str, platform: str) -> float:
    """Return the additional time of a value of `train.activation_checkpointing`."""
    same = {"everything_saveable": "none", "dots_saveable": "none", "nothing_saveable": "full"}
    return _RECOMPUTED[platform].get(same.get(save, save), 0.0)


def _exchange(sent: float, mesh: Mesh | AbstractMesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return the seconds in which devices along some axes exchange their bytes."""
    n = math.prod(mesh.shape[axis] for axis in axes)
    return sent * (n - 1) / n / rate_along(mesh, axes, chip)


def _weights_per_device(model: Model, mesh: Mapping[str, int]) -> float:
    """Return the number of parameters that a device multiplies with; experts are split over ep."""
    total, active = parameter_count(model.abstract), active_parameter_count(model)
    experts = total - active if model.config.is_moe else 0
    return (total - experts + experts / mesh["ep"]) / (mesh["tp"] * mesh["pp"])
