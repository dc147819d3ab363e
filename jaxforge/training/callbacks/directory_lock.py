"""A check of the run directory's lock after each step."""

from jaxforge.storage.run_lock import RunLock
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts


class DirectoryLock(RunCallback):
    """Ends a run whose directory another job has taken, before it overwrites anything there.

    Args:
        lock: of the run directory.
    """

    every = 1
    waits = False

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock

    @classmethod
    def of_run(cls, run: RunParts) -> "DirectoryLock":
        """Return the callback of every run."""
        return cls(run.lock)

    def on_interval(self, context: IntervalContext) -> None:
        """Check the lock.

        Raises:
            StorageError: the run directory is gone.
            UserError: another job has the run directory now.
        """
        self._lock.check()
