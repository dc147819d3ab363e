"""What the backward pass recomputes: `train.activation_checkpointing`.

none        everything is saved
full        only the input of each block is saved
selective   everything but the inside of attention is saved
<name>      that policy of `jax.checkpoint_policies` decides inside each block

A loop over layers keeps the compiler from reusing what the forward pass has computed, which would
save it after all: no barriers are needed (`prevent_cse`), and no layers may be unrolled.
"""

from collections.abc import Callable
from typing import Any

import jax


def block(save: str, layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the body of the scan over layers."""
    if save in ("none", "selective"):
        return layer
    policy = None if save == "full" else getattr(jax.checkpoint_policies, save)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def attention(save: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the attention module of one block."""
    return jax.checkpoint(attend, prevent_cse=False) if save == "selective" else attend
