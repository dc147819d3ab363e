"""Low-rank adapters of linear layers (LoRA, arXiv:2106.09685).

    y = x Wᵀ + b + s · dropout(x) Aᵀ Bᵀ       A [r, in], B [out, r], s = alpha / r

W and b are frozen (`optim.freezing`). Elements are dropped in training steps only
(`model.dropout`). As in PEFT, A is initially uniform with bound 1/√in and B is zero, so that
training begins with the model of W. Adapters are stored in float32 whatever the dtype of W is. A is
split over devices like the input dimension of W, and B like its output dimension.
"""

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, UInt32

from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.dropout import Dropout
from jaxforge.model.experts import ExpertLinear
from jaxforge.model.linear import Declare, Linear, fan_in_uniform


def attach(module: nnx.Module, config: ModelConfig, lora: LoraConfig, declare: Declare) -> None:
    """Declare the adapters of a declared model, after all of its other parameters.

    Args:
        module: the model.
        config: its section of the config.
        lora: the `[lora]` section.
        declare: declares the parameters.

    Raises:
        UserError: a pattern of `lora.targets` matches no linear layer, or only experts.
    """
    layers = dict(_linear_layers(module, config))
    _check_targets(lora, layers)
    for name, linear in layers.items():
        if isinstance(linear, ExpertLinear) or not lora.adapts(name):
            continue
        rows = config.stacks[name.partition(".")[0]]
        stacked = declare._replace(layers=len(rows), dtype=jnp.dtype(jnp.float32))
        (out, inp), (out_axis, inp_axis) = linear.weight.shape[-2:], linear.axes
        linear.lora_a = stacked((lora.rank, inp), (None, inp_axis), fan_in_uniform)
        linear.lora_b = stacked((out, lora.rank), (out_axis, None), jax.nn.initializers.zeros)
        linear.lora_scale = lora.scale
        if lora.dropout:
            linear.lora_dropout = Dropout(lora.dropout, zlib.crc32(name.encode()))


def set_mask_keys(block: nnx.Module, keys: UInt32[Array, "b s"]) -> None:
    """Set the layer keys of a block's adapters for a training step."""
    for _, linear in nnx.iter_modules(block):
        if isinstance(linear, Linear) and linear.lora_dropout is not None:
            linear.mask_keys = keys


def _linear_layers(
    module: nnx.Module, config: ModelConfig
) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yield the linear layers of all stacks by name, such as "layers.attention.q_proj"."""
    for stack in config.stacks:
        for path, linear in nnx.iter_modules(getattr(module, stack)):
            if isinstance(linear, Linear | ExpertLinear):
                yield ".".join((stack, *map(str, path))), linear


def _check_targets(lora: LoraConfig, layers: dict[str, Linear | ExpertLinear]) -> None:
    for pattern in lora.targets:
        only = lora.with_values({"targets": (pattern,)})
        matches = [layer for name, layer in layers.items() if only.adapts(name)]
        if matches and all(isinstance(layer, ExpertLinear) for layer in matches):
            raise UserError(
                f'lora.targets: "{pattern}" matches experts only, which cannot be adapted. Target '
                'attention or the shared expert, such as "attention"'
            )
        if not matches:
            names = ", ".join(n for n, x in layers.items() if isinstance(x, Linear))
            raise UserError(
                f'lora.targets: "{pattern}" matches no linear layer. Linear layers are {names}'
            )
    if all(isinstance(layer, ExpertLinear) for layer in layers.values()):
        raise UserError("lora.rank: the model has no linear layer that can be adapted")
