"""The interface of tasks, and their evaluation within a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from jaxforge.config.eval import AVERAGE_PREFIX, TASKS_PREFIX
from jaxforge.model.transformer import Params
from jaxforge.tasks.text_model import TextModel

Value = TypeVar("Value")

Results = dict[str, dict[str, float]]
"""Metrics by subject: a task, or several tasks of a group. Standard errors end in `_stderr`."""

Directions = Mapping[str, Mapping[str, bool | None]]
"""Subject -> metric -> whether higher values are better; None if the task does not say it."""


class Task(Protocol):
    """A task, or a group of tasks that is evaluated at once.

    Attributes:
        name: name in messages and in the progress of an evaluation.
    """

    name: str

    def evaluate(self) -> Results:
        """Return the metrics of the model, whose parameters are set by `TextModel.using`."""

    def directions(self) -> Directions:
        """Return the metrics of `evaluate`, without standard errors."""


class Aggregate(Protocol):
    """Metrics over several tasks."""

    def aggregate(self, results: Mapping[str, Results]) -> Mapping[str, float]:
        """Return the metrics, given results by name of a task; empty if a task is missing."""

    def aggregate_directions(self) -> Mapping[str, bool | None]:
        """Return whether higher values are better, for each metric of `aggregate`."""


class _Stopped(Exception):
    """The evaluation of a task was stopped between two batches."""


class Tasks:
    """Tasks that a run evaluates, one after another.

    Args:
        text: the model of the tasks.
        tasks: the tasks.
        aggregates: metrics over several tasks.
        is_average: the average of the parameters is evaluated.
    """

    def __init__(
        self,
        text: TextModel,
        tasks: Sequence[Task],
        aggregates: Iterable[Aggregate] = (),
        *,
        is_average: bool = False,
    ) -> None:
        self._text, self._aggregates, self.is_average = text, tuple(aggregates), is_average
        self._tasks = {task.name: task for task in tasks}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks, in order."""
        return tuple(self._tasks)

    def evaluate(self, name: str, params: Params, stop: Callable[[], object]) -> Results | None:
        """Evaluate one task. Collective: all processes must call it.

        Args:
            name: name of the task.
            params: parameters with non-trainable state.
            stop: called before each batch; a true result stops the evaluation.

        Returns:
            The metrics; None if the evaluation was stopped.
        """

        def before_batch() -> None:
            if stop():
                raise _Stopped

        try:
            with self._text.using(params, before_batch):
                return self._tasks[name].evaluate()
        except _Stopped:
            return None

    def metrics(self, results: Mapping[str, Results]) -> dict[str, float]:
        """Return the logged metrics: `eval/tasks/<subject>/<metric>`.

        Args:
            results: results by name of the task.
        """
        over_tasks = [aggregate.aggregate(results) for aggregate in self._aggregates]
        return self._logged(results.values(), over_tasks)

    def directions(self) -> dict[str, bool | None]:
        """Return whether higher values are better, for each logged metric of all tasks.

        Standard errors are left out.
        """
        over_tasks = [aggregate.aggregate_directions() for aggregate in self._aggregates]
        return self._logged([task.directions() for task in self._tasks.values()], over_tasks)

    def _logged(
        self,
        tasks: Iterable[Mapping[str, Mapping[str, Value]]],
        over_tasks: Iterable[Mapping[str, Value]],
    ) -> dict[str, Value]:
        """Return values by the name of the logged metric."""
        prefix = AVERAGE_PREFIX if self.is_average else ""
        by_name = {
            f"{TASKS_PREFIX}{subject}/{prefix}{metric}": value
            for subjects in tasks
            for subject, metrics in subjects.items()
            for metric, value in metrics.items()
        }
        for metrics in over_tasks:
            by_name |= {f"{TASKS_PREFIX}{prefix}{name}": value for name, value in metrics.items()}
        return by_name
