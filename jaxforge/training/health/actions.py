"""What is done every so many steps, beside training: off unless a key asks for it.

    train.manual_gc_interval                              CollectGarbage
    train.train_sync_interval                             Synchronize
    train.nccl_health_check_interval                      collectives.CollectiveHealth
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
from jaxforge.state.train_state import TrainState
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.measures import describe_memory
from jaxforge.telemetry.tracker import HostTimes
from jaxforge.training.health.collectives import CollectiveHealth
from jaxforge.training.health.periodic_action import PeriodicAction
from jaxforge.training.health.stragglers import Stragglers
from jaxforge.training.health.weight_hash import WeightHashes

log = logging.getLogger(__name__)


class PeriodicActions:
    """The actions of a run, in order."""

    def __init__(self, actions: Sequence[PeriodicAction] = ()) -> None:
        self._actions = tuple(actions)

    def run(
        self,
        step: int,
        state: TrainState,
        between_steps: Callable[[], AbstractContextManager[None]],
    ) -> Exit | None:
        """Runs every action that is due; after the first reason to end the run, none.

        Args:
            step: steps attempted.
            state: the state after them.
            between_steps: waits for the steps that are launched, then keeps what happens inside
                out of their time.
        """
        for action in self._actions:
            if step % action.interval:
                continue
            with between_steps() if action.waits else contextlib.nullcontext():
                reason = action.run(step, state)
            if reason is not None:
                return reason
        return None

    def close(self) -> None:
        """Closes each."""
        for action in self._actions:
            action.close()


def open_actions(
    config: JobConfig,
    mesh: Mesh,
    host_times: Callable[[], HostTimes],
    compiled: jax.stages.Compiled | None = None,
    lock: RunLock | None = None,
) -> PeriodicActions:
    """The actions that a config asks for.

    Args:
        config: a validated config.
        mesh: the run's.
        host_times: `Tracker.host_times`.
        compiled: the step, for the report of what it takes.
        lock: of the run directory.
    """
    train, metrics = config.train, config.metrics
    actions: list[PeriodicAction] = [MemoryReport(compiled)]
    if lock:
        actions.append(StillOurs(lock))
    if train.manual_gc_interval:
        actions.append(CollectGarbage(train.manual_gc_interval))
    if train.train_sync_interval:
        actions.append(Synchronize(train.train_sync_interval))
    if train.nccl_health_check_interval:
        actions.append(CollectiveHealth(train, mesh))
    if train.check_weight_hash_across_dp_replicas_interval:
        actions.append(WeightHashes(train.check_weight_hash_across_dp_replicas_interval, mesh))
    if metrics.log_straggler:
        actions.append(Stragglers(metrics, host_times))
    return PeriodicActions(actions)


class StillOurs(PeriodicAction):
    """Ends a run whose directory another one has taken, before it overwrites anything there."""

    waits = False

    def __init__(self, lock: RunLock) -> None:
        super().__init__(interval=1)
        self._lock = lock

    def run(self, step: int, state: TrainState) -> Exit | None:
        """Ask the lock.

        Raises:
            StorageError: the run directory is gone.
            UserError: another job has the run directory now.
        """
        self._lock.check()
        return None


class Synchronize(PeriodicAction):
    """Waits for the devices, so that the host is never further ahead than this interval."""

    def run(self, step: int, state: TrainState) -> Exit | None:
        """Returns when the state is there."""
        jax.block_until_ready(state)
        return None


class CollectGarbage(PeriodicAction):
    """Collects when told and at no other time, so that no host pauses while the others wait for it.

    It does so while the devices are at work. What is alive when it first runs stays for the whole
    run, and is not looked at again. Source: Megatron's `manual_gc`, torchtitan's `gc_freq`.
    """

    waits = False

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self._frozen, self._was_enabled = False, gc.isenabled()
        gc.disable()

    def run(self, step: int, state: TrainState) -> Exit | None:
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


class MemoryReport(PeriodicAction):
    """Says once, after this process's first step, what takes the memory of its devices.

    Args:
        compiled: the step.
    """

    waits = False

    def __init__(self, compiled: jax.stages.Compiled | None) -> None:
        super().__init__(interval=1)
        self._compiled, self._told = compiled, False

    def run(self, step: int, state: TrainState) -> Exit | None:
        """Waits for the first step, and reports."""
        if not self._told:
            self._told = True
            jax.block_until_ready(state)
            if text := describe_memory(jax.local_devices(), self._compiled):
                log.info("[Rank %d] (after %d iterations) %s", jax.process_index(), step, text)
        return None
