"""`[checkpoint]`: contents and times of checkpoints, and the checkpoint to start from."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt

from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.section import PathText, Section


class DynCkptWindow(Section):
    """`[checkpoint.dyn_ckpt_window]`: a range of steps with more frequent checkpoints."""

    start: Steps = 0
    """First step of the window; 0 saves the initial weights."""
    stop: Steps = 512
    """Last step of the window."""
    strategy: Literal["power2"] = "power2"
    """power2 saves at start and at start + 1, 2, 4, 8 ..., and at no other step of the window."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this table."""
        if self.stop < self.start:
            yield f"stop = {self.stop} must be at least start = {self.start}"


class CheckpointConfig(Section):
    """Saving and loading."""

    dir: PathText = "checkpoints"
    """Directory of the run; if it contains a checkpoint, the run resumes from it."""
    interval: PositiveSteps = 1000
    """Updates between checkpoints."""
    dyn_ckpt_window: DynCkptWindow | None = None
    """Additional checkpoints in a range of steps, which keep_last_n does not remove."""
    non_persistent_interval: NonNegativeInt = 0
    """Updates between additional checkpoints in non_persistent_dir; 0 disables them."""
    non_persistent_dir: PathText | None = None
    """Fast disk of the node, shared by all its processes, for temporary checkpoints."""
    replica_interval: NonNegativeInt = 0
    """Updates between copies of the state in memory of this host and of a peer; 0 disables them."""
    replica_dir: PathText | None = None
    """Directory in memory (tmpfs) for these copies; by default /dev/shm."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """Save in the background while training continues, or block until the save is complete."""
    keep_last_n: int = 3
    """Number of newest checkpoints to keep; 0 or less keeps all."""
    keep_best_n: NonNegativeInt = 0
    """Number of checkpoints with the lowest best_metric to keep in addition; 0 keeps none."""
    best_metric: str = "eval/loss"
    """Metric for keep_best_n, lower is better, such as eval/loss or eval/<set>/loss."""
    load_path: PathText | None = None
    """Checkpoint to start from if dir contains none."""
    export_interval: NonNegativeInt = 0
    """Export every n-th checkpoint for inference to exports/ in the run; 0 disables exports."""
    export_last: bool = False
    """Export the last checkpoint for inference when training ends."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of exported weights."""
    export_weights: Literal["raw", "ema"] = "raw"
    """Exported weights: the parameters, or their average (train.ema_decay)."""
    exclude_from_loading: tuple[Literal["model", "optimizer", "progress"], ...] = ()
    """Parts of load_path that are not loaded. Without "model", weights are new."""
    ignore_freeze_mismatch: bool = False
    """Without effect: text models have no frozen parameters."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this section."""
        if self.non_persistent_interval and not self.non_persistent_dir:
            yield "non_persistent_interval requires non_persistent_dir"
