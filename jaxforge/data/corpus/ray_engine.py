"""Execution of units of work on a Ray cluster.

    driver: units ─► a task each, as many at a time as the cluster has room for ─► parts
            task lost (worker or node died, memory) ─► the unit again, up to ten times
            unit failed (bad record, ...)           ─► the run ends with its message

A task returns a small `Part`: the shards are written by the workers. So a lost node loses nothing
of the units that are finished.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.parts import Part
from jaxforge.data.corpus.unit_worker import Job, Show, prepare_unit
from jaxforge.data.corpus.units import Unit
from jaxforge.data.corpus.workers import answer
from jaxforge.errors import StorageError, UserError

log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_ATTEMPTS = 10
"""Number of times that a unit may be lost. More than one may be lost by no fault of its own."""

_BACKLOG = 2  # units submitted per CPU, so that none idles while a result travels
_POLL_SECONDS = 10.0  # after which a cluster that has grown is noticed


def on_ray(
    job: Job, units: Sequence[Unit], show: Show, *, address: str, workers: int | None
) -> Iterator[Part]:
    """Prepare units on a Ray cluster; an `Engine` with `address` and `workers` bound.

    Args:
        job: see `Job`.
        units: the units.
        show: not called: progress is that of whole units.
        address: of the cluster, or "auto".
        workers: largest number of units at a time; None for as many as the cluster can run.

    Raises:
        UserError: Ray is not installed, the cluster cannot be reached, a unit fails, or its
            processes are lost again and again.
        StorageError: the bucket of the output fails again and again.
    """
    ray = library("ray", "--engine ray", extra="ray")
    with _connected(ray, address):
        task = ray.remote(num_cpus=1, max_retries=0)(run_task)
        shared = ray.put(job)  # once for each node
        remaining, running = deque(units), dict[Any, Unit]()
        lost = Counter[int]()
        try:
            while remaining or running:
                limit = workers or _BACKLOG * int(ray.cluster_resources().get("CPU", 1))
                while remaining and len(running) < limit:
                    unit = remaining.popleft()
                    running[task.remote(shared, unit)] = unit
                done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                for reference in done:
                    unit = running.pop(reference)
                    part = _result(ray, reference, unit, lost)
                    if part is None:
                        remaining.append(unit)
                    else:
                        yield part
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def map_on_ray(
    function: Callable[[_Item], _Result], items: Sequence[_Item], *, address: str
) -> Iterator[_Result]:
    """Yield `function(item)` of each item, in order; a `RunUnits` with `address` bound.

    Args:
        function: a function that may be repeated.
        items: its arguments.
        address: see `on_ray`.

    Raises:
        UserError: as `on_ray`.
    """
    ray = library("ray", "--engine ray", extra="ray")
    with _connected(ray, address):
        task = ray.remote(num_cpus=1, max_retries=_ATTEMPTS)(answer)
        shared = ray.put(function)
        limit = _BACKLOG * int(ray.cluster_resources().get("CPU", 1))
        running: deque[Any] = deque()
        remaining = iter(items)
        while True:
            items_to_start = islice(remaining, limit - len(running))
            running.extend(task.remote(shared, item) for item in items_to_start)
            if not running:
                return
            try:
                result = ray.get(running.popleft())
            except ray.exceptions.RayTaskError:  # a bug: its traceback is the message
                raise
            except ray.exceptions.RayError as error:
                raise UserError(f"a process was lost {_ATTEMPTS} times ({_gist(error)})") from error
            if isinstance(result, UserError | StorageError):
                raise result
            yield result


def run_task(job: Job, unit: Unit) -> Part | UserError | StorageError:
    """Prepare a unit, or return its error: Ray would wrap one that is raised."""
    return answer(prepare_unit, job, unit)


def _result(
    ray: ModuleType,
    reference: Any,  # noqa: ANN401
    unit: Unit,
    lost: Counter[int],
) -> Part | None:
    """Return the part of a unit; None if its process was lost, and the unit has to be repeated."""
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError:  # a bug: its traceback is the message
        raise
    except ray.exceptions.RayError as error:
        result = UserError(
            f"{unit.where}: the process was lost {_ATTEMPTS} times ({_gist(error)}). If the "
            "cause is memory, give each process more, or lower --unit-bytes"
        )
        reason = _gist(error)
    else:
        if isinstance(result, UserError):
            raise result
        if isinstance(result, Part):
            return result
        reason = str(result)  # of a StorageError, after many requests
    lost[unit.number] += 1
    if lost[unit.number] >= _ATTEMPTS:
        raise result
    log.warning("unit %d (%s) is repeated: %s", unit.number, unit.where, reason)
    return None


def _gist(error: Exception) -> str:
    """Return the first line of an error of Ray."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.200}"


@contextmanager
def _connected(ray: ModuleType, address: str) -> Iterator[None]:
    """Connect to the cluster, unless this process is connected."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster at --address {address} ({_gist(error)}). Start one with `ray start "
            "--head` and `ray start --address HOST:6379` on the other machines, or use --engine "
            "local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
