"""Rematerialization in the backward pass (`train.activation_checkpointing`).

    none        everything is saved except the results of elementwise operations
    full        only the input of each block is saved
    selective   everything except the inside of attention is saved
    <name>      a policy of `jax.checkpoint_policies` selects what each block saves

Pipeline stages keep the saved values of several microbatches in a ring buffer:

    full        the input of the stage. The backward pass runs the blocks of the stage once more,
                and saves their matrix products for that one microbatch
    selective   the matrix products, except those inside of attention
    none        all matrix products; operations between products are recomputed
    <name>      the values that the policy selects

Stages always use a policy, because only a policy excludes the weights from the saved values.

With "activations" in `train.offload`, the saved values of blocks wait in host memory: the inputs of
blocks (full), or their matrix products (dots_with_no_batch_dims_saveable).

In a loop over layers, the compiler cannot reuse values of the forward pass, which would save them
after all. So loops need no barriers (`prevent_cse`), unrolled layers do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

_ELEMENTWISE = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "concatenate",
        "convert_element_type", "cos", "div", "eq", "erf", "exp", "exp2", "ge", "gt", "integer_pow",
        "iota", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not",
        "or", "pow", "reduce_max", "reduce_sum", "reshape", "rsqrt", "select_n",
        "sharding_constraint", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze", "sub",
        "tanh", "transpose",
    }
)  # fmt: skip
"""Primitives whose results cost less to compute again than to write and read: norms, rotary
positions, activations, residual sums and casts are made of these."""
_PRODUCTS = "dots_saveable"
_PRODUCTS_BUT_ATTENTION = "dots_with_no_batch_dims_saveable"
_INPUT = "block_input"
_TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
_OFFLOADING = {
    "full": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT], **_TO_HOST
    ),
    _PRODUCTS_BUT_ATTENTION: jax.checkpoint_policies.offload_dot_with_no_batch_dims(**_TO_HOST),
}


def recomputes(save: str) -> bool:
    """Return whether the backward pass computes matrix products of each block again."""
    return save not in ("none", "selective", "everything_saveable")


def _saves_products(primitive: Any, *_: Any, **__: Any) -> bool:  # noqa: ANN401
    """Save all but elementwise results, as a policy of `jax.checkpoint`."""
    return primitive.name not in _ELEMENTWISE


def block(
    save: str, layer: Callable[..., Any], *, in_loop: bool = True, offload: bool = False
) -> Callable[..., Any]:
    """Rematerialize a layer `(x, ...) -> ...`, in a scan over layers or outside of any loop."""
    if save in ("selective", "everything_saveable"):
        return layer
    if offload:
        policy = _OFFLOADING[save]
    elif save == "none":
        policy = _saves_products
    else:
        policy = None if save == "full" else getattr(jax.checkpoint_policies, save)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def name_input(x: Array) -> Array:
    """Name the input of a block, for the policy that offloads it."""
    return checkpoint_name(x, _INPUT)


def attention(save: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Rematerialize the attention module of a block, if `save` is "selective"."""
    return jax.checkpoint(attend, prevent_cse=False) if save == "selective" else attend


class StageRemat(NamedTuple):
    """Values that a pipeline stage saves.

    Attributes:
        save: argument of `block` inside the stage.
        saves_residuals: whether the forward pass stores these values; otherwise it stores the input
            of the stage.
    """

    save: str
    saves_residuals: bool


def stage_remat(save: str) -> StageRemat:
    """Return the values that a stage saves under `train.activation_checkpointing`."""
    if save == "full":
        return StageRemat(_PRODUCTS_BUT_ATTENTION, saves_residuals=False)
    names = {"none": _PRODUCTS, "selective": _PRODUCTS_BUT_ATTENTION}
    return StageRemat(names.get(save, save), saves_residuals=True)
