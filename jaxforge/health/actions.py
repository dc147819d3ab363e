"""What looks after a run between its steps: each watch is off unless its key asks for it.

    train.manual_gc_interval                              CollectGarbage
    train.train_sync_interval                             Synchronize
    train.nccl_health_check_interval                      health.CollectiveHealth
    train.check_weight_hash_across_dp_replicas_interval   weight_hash.WeightHashes
    metrics.log_straggler                                 stragglers.Stragglers
    always, where the devices tell                        MemoryReport
    always                                                StillOurs

Those that talk to other processes are due at the same steps on all of them, in this order.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import jax
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.health.collectives import CollectiveHealth
from jaxforge.health.periodic_action import Watch
from jaxforge.health.stragglers import Stragglers
from jaxforge.health.weight_hash import WeightHashes
from jaxforge.run_lock import RunLock
from jaxforge.state.train_state import TrainState
from jaxforge.telemetry.measures import describe_memory
from jaxforge.telemetry.tracker import HostTimes

log = logging.getLogger(__name__)


class Watches:
    """The watches of a run, in order."""

    def __init__(self, watches: Sequence[Watch] = ()) -> None:
        self._watches = tuple(watches)

    def look(
        self,
        step: int,
        state: TrainState,
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> Exit | None:
        """Lets every watch look that is due; the first reason to end the run ends the looking.

        Args:
            step: steps attempted.
            state: the state after them.
            between_steps: waits for the steps that are launched, then keeps what happens inside
                out of their time.
        """
        for watch in self._watches:
            if step % watch.interval:
                continue
            with between_steps() if watch.waits else contextlib.nullcontext():
                reason = watch.look(step, state)
            if reason is not None:
                return reason
        return None

    def close(self) -> None:
        """Closes each."""
        for watch in self._watches:
            watch.close()


def open_watches(
    config: JobConfig,
    mesh: Mesh,
    host_times: Callable[[], HostTimes],
    compiled: jax.stages.Compiled | None = None,
    lock: RunLock | None = None,
) -> Watches:
    """The watches that a config asks for.

    Args:
        config: a validated config.
        mesh: the run's.
        host_times: `Tracker.host_times`.
        compiled: the step, for the report of what it takes.
        lock: of the run directory.
    """
    train, metrics = config.train, config.metrics
    watches: list[Watch] = [MemoryReport(compiled)]
    if lock:
        watches.append(StillOurs(lock))
    if train.manual_gc_interval:
        watches.append(CollectGarbage(train.manual_gc_interval))
    if train.train_sync_interval:
        watches.append(Synchronize(train.train_sync_interval))
    if train.nccl_health_check_interval:
        watches.append(CollectiveHealth(train, mesh))
    if train.check_weight_hash_across_dp_replicas_interval:
        watches.append(WeightHashes(train.check_weight_hash_across_dp_replicas_interval, mesh))
    if metrics.log_straggler:
        watches.append(Stragglers(metrics, host_times))
    return Watches(watches)


class StillOurs(Watch):
    """Ends a run whose directory another one has taken, before it overwrites anything there."""

    waits = False

    def __init__(self, lock: RunLock) -> None:
        super().__init__(interval=1)
        self._lock = lock

    def look(self, step: int, state: TrainState) -> Exit | None:
        """Asks the lock, which knows without looking.

        Raises:
            UserError: another job has the run directory now.
        """
        self._lock.check()
        return None


class Synchronize(Watch):
    """Waits for the devices, so that the host is never further ahead than this interval."""

    def look(self, step: int, state: TrainState) -> Exit | None:
        """Returns when the state is there."""
        jax.block_until_ready(state)
        return None


class CollectGarbage(Watch):
    """Collects when told and at no other time, so that no host pauses while the others wait for it.

    It does so while the devices are at work. What is alive when it first looks stays for the whole
    run, and is not looked at again. Source: Megatron's `manual_gc`, torchtitan's `gc_freq`.
    """

    waits = False

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self._frozen, self._was_enabled = False, gc.isenabled()
        gc.disable()

    def look(self, step: int, state: TrainState) -> Exit | None:
        """Collects."""
        gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
        return None

    def close(self) -> None:
        """Leaves it to Python again."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


@contextlib.contextmanager
def collecting_garbage(config: JobConfig) -> Iterator[None]:
    """Around an evaluation, where garbage is collected by hand: before it, and what it leaves."""
    by_hand = config.train.manual_gc_interval > 0
    if by_hand:
        gc.collect()
    yield
    if by_hand:
        gc.collect(0)


class MemoryReport(Watch):
    """Says once, after this process's first step, what takes the memory of its devices.

    Args:
        compiled: the step.
    """

    waits = False

    def __init__(self, compiled: jax.stages.Compiled | None) -> None:
        super().__init__(interval=1)
        self._compiled, self._told = compiled, False

    def look(self, step: int, state: TrainState) -> Exit | None:
        """Waits for the first step, and reports."""
        if not self._told:
            self._told = True
            jax.block_until_ready(state)
            if text := describe_memory(jax.local_devices(), self._compiled):
                log.info("[Rank %d] (after %d iterations) %s", jax.process_index(), step, text)
        return None
