"""Execution of units of work on a Ray cluster.

    driver: items ─► a task each, as many at a time as the cluster has room for ─► results
            task lost (worker or node died, memory) ─► the item again, up to ten times
            item failed (bad record, ...)           ─► the run ends with its message

A task returns a small result: the shards are written by the workers. So a lost node loses nothing
of the units that are finished.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.workers import Item, Result, Show, answer, ignore_news
from jaxforge.errors import StorageError, UserError

log = logging.getLogger(__name__)

_ATTEMPTS = 10
"""Number of times that an item may be lost. More than one may be lost by no fault of its own."""

_BACKLOG = 2  # items submitted per CPU, so that none idles while a result travels
_POLL_SECONDS = 10.0  # after which a cluster that has grown is noticed


@dataclass(frozen=True)
class Ray:
    """A Ray cluster (an `workers.Engine`).

    Attributes:
        address: of the cluster, or "auto".
        workers: largest number of items at a time; None for as many as the cluster can run.
    """

    address: str
    workers: int | None

    def encoders(self, n_items: int) -> int:
        """Return 1: a task has one CPU."""
        return 1

    def run(
        self, function: Callable[[Item, Show], Result], items: Sequence[Item], show: Show
    ) -> Iterator[tuple[int, Result]]:
        """See `workers.Engine`; `show` is not called: progress is that of whole items.

        Raises:
            UserError: Ray is not installed, the cluster cannot be reached, an item fails, or its
                processes are lost again and again.
            StorageError: the bucket of the output fails again and again.
        """
        ray = library("ray", "--engine ray", extra="ray")
        with _connected(ray, self.address):
            task = ray.remote(num_cpus=1, max_retries=0)(run_task)
            shared = ray.put(function)  # once for each node
            remaining, running = deque(range(len(items))), dict[Any, int]()
            lost = Counter[int]()
            try:
                while remaining or running:
                    limit = self.workers or _BACKLOG * int(ray.cluster_resources().get("CPU", 1))
                    while remaining and len(running) < limit:
                        i = remaining.popleft()
                        running[task.remote(shared, items[i])] = i
                    done, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
                    for reference in done:
                        i = running.pop(reference)
                        try:
                            result = _result(ray, reference)
                        except (StorageError, ray.exceptions.RayError) as error:
                            lost[i] += 1
                            _check_losses(lost[i], _name(items[i]), error)
                            remaining.append(i)
                        else:
                            yield i, result
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)


def run_task(function: Callable[[Item, Show], Result], item: Item) -> object:
    """Return the result of an item, or its error: Ray would wrap one that is raised."""
    return answer(function, item, ignore_news)


def _result(ray: ModuleType, reference: Any) -> Any:  # noqa: ANN401
    """Return the result of an item; raise UserError, or the error of an item to be repeated."""
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # a bug: its traceback is the message
        raise RuntimeError(str(error)) from error
    if isinstance(result, UserError | StorageError):
        raise result
    return result


def _check_losses(n: int, name: str, error: Exception) -> None:
    """Raise if an item was lost for the last time; otherwise log that it is repeated."""
    if n < _ATTEMPTS:
        log.warning("%s is repeated: %s", name, _gist(error))
        return
    if isinstance(error, StorageError):
        raise error
    raise UserError(
        f"{name}: the process was lost {_ATTEMPTS} times ({_gist(error)}). If the cause is memory, "
        "give each process more, or lower --unit-bytes"
    ) from error


def _name(item: object) -> str:
    return item.where if isinstance(item, Unit) else f"part {item} of a pass"


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
