"""The interface of tasks, and their evaluation within a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from jaxforge.config.eval import AVERAGE_PREFIX, TASKS_PREFIX
from jaxforge.model.transformer import Params
from jaxforge.tasks.text_model import TextModel

Results = dict[str, dict[str, float]]
"""Metrics by subject: a task, or several tasks of a group. Standard errors end in `_stderr`."""


class Task(Protocol):
    """A task, or a group of tasks that is evaluated at once.

    Attributes:
        name: name in messages and in the progress of an evaluation.
    """

    name: str

    def evaluate(self) -> Results:
        """Return the metrics of the model, whose parameters are set by `TextModel.using`."""


Aggregate = Callable[[Mapping[str, Results]], Mapping[str, float]]
"""(results by name of a task) -> metrics over several tasks; empty if any of them is missing."""


class _Stopped(Exception):
    """The evaluation of a task was stopped between two batches."""


class Tasks:
    """Tasks that a run evaluates, one after another.

    Args:
        text: the model of the tasks.
        tasks: the tasks.
        aggregates: functions that compute metrics over several tasks.
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
        prefix = AVERAGE_PREFIX if self.is_average else ""
        logged = {
            f"{TASKS_PREFIX}{subject}/{prefix}{metric}": value
            for subjects in results.values()
            for subject, metrics in subjects.items()
            for metric, value in metrics.items()
        }
        for aggregate in self._aggregates:
            values = aggregate(results)
            logged |= {f"{TASKS_PREFIX}{prefix}{name}": value for name, value in values.items()}
        return logged
