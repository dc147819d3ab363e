"""Units of a corpus in processes of this machine (a `RunUnits`)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from jaxforge.data.corpus.workers import Workers, serve_requests

_Unit = TypeVar("_Unit")
_Result = TypeVar("_Result")


def run_units(
    function: Callable[[_Unit], _Result], units: Sequence[_Unit], workers: int
) -> Iterator[_Result]:
    """Yield `function(unit)` of each unit, in order.

    Args:
        function: a picklable function.
        units: picklable arguments.
        workers: number of processes; with 1, and for a single unit, this process.

    Raises:
        UserError: the function raises one, or a process died.
    """
    n = min(workers, len(units))
    if n <= 1:
        yield from map(function, units)
        return
    with Workers[_Unit, _Result](n, serve_requests, function) as pool:
        waiting: deque[Future[_Result]] = deque()
        for unit in units:
            waiting.append(pool.submit(unit))
            if len(waiting) > 2 * n:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
