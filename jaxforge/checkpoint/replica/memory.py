"""Host memory that replicas need."""

import jax
from jaxtyping import PyTree

from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.parallel.device_memory import gigabytes


def describe_memory(config: CheckpointConfig, state: PyTree) -> str:
    """Describe the memory of replicas; empty without them.

    The newest two steps are kept, each also by a peer, and another one during its copy.

    Args:
        config: the `[checkpoint]` section.
        state: the state, or its abstract values.
    """
    if not config.replica_interval:
        return ""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return (
        f"every {config.replica_interval:,} steps, 4 copies of the state (2 in a single process) "
        f"and 1 more during a save, {gigabytes(size)} each, divided among the hosts"
    )
