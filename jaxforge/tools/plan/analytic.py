"""How long a step takes, roughly, from sizes alone: what a search compiles first.

The model of jax-ml.github.io/scaling-book: products at a part of the peak, weights gathered and
gradients reduced beside them where every microbatch does it, at the rate of the links between the
devices; tensor-parallel exchanges and the pipeline's bubble on top. Good for ranking; what is
compiled is estimated anew.
"""

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from jaxforge.config.axes import data_parallel
from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, active_parameter_count, parameter_count
from jaxforge.telemetry.flops import causal_flops_per_token
from jaxforge.tools.plan.chips import Chip
from jaxforge.tools.plan.network import rate_along
from jaxforge.tools.plan.rates import REACHED

_BF16, _F32 = 2, 4
_SEEN = {"gpu": 0.5, "tpu": 0.1}
"""Of what is exchanged beside a microbatch's work, what is waited for all the same."""
_RECOMPUTED = {
    "none": 0.0,
    "everything_saveable": 0.0,
    "selective": 0.03,
    "dots_saveable": 0.02,
    "dots_with_no_batch_dims_saveable": 0.05,
    "full": 0.22,
    "nothing_saveable": 0.22,
}
"""Of the FLOPs of forward and backward, what is computed again: a block need not end with its last
product to be differentiated, and the head is not computed again."""


def seconds(config: JobConfig, model: Model, mesh: Mesh, chip: Chip) -> float:
    """Of an update.

    Args:
        config: that `rules.check` has passed.
        model: of the config.
        mesh: of the devices, which need not be here.
        chip: the device.
    """
    train, c, sizes = config.train, config.model, mesh.shape
    dp, rounds = data_parallel(sizes), train.grad_accum_steps
    # Of a microbatch on one device.
    tokens = train.microbatch_size(dp) // dp * train.seq_len // sizes["cp"]
    cut = sizes["tp"] * sizes["pp"]
    peak = chip.peak_flops * REACHED[chip.platform].by_kind["products"]
    again = 1 + _RECOMPUTED[train.activation_checkpointing]
    computing = tokens / cut * causal_flops_per_token(c, train.seq_len) * again / peak
    # Activations go out and come back twice in each half of a layer; rows go to experts and back.
    passed = 8 * c.n_layers / sizes["pp"] * tokens * c.dim * _BF16
    computing += _exchange(passed, mesh, ("tp",), chip)
    # Queries, keys, values and results: in the forward, when that is repeated, and backwards.
    heads = 2 * (c.n_heads + c.kv_heads) * c.head_size
    shared = 3 * c.n_layers / cut * tokens * heads * _BF16
    computing += _exchange(shared, mesh, ("cp",), chip)
    if c.is_moe:
        rows = 4 * c.n_layers * tokens * c.moe_top_k * c.dim * _BF16
        computing += _exchange(rows, mesh, ("ep",), chip)
    bubble = 1 + (sizes["pp"] - 1) / (rounds * config.distributed.chunks)
    weights = _used_by_one(model, sizes)
    gathers = _exchange(weights * _BF16, mesh, ("dp_shard", "cp"), chip)
    reduces = gathers * model.runtime.reduce_dtype.itemsize / _BF16
    kept = weights / (sizes["dp_shard"] * sizes["cp"])
    copies = _exchange(2 * _F32 * kept, mesh, ("dp_replicate",), chip)
    if train.grad_sync == "update":
        return rounds * computing * bubble + gathers + reduces + copies
    exchanging = 2 * gathers + reduces + copies  # weights are gathered again in the backward pass
    waiting = max(exchanging - computing, _SEEN[chip.platform] * exchanging)
    return rounds * (computing + waiting) * bubble


def _exchange(sent: float, mesh: Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Seconds in which the devices along some axes have each other's bytes."""
    n = math.prod(mesh.shape[axis] for axis in axes)
    return sent * (n - 1) / n / rate_along(mesh, axes, chip)


def _used_by_one(model: Model, mesh: Mapping[str, int]) -> float:
    """Parameters that a device multiplies with, its experts alone among experts."""
    every, active = parameter_count(model.abstract), active_parameter_count(model)
    experts = every - active if model.config.is_moe else 0
    return (every - experts + experts / mesh["ep"]) / (mesh["tp"] * mesh["pp"])
