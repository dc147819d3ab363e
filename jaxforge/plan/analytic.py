"""How long a step takes, roughly, from sizes alone: what a search compiles first.

The model of jax-ml.github.io/scaling-book: products at a part of the peak, weights gathered and
gradients reduced beside them where every microbatch does it, tensor-parallel exchanges and the
pipeline's bubble on top. Good for ranking; what is compiled is estimated anew.
"""

from collections.abc import Mapping

from jaxforge.config.job import JobConfig
from jaxforge.config.rules import data_parallel
from jaxforge.model.transformer import Model, active_parameter_count, parameter_count
from jaxforge.plan.chips import Chip
from jaxforge.plan.rates import REACHED
from jaxforge.telemetry.flops import causal_flops_per_token

_BF16, _F32 = 2, 4
_RECOMPUTED = {
    "none": 0.0,
    "everything_saveable": 0.0,
    "selective": 0.03,
    "dots_saveable": 0.02,
    "dots_with_no_batch_dims_saveable": 0.05,
    "full": 1 / 3,
    "nothing_saveable": 1 / 3,
}
"""Of the FLOPs of forward and backward, what is computed again."""


def seconds(config: JobConfig, model: Model, mesh: Mapping[str, int], chip: Chip) -> float:
    """Of an update.

    Args:
        config: that `rules.check` has passed.
        model: of the config.
        mesh: size of each axis.
        chip: the device.
    """
    train, c = config.train, config.model
    dp = data_parallel(mesh)
    tokens = train.microbatch_size(dp) // dp * train.seq_len  # of a microbatch on one device
    cut = mesh["tp"] * mesh["pp"]
    peak = chip.peak_flops * REACHED[chip.platform].by_kind["products"]
    again = 1 + _RECOMPUTED[train.activation_checkpointing]
    computing = tokens / cut * causal_flops_per_token(c, train.seq_len) * again / peak
    weights = _used_by_one(model, mesh) * _BF16 / chip.link
    if mesh["tp"] > 1:  # two exchanges of activations in each half of a layer, there and back
        exchanged = 8 * c.n_layers / mesh["pp"] * tokens * c.dim * _BF16
        computing += exchanged * (mesh["tp"] - 1) / mesh["tp"] / chip.link
    if c.is_moe and mesh["ep"] > 1:
        computing += 4 * c.n_layers * tokens * c.moe_top_k * c.dim * _BF16 / chip.link
    rounds = train.grad_accum_steps
    bubble = 1 + (mesh["pp"] - 1) / (rounds * config.distributed.chunks)
    if dp == 1:
        return rounds * computing * bubble
    if train.grad_sync == "microbatch":
        return rounds * max(computing, 3 * weights) * bubble + weights
    return rounds * computing * bubble + weights * (1 + _F32 / _BF16)


def _used_by_one(model: Model, mesh: Mapping[str, int]) -> float:
    """Parameters that a device multiplies with, its experts alone among experts."""
    every, active = parameter_count(model.abstract), active_parameter_count(model)
    experts = every - active if model.config.is_moe else 0
    return (every - experts + experts / mesh["ep"]) / (mesh["tp"] * mesh["pp"])
