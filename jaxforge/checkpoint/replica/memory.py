"""Host memory that replicas need."""

import jax

from jaxforge.checkpoint.layout import to_tree
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.state.train_state import TrainState


def describe_memory(config: CheckpointConfig, state: TrainState) -> str:
    """Describe the memory of replicas; empty without them.

    The newest two steps are kept, each also by a peer, and another one during its copy.

    Args:
        config: the `[checkpoint]` section.
        state: the state, or its abstract values.
    """
    if not config.replica_interval:
        return ""
    leaves = jax.tree.leaves(to_tree(state))  # without the base of adapters
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return (
        f"every {config.replica_interval:,} steps, 4 copies of the state (2 in a single process) "
        f"and 1 more during a save, {gigabytes(size)} each, divided among the hosts"
    )
