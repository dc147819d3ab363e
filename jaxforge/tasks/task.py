"""The interface of tasks, their evaluation within a run, and the model that they use.

Several processes cooperate as in training: each makes the same requests in the same order and
receives all results.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from jax.sharding import Mesh

from jaxforge.config.eval import AVERAGE_PREFIX, TASKS_PREFIX
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.errors import UserError
from jaxforge.model.decoding import Completion, Decoder, padded_batch
from jaxforge.model.likelihood import Continuation, Likelihood, Scorer
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, Params


@dataclasses.dataclass
class TextModel:
    """Model and tokenizer; the parameters are set while they are in use.

    Attributes:
        model: the model.
        mesh: mesh of the parameters.
        tokenizer: the tokenizer of the run.
        rows: maximum number of sequences of a batch, over all devices.
        max_length: maximum number of tokens that the model reads.
        prefix: id of the token before texts that are scored from their first token on.
        params: parameters of the model, with non-trainable state; None between uses.
        context: returns the context of all computations.
        before_batch: called before each batch; may raise an exception to stop.
    """

    model: Model
    mesh: Mesh
    tokenizer: Tokenizer
    rows: int
    max_length: int
    prefix: int
    params: Params | None = None
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    before_batch: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def using(self, params: Params, before_batch: Callable[[], object]) -> Iterator[None]:
        """Use parameters within the context; they are released at its end."""
        self.params, self.before_batch = params, before_batch
        try:
            yield
        finally:
            self.params, self.before_batch = None, lambda: None

    def score(
        self, continuations: Sequence[Continuation], *, has_full_batches: bool = False
    ) -> list[Likelihood]:
        """Return the likelihood of each continuation, in order.

        Args:
            continuations: what to score.
            has_full_batches: fill up batches to `rows`, so that several calls share programs.
        """
        least_rows = self.rows if has_full_batches else 1
        scorer = Scorer(
            self.model, self._params, self.max_length, self.mesh, self.rows, self.before_batch,
            least_rows,
        )  # fmt: skip
        with self.context():
            return scorer.score(continuations)

    def batch_size(self, n: int) -> int:
        """Return the number of rows of the batches of n prompts."""
        return padded_batch(n, self.rows, self.mesh)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int,
        rows: int,
        is_enough: Callable[[list[int]], bool],
    ) -> list[Completion]:
        """Complete one batch of prompts, padded to `rows`; see `Decoder.complete`."""
        decoder = Decoder(self.model, self._params, max_tokens, sampling,
                          self.tokenizer.eos_ids, seed, self.mesh, rows)  # fmt: skip
        self.before_batch()
        with self.context():
            return decoder.complete(prompts, numbers, is_enough)

    @property
    def _params(self) -> Params:
        assert self.params is not None, "the model is used outside of `using`"
        return self.params


def prefix_token(tokenizer: Tokenizer, preferred: int | None = None) -> int:
    """Return the first known id of: `preferred`, BOS, EOS.

    Raises:
        UserError: the tokenizer has none of them.
    """
    return first_known(preferred, tokenizer.bos_id, tokenizer.eos_id)


def first_known(*ids: int | None) -> int:
    """Return the first id that is not None.

    Raises:
        UserError: all are None.
    """
    first = next((id_ for id_ in ids if id_ is not None), None)
    if first is None:
        raise UserError("the run's tokenizer has no end-of-text token, which tasks need")
    return first


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
                # An exception, as code of lm_eval lies between the task and its batches.
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
