"""Rematerialisation of the backward pass (`train.activation_checkpointing`).

none        everything is saved
full        only the input of each block is saved
selective   everything but the inside of attention is saved
<name>      that policy of `jax.checkpoint_policies` decides inside each block

Between the forward and the backward of a pipeline stage, a ring holds what is saved:

full        the input of the stage. In the backward its blocks run again, once: their matrix
            products are then saved, for this one microbatch
selective   the matrix products, except those inside of attention
none        all matrix products; what is between them is computed again
<name>      what that policy saves

There, everything is a policy's choice, since only a policy leaves the weights out of what is saved.

With "activations" in `train.offload`, what blocks save waits in the memory of the host: their
inputs (full), or their matrix products (dots_with_no_batch_dims_saveable).

A loop over layers keeps the compiler from reusing what the forward pass has computed, which would
save it after all: no barriers are needed (`prevent_cse`), and no layers may be unrolled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

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
    """Return whether the backward pass recomputes all or a part of each block."""
    return save not in ("none", "selective", "everything_saveable")


def block(
    save: str, layer: Callable[..., Any], *, in_loop: bool = True, offload: bool = False
) -> Callable[..., Any]:
    """Rematerialize a layer `(x, ...) -> ...`, in a scan over layers or outside of any loop."""
    if not recomputes(save):
        return layer
    if offload:
        policy = _OFFLOADING[save]
    else:
        policy = None if save == "full" else getattr(jax.checkpoint_policies, save)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def name_input(x: Array) -> Array:
    """Name the input of a block, for the policy that offloads it."""
    return checkpoint_name(x, _INPUT)


def attention(save: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the attention module of one block."""
    return jax.checkpoint(attend, prevent_cse=False) if save == "selective" else attend


class InPipeline(NamedTuple):
    """Values that a pipeline stage saves.

    Attributes:
        save: for `block`, inside the stage.
        saves_residuals: whether that is held from the forward on; else the input of the stage is.
    """

    save: str
    saves_residuals: bool


def in_pipeline(save: str) -> InPipeline:
    """Return what a stage saves for its backward under `train.activation_checkpointing`."""
    if save == "full":
        return InPipeline(_PRODUCTS_BUT_ATTENTION, saves_residuals=False)
    names = {"none": _PRODUCTS, "selective": _PRODUCTS_BUT_ATTENTION}
    return InPipeline(names.get(save, save), saves_residuals=True)
