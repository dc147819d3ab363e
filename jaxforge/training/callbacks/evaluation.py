"""Evaluations during training, which can stop and resume after any batch.

With `train.ema_decay`, each set is evaluated a second time, by the average of the parameters. Tasks
follow the sets. `Progress.validation` holds the pending sets and tasks, and the sums so far. A run
that stops within an evaluation resumes there: no batch, set or callback is skipped or repeated.
A task that was stopped begins again, and is logged once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxforge.cli.suggestions import choices
from jaxforge.config.eval import (
    AVERAGE_PREFIX,
    BEST_METRIC,
    EARLY_STOP_METRIC,
    TASKS_PREFIX,
    higher_is_better,
    unknown_direction,
)
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress, Validation
from jaxforge.state.train_state import TrainState
from jaxforge.tasks.opening import open_tasks
from jaxforge.tasks.task import Tasks
from jaxforge.training.callbacks.callback import (
    Callback,
    EvalContext,
    IntervalContext,
    RunCallback,
    RunParts,
)
from jaxforge.training.callbacks.host import collecting_garbage
from jaxforge.training.evaluation import Evaluator, SetSums, summary

_AVERAGE = "ema/"  # before the name of a set, which has no slash


class Evaluation(RunCallback):
    """Evaluates on the sets and tasks of `[eval]`.

    Args:
        progress: the counters of the run; a run may resume within an evaluation.
    """

    follows_evaluation = True

    def __init__(
        self, config: JobConfig, evaluation: "ResumableEvaluation", progress: Progress
    ) -> None:
        self._config, self._evaluation, self._progress = config, evaluation, progress

    @classmethod
    def of_run(cls, run: RunParts) -> "Evaluation | None":
        """Return the callback if `eval.enabled` is set.

        Raises:
            UserError: the evaluation does not report a metric that the config names.
        """
        config = run.config
        if not config.eval.enabled:
            return None
        evaluator = Evaluator(config, run.mesh, run.model, run.eval_data, run.tokenizer, run.frozen)
        tasks = open_tasks(config, run.mesh, run.model, run.tokenizer)
        run.directions.update(_directions(config, evaluator, tasks))
        steps = {name: schedule.steps for name, schedule in config.eval.schedules().items()}
        return cls(config, ResumableEvaluation(evaluator, steps, tasks), run.progress)

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step`, or one was stopped there."""
        section = self._config.eval
        is_due = bool(section.due_sets(step)) or section.are_tasks_due(step)
        return self._progress.validation is not None or is_due

    def on_interval(self, context: IntervalContext) -> None:
        """Evaluate the due sets and log the metrics; log nothing if the evaluation is stopped.

        If nothing is due, a callback requested the evaluation, which covers all sets and tasks.
        """
        step, progress = context.step, context.progress
        if progress.validation is None:
            # Pending sets go into the checkpoint of the step: a stopped evaluation resumes there.
            progress.begin_validation(*self._due(step))
            context.start_save()
        assert progress.validation is not None
        # An evaluation that resumes has announced its beginning before.
        if not progress.validation.has_begun:
            progress.validation.has_begun = True
            context.callbacks.call(Callback.on_eval_begin, step)

        def stop_requested() -> Exit | None:
            context.watchdog.tick()
            return context.stop_requested()

        def note_batch(name: str, batch: int) -> None:
            context.callbacks.call(Callback.on_eval_step, name, batch, step)

        with context.examining_model(), collecting_garbage(self._config):
            metrics = self._evaluation.run(
                context.state, context.progress, stop_requested, note_batch
            )
        if metrics is None:
            return
        context.tracker.log(step, metrics)
        evaluated = EvalContext(step, context.state, context.control)
        context.callbacks.call(Callback.on_eval_end, metrics, step, evaluated)
        context.evaluation.update(metrics)

    def _due(self, step: int) -> tuple[list[str], Sequence[str]]:
        """Return the sets and tasks to evaluate after `step`; all if none is due."""
        section = self._config.eval
        sets, has_tasks = section.due_sets(step), section.are_tasks_due(step)
        if not sets and not has_tasks:
            sets, has_tasks = list(section.sources()), section.has_tasks
        tasks = self._evaluation.task_names if has_tasks else ()
        return passes(sets, self._config.train), tasks


def _directions(config: JobConfig, evaluator: Evaluator, tasks: Tasks | None) -> dict[str, bool]:
    """Return whether higher values are better, for each key that names a metric of the evaluation.

    Raises:
        UserError: the evaluation does not report the metric, or its direction is unknown.
    """
    metrics, stop = {}, config.early_stop
    if evaluator.names or config.checkpoint.keep_best_n:
        metrics[BEST_METRIC] = config.checkpoint.best_metric, config.checkpoint.best_mode
    if stop.uses_metric and stop.metric.startswith("eval/"):
        metrics[EARLY_STOP_METRIC] = stop.metric, stop.mode
    of_tasks = tasks.directions() if tasks else {}
    directions = {}
    for key, (metric, mode) in metrics.items():
        if metric in of_tasks:
            direction = of_tasks[metric]
        elif metric.startswith(TASKS_PREFIX):
            raise UserError(
                f'{key} = "{metric}" is not a metric of a task{choices(metric, [*of_tasks])}'
            )
        else:
            direction = evaluator.direction(metric, key)
        if mode != "auto":
            direction = higher_is_better(metric, mode)
        if direction is None:
            raise UserError(unknown_direction(key, metric))
        directions[key] = direction
    return directions


def passes(sets: Iterable[str], train: TrainConfig) -> list[str]:
    """Return the evaluations of sets: by the parameters, then by their average, if any."""
    sets = list(sets)
    return [*sets, *(f"{_AVERAGE}{name}" for name in sets if train.averages_weights)]


class ResumableEvaluation:
    """Evaluation of all sets and tasks of `[eval]` that resumes where it was stopped.

    Args:
        steps: batches of each set by name.
        tasks: the tasks; None without any.
    """

    def __init__(
        self, evaluator: Evaluator, steps: Mapping[str, int], tasks: Tasks | None = None
    ) -> None:
        self._evaluator, self._steps, self._tasks = evaluator, steps, tasks

    @property
    def task_names(self) -> Sequence[str]:
        """Names of the tasks."""
        return self._tasks.names if self._tasks else ()

    def run(
        self,
        state: TrainState,
        progress: Progress,
        stop: Callable[[], object],
        note_batch: Callable[[str, int], None],
    ) -> dict[str, float] | None:
        """Evaluate the pending sets and tasks; all sets if the evaluation begins here.

        Args:
            state: the state whose parameters are evaluated.
            progress: the counters of the run; holds the evaluation until it is complete.
            stop: called before each batch; a true result stops the evaluation.
            note_batch: called with set and number of each batch after its launch, for the
                parameters and not for their average.

        Returns:
            The metrics of the evaluated sets and tasks, and of all sets together if all were
            evaluated; None if the evaluation was stopped.
        """
        validation = progress.begin_validation(self._evaluator.names)
        if not state.ema:  # the average was dropped at this start
            validation.retain_sets(lambda name: not name.startswith(_AVERAGE))
        validation.retain_tasks(self.task_names)  # those of the stopped run may be others
        # A set leaves the list only when it is complete, so that no batch is lost or repeated.
        while validation.pending:
            if not self._run_set(validation.pending[0], state, validation, stop, note_batch):
                return None
            validation.pending.pop(0)
        while validation.pending_tasks:
            if not self._run_task(validation.pending_tasks[0], state, validation, stop):
                return None
            validation.pending_tasks.pop(0)
        progress.validation = None
        metrics = self._metrics({name: SetSums(**s) for name, s in validation.sums.items()})
        return metrics | (self._tasks.metrics(validation.results) if self._tasks else {})

    def _run_set(
        self,
        name: str,
        state: TrainState,
        validation: Validation,
        stop: Callable[[], object],
        note_batch: Callable[[str, int], None],
    ) -> bool:
        """Evaluate a set from where it was stopped; return whether it is complete."""
        dataset = name.removeprefix(_AVERAGE)
        is_average = name != dataset
        begun = SetSums(**validation.sums.get(name, {}))
        sums, is_whole = self._evaluator.evaluate(
            state.averaged_variables if is_average else state.variables,
            dataset, self._steps[dataset], begun, stop,
            (lambda *_: None) if is_average else note_batch,
        )  # fmt: skip
        validation.sums[name] = sums._asdict()
        return is_whole

    def _run_task(
        self, name: str, state: TrainState, validation: Validation, stop: Callable[[], object]
    ) -> bool:
        """Evaluate a task from its beginning; return whether it is complete."""
        assert self._tasks is not None
        params = state.averaged_variables if self._tasks.is_average else state.variables
        results = self._tasks.evaluate(name, params, stop)
        if results is None:
            return False
        validation.results[name] = results
        return True

    def _metrics(self, sums: Mapping[str, SetSums]) -> dict[str, float]:
        """Return the metrics of the parameters, and those of their average."""
        average = {
            name.removeprefix(_AVERAGE): s for name, s in sums.items() if name.startswith(_AVERAGE)
        }
        sets = {name: s for name, s in sums.items() if not name.startswith(_AVERAGE)}
        # Sets may have intervals of their own; only a full round has a mean over all.
        are_all = bool(sets) and len(sets) == len(self._evaluator.names)
        metrics = summary(sets, are_all=are_all)
        if average:
            metrics |= summary(average, are_all=are_all, prefix=AVERAGE_PREFIX)
        return metrics
