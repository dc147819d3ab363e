"""Check of the lock of the run directory after each step."""

from jaxforge.storage.run_lock import RunLock
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts


class DirectoryLock(RunCallback):
    """Ends a run whose directory another job has locked, before it overwrites files there.

    Args:
        lock: the lock of the run directory.
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
            UserError: another job holds the lock.
        """
        self._lock.check()
