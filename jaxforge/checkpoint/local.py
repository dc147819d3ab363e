"""Checkpoints on the local disk of a node: fast to write, frequent, and lost with the node.

They complement the persistent checkpoints (`checkpoint.interval`). If a process dies and its node
survives, only the steps since the last local checkpoint are lost. A run starts from the newer of
the two, and its last checkpoint is always persistent.
"""

import uuid
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import UserError
from jaxforge.parallel.stages import Stack


def open_local(
    config: CheckpointConfig, axes: PyTree, resolved_config: dict[str, Any], stack: Stack
) -> Checkpoints | None:
    """Open the checkpoints in `checkpoint.non_persistent_dir`; None if not configured.

    Only the newest one is retained.

    Raises:
        UserError: the directory cannot be written, or the processes do not share it.
    """
    if not config.non_persistent_interval:
        return None
    assert config.non_persistent_dir
    directory = Path(config.non_persistent_dir)
    _check_shared(directory)
    # Retention by metric or window is for permanent checkpoints.
    newest = {"keep_last_n": 1, "keep_best_n": 0, "dyn_ckpt_window": None}
    section = config.with_values(newest)
    return Checkpoints(directory, section, axes, resolved_config, stack=stack)


def _check_shared(directory: Path) -> None:
    """Check that all processes see the same directory: each one writes a part of the state."""
    # A new name for each start: a marker of an earlier job must not count.
    tag = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    tag = multihost_utils.broadcast_one_to_all(tag)
    marker = directory / f".seen_by_all_{tag.tobytes().hex()}"
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            raise UserError(
                f"checkpoint.non_persistent_dir: {directory}: {error.strerror}; name a directory "
                "that can be written"
            ) from error
    # No process looks before the marker exists, and it is removed only after all have looked.
    multihost_utils.sync_global_devices("a marker in checkpoint.non_persistent_dir")
    seen = multihost_utils.process_allgather(np.array(marker.exists()))
    if jax.process_index() == 0:
        marker.unlink()
    if not np.all(seen):
        raise UserError(
            f"checkpoint.non_persistent_dir = {directory} is not the same directory for all "
            f"{jax.process_count()} processes: name one that they share, or set "
            "checkpoint.non_persistent_interval = 0"
        )
