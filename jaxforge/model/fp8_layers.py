"""Selection of linear layers that multiply in 8 bits, and the amax history of their scales.

Embedding, output head (its product is part of the loss), norms and routers never multiply in 8
bits. By default neither do experts, as in KempnerForge, nor the first and the last layer, as with
Megatron-LM's `--first-last-layers-bf16`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.aux_outputs import Max
from jaxforge.config.model import AMAX_HISTORIES, ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.kernels import fp8
from jaxforge.model.experts import ExpertLinear
from jaxforge.model.linear import Declare, Linear
from jaxforge.model.plan import LayerPlan
from jaxforge.parallel.stages import Stack

Params = dict[str, Any]
"""Nested dicts of arrays, as in `model.transformer`."""


_ADA = (8, 9)  # the first compute capability with products in 8 bits


class Recipe(NamedTuple):
    """Settings of 8-bit products from `[train]`; attributes are the keys without "fp8_"."""

    scaling: str
    amax_history_len: int
    exclude: tuple[str, ...]
    at_start: int
    at_end: int

    @classmethod
    def of(cls, train: TrainConfig) -> "Recipe | None":
        """Return the recipe of a `[train]` section, or None if it does not multiply in 8 bits."""
        if train.mixed_precision != "fp8":
            return None
        return cls(
            train.fp8_scaling,
            train.fp8_amax_history_len,
            train.fp8_exclude,
            train.num_layers_at_start_in_bf16,
            train.num_layers_at_end_in_bf16,
        )


def mark_bf16_layers(plan: LayerPlan, recipe: Recipe) -> LayerPlan:
    """Return the plan with the layers marked that stay in bf16; unchanged if none does."""
    n = len(plan.layers)
    if not (recipe.at_start or recipe.at_end):
        return plan
    in_bf16 = [i < recipe.at_start or i >= n - recipe.at_end for i in range(n)]
    layers = zip(plan.layers, in_bf16, strict=True)
    return plan._replace(layers=tuple(kind._replace(in_bf16=bf16) for kind, bf16 in layers))


def convert(module: nnx.Module, config: ModelConfig, recipe: Recipe, declare: Declare) -> None:
    """Set the linear layers of a declared model to 8 bits, and list their names in its blocks."""
    names: dict[str, None] = {}
    for stack, rows in config.stacks.items():
        for path, linear in nnx.iter_modules(getattr(module, stack)):
            name = ".".join(map(str, path))
            if isinstance(linear, ExpertLinear):
                linear.in_8_bits = not _is_excluded(f"{stack}.{name}", recipe)
            if not isinstance(linear, Linear) or _is_excluded(f"{stack}.{name}", recipe):
                continue
            names[name] = None
            sums, regathers, _ = linear.backward
            linear.fp8 = fp8.Fp8(name, recipe.scaling, linear.axes, sums, regathers)
            if recipe.scaling == "delayed":
                stacked = declare._replace(layers=len(rows))
                for history in AMAX_HISTORIES:
                    zeros = stacked.untrained(
                        (recipe.amax_history_len,), (None,), jax.nn.initializers.zeros
                    )
                    setattr(linear, history, zeros)
    for stack in config.stacks:
        block = getattr(module, stack)
        block.fp8_names, block.records_amax = tuple(names), recipe.scaling == "delayed"


def _is_excluded(name: str, recipe: Recipe) -> bool:
    return any(part in name for part in recipe.exclude)


def describe_products(recipe: Recipe, platform: str, capability: str | None, kind: str) -> str:
    """Return a description of how a platform computes products in 8 bits, for the log.

    Args:
        recipe: the recipe of the run.
        platform: "cpu", "gpu" or "tpu".
        capability: compute capability of a GPU; None: unknown.
        kind: JAX's `device_kind`.

    Raises:
        UserError: the GPU does not support the 8-bit formats.
    """
    if platform == "gpu" and capability and tuple(map(int, capability.split("."))) < _ADA:
        raise UserError(
            f'train.mixed_precision = "fp8" needs GPUs that multiply in 8 bits, of compute '
            f'capability 8.9 or more (Ada, Hopper, Blackwell), not {capability}: use "bf16"'
        )
    scales = f"fp8, scaled by {recipe.scaling}"
    if recipe.scaling == "block":
        return f"{scales}; rounded to 8 bits, multiplied in bf16"
    if platform == "gpu" or (platform == "tpu" and "7" in kind):
        return f"{scales}; multiplied in 8 bits"
    return f"{scales}; emulated: this device does not multiply in 8 bits"


def next_histories(
    config: ModelConfig, state: Params, amax: dict[str, Max], order: Stack
) -> Params:
    """Return the amax histories after an update, newest first; the oldest entry is dropped.

    An amax that is not finite is stored as 0. It would otherwise dominate the maximum until it
    leaves the history.

    Args:
        config: the model.
        state: non-trainable state before the update.
        amax: amax of x and W, [layers, 2], by name of the linear layer.
        order: order of the layers in `amax`.
    """
    arrays = flatten_dict(state)
    for stack in config.stacks:
        for name, (by_row,) in amax.items():
            rows = order.rows_of_stack(stack, by_row)
            for i, history in enumerate(AMAX_HISTORIES):
                path = (stack, *name.split("."), history)
                if path in arrays:
                    newest = jnp.where(jnp.isfinite(row := rows[:, i]), row, 0.0)[:, None]
                    arrays[path] = jnp.concatenate([newest, arrays[path][:, :-1]], axis=1)
    return unflatten_dict(arrays)
