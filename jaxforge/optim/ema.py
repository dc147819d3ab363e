"""Exponential moving average of the parameters (`train.ema_decay`).

After update k (skipped steps are not counted), with decay d:

    ema ← params                         if k ≤ ema_start
    ema ← d · ema + (1 - d) · params     if k > ema_start and ema_interval divides k

The average begins as the initial parameters. The arithmetic is float32. In bfloat16, 1 - d of a
difference is usually less than half of the last digit, so the result is rounded stochastically:
rounded to the nearest number, the average would not move.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxforge.config.train import TrainConfig
from jaxforge.model.transformer import Params
from jaxforge.optim.random_bits import draw_key, random_words
from jaxforge.optim.rounding import stochastic_round
from jaxforge.optim.trees import Path, split

Average = Callable[[Params, Params, Int[Array, ""]], Params]
"""(average, parameters after an update, number of updates made) -> average after the update."""


def build_average(train: TrainConfig, frozen: frozenset[Path] = frozenset()) -> Average:
    """Return the function that updates the average; without `train.ema_decay`, the identity.

    Args:
        train: the `[train]` section.
        frozen: paths of the frozen parameters, which have no average.
    """
    if not train.averages_weights:
        return lambda ema, params, updates: ema

    def average(ema: Params, params: Params, updates: Int[Array, ""]) -> Params:
        params = split(params, frozen)[1]
        rate: Array | float = 1 - train.ema_decay
        is_start = updates <= train.ema_start
        if train.ema_start:
            rate = jnp.where(is_start, 1.0, rate)
        mean = optax.incremental_update(_float32(params), _float32(ema), rate)
        mean = _stored(mean, train, updates)
        if train.ema_interval == 1:
            return mean
        is_due = (updates % train.ema_interval == 0) | is_start
        return jax.tree.map(lambda new, old: jnp.where(is_due, new, old), mean, ema)

    return average


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def _stored(mean: Params, train: TrainConfig, updates: Int[Array, ""]) -> Params:
    """Return the average in its storage dtype."""
    if train.ema_dtype == "float32":
        return mean

    def round_leaf(path: jax.tree_util.KeyPath, x: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        key = draw_key(train.seed, f"ema/{name}", updates)
        return stochastic_round(x, random_words(key, x.shape))

    return jax.tree_util.tree_map_with_path(round_leaf, mean)
