"""`[checkpoint]`: contents and times of checkpoints, and the checkpoint to start from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import NonNegativeInt

from jaxforge.config.duration import Every, PositiveSteps, Steps
from jaxforge.config.eval import Mode
from jaxforge.config.section import (
    AnyPath,
    BucketPath,
    DiskPath,
    Flag,
    Interval,
    MemoryPath,
    Needs,
    Requires,
    Section,
)


class DynCkptWindow(Section):
    """`[checkpoint.dyn_ckpt_window]`: a range of steps with more frequent checkpoints.

    Within it, checkpoints are saved at start and at start + 1, 2, 4, 8 ..., and at no other step.
    """

    start: Steps = 0
    """First step of the window; 0 saves the initial weights."""
    stop: Steps = 512
    """Last step of the window."""

    def _problems(self) -> Iterator[str]:
        if self.stop < self.start:
            yield f"stop = {self.stop} must be at least start = {self.start}"


class Branch(NamedTuple):
    """Checkpoint of another run from which a run branches off.

    Attributes:
        run: path or URL of the other run.
        step: step of the checkpoint; None: the newest.
    """

    run: str
    step: int | None

    def __str__(self) -> str:
        return f"{self.run}@{_LATEST if self.step is None else self.step}"

    @classmethod
    def parse(cls, text: str) -> "Branch | None":
        """Return the branch of "RUN@STEP" or "RUN@latest"; None for other text."""
        run, _, step = text.rpartition("@")
        if not run or not (step == _LATEST or step.isdecimal()):
            return None
        return cls(run, None if step == _LATEST else int(step))


_LATEST = "latest"


class CheckpointConfig(Section):
    """Saving and loading."""

    dir: BucketPath = "checkpoints"
    """Directory of the run; if it contains a checkpoint, the run resumes from it."""
    interval: Annotated[PositiveSteps, Interval(is_reported=False)] = 1000
    """Updates between checkpoints."""
    epoch_interval: NonNegativeInt = 0
    """Epochs of the data between additional checkpoints, at their ends; 0 disables them."""
    dyn_ckpt_window: DynCkptWindow | None = None
    """Additional checkpoints in a range of steps, which keep_last_n does not remove."""
    non_persistent_interval: Annotated[Every, Requires("non_persistent_dir"), Flag.SIDE_EFFECT] = 0
    """Updates between additional checkpoints in non_persistent_dir; 0 disables them."""
    non_persistent_dir: Annotated[
        DiskPath | None, Needs("non_persistent_interval"), Flag.SIDE_EFFECT, Flag.PER_HOST
    ] = None
    """Fast disk of the node, shared by all its processes, for temporary checkpoints."""
    replica_interval: Annotated[Every, Flag.SIDE_EFFECT] = 0
    """Updates between copies of the state in memory of this host and of a peer; 0 disables them."""
    replica_dir: Annotated[
        MemoryPath | None, Needs("replica_interval"), Flag.SIDE_EFFECT, Flag.PER_HOST
    ] = None
    """Directory in memory (tmpfs) for these copies; by default /dev/shm."""
    async_mode: Literal["disabled", "async"] = "async"
    """Save in the background while training continues, or block until the save is complete."""
    keep_last_n: int = 3
    """Number of newest checkpoints to keep; 0 or less keeps all."""
    keep_best_n: NonNegativeInt = 0
    """Number of checkpoints with the best best_metric to keep in addition; 0 keeps none."""
    best_metric: Annotated[str, Needs("keep_best_n")] = "eval/loss"
    """Metric for keep_best_n, such as eval/loss, eval/<set>/loss or eval/tasks/<task>/acc."""
    best_mode: Annotated[Mode, Needs("keep_best_n")] = "auto"
    """Direction of best_metric: lower ("min") or higher ("max") is better; by default its own."""
    load_path: AnyPath | None = None
    """Checkpoint to start from if dir contains none."""
    branch_from: BucketPath | None = None
    """RUN@STEP or RUN@latest: the full state to start from if dir has no checkpoint."""
    export_interval: Annotated[NonNegativeInt, Flag.SIDE_EFFECT] = 0
    """Export every n-th checkpoint for inference to exports/ in the run; 0 disables exports."""
    export_last: Annotated[bool, Flag.SIDE_EFFECT] = False
    """Export the last checkpoint for inference when training ends."""
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of exported weights."""
    export_weights: Literal["raw", "ema"] = "raw"
    """Exported weights: the parameters, or their average (train.ema_decay)."""
    exclude_from_loading: tuple[Literal["model", "optimizer", "progress", "indexer"], ...] = ()
    """Parts of load_path that are not loaded. Without "model", weights are new. Without "indexer",
    which load_path must lack, indexers and the state of the optimizer are new."""

    def _problems(self) -> Iterator[str]:
        if self.branch_from is not None:
            yield from self._branch_problems(self.branch_from)

    def _branch_problems(self, text: str) -> Iterator[str]:
        branch = Branch.parse(text)
        if branch is None:
            yield f'branch_from = "{text}" must be RUN@STEP or RUN@latest'
        # A run that branches off from itself would overwrite the checkpoint that it starts from.
        elif Path(branch.run).absolute() == Path(self.dir).absolute():
            yield f'branch_from = "{text}" is the run in dir itself: change dir to a new directory'
        if self.load_path is not None:
            yield "branch_from and load_path both name a start: remove one of them"
        if self.exclude_from_loading:
            yield (
                "exclude_from_loading does not apply to branch_from, which loads the full state: "
                "remove it, or use load_path"
            )

    @property
    def branch(self) -> Branch | None:
        """The checkpoint of another run from which the run branches off."""
        return None if self.branch_from is None else Branch.parse(self.branch_from)

    @property
    def start_path(self) -> str | None:
        """Path or URL of the checkpoint, or run, from which a new run starts; None: from none."""
        if self.branch is None:
            return self.load_path
        run, step = self.branch
        return run if step is None else f"{run.rstrip('/')}/checkpoints/step_{step}"
