"""`[checkpoint]`: what is saved, when, and where a run starts."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt

from jaxforge.config.duration import PositiveSteps, Steps
from jaxforge.config.section import PathText, Section


class DynCkptWindow(Section):
    """`[checkpoint.dyn_ckpt_window]`: a span of steps with its own, denser saving."""

    start: Steps = 0
    """First step of the window; 0 saves the initial weights."""
    stop: Steps = 512
    """Last step of the window."""
    strategy: Literal["power2"] = "power2"
    """power2 saves at start and at start + 1, 2, 4, 8 ..., and nowhere else in the window."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this table."""
        if self.stop < self.start:
            yield f"stop = {self.stop} must be at least start = {self.start}"


class CheckpointConfig(Section):
    """Saving and loading."""

    dir: PathText = "checkpoints"
    """Directory of the checkpoints; a run that finds one there continues from it."""
    interval: PositiveSteps = 1000
    """Updates between checkpoints."""
    dyn_ckpt_window: DynCkptWindow | None = None
    """Other checkpoints over a span of steps, which keep_last_n does not remove."""
    non_persistent_interval: NonNegativeInt = 0
    """Updates between checkpoints in non_persistent_dir, besides those that last; 0 makes none."""
    non_persistent_dir: PathText | None = None
    """A quick disk of the node, shared by all processes, for a checkpoint that need not last."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """Save while training goes on, or make it wait."""
    keep_last_n: int = 3
    """Newest checkpoints to keep; 0 or less keeps all."""
    keep_best_n: NonNegativeInt = 0
    """Checkpoints with the lowest best_metric to keep besides; 0 keeps none."""
    best_metric: str = "eval/loss"
    """Metric that keep_best_n goes by, lower is better, such as eval/loss or eval/<set>/loss."""
    load_path: PathText | None = None
    """Checkpoint to start from when dir has none."""
    export_interval: NonNegativeInt = 0
    """Export every n-th checkpoint for inference, to exports/ in the run; 0 exports none."""
    export_last: bool = False
    """Export the last checkpoint for inference when training ends."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of exported weights."""
    exclude_from_loading: tuple[Literal["optimizer", "progress"], ...] = ()
    """Parts of load_path not to load."""
    ignore_freeze_mismatch: bool = False
    """Without effect: models are text models, with nothing frozen."""

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.non_persistent_interval and not self.non_persistent_dir:
            yield "non_persistent_interval needs non_persistent_dir"
