"""Evaluations during training, which can stop and resume after any batch.

With `train.ema_decay`, each set is evaluated a second time, by the average of the parameters.
`Progress.validation` holds the pending sets and the sums so far. A run that stops within an
evaluation resumes there: no batch, set or callback is skipped or repeated.
"""

from collections.abc import Callable, Iterable, Mapping

from jaxforge.config.eval import AVERAGE_PREFIX
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training.callbacks.callback import Callback, EvalContext, IntervalContext
from jaxforge.training.callbacks.garbage import collecting_garbage
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts
from jaxforge.training.evaluation import Evaluator, SetSums, summary

_AVERAGE = "ema/"  # before the name of a set, which has no slash


class Evaluation(RunCallback):
    """Evaluates on the sets of `[eval]`.

    Args:
        config: the resolved config.
        evaluation: evaluates all sets.
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
        evaluator.check_reports(config.checkpoint.best_metric)
        if config.early_stop.active and config.early_stop.metric.startswith("eval/"):
            evaluator.check_reports(config.early_stop.metric, "early_stop.metric")
        steps = {name: schedule.steps for name, schedule in config.eval.schedules().items()}
        return cls(config, ResumableEvaluation(evaluator, steps), run.progress)

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step`, or one was stopped there."""
        return self._progress.validation is not None or bool(self._config.eval.due_sets(step))

    def on_interval(self, context: IntervalContext) -> None:
        """Evaluate the due sets and log the metrics; log nothing if the evaluation is stopped.

        If no set is due, a callback requested the evaluation, which covers all sets.
        """
        step, progress, section = context.step, context.progress, self._config.eval
        if progress.validation is None:
            sets = section.due_sets(step) or section.sources()
            progress.begin_validation(passes(sets, self._config.train))
            context.start_save()
        assert progress.validation is not None
        if not progress.validation.sums:
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


def passes(sets: Iterable[str], train: TrainConfig) -> list[str]:
    """Return the evaluations of sets: by the parameters, then by their average, if any."""
    sets = list(sets)
    return [*sets, *(f"{_AVERAGE}{name}" for name in sets if train.averages_weights)]


class ResumableEvaluation:
    """Evaluation of all sets of `[eval]` that resumes where it was stopped.

    Args:
        evaluator: evaluates one set.
        steps: batches of each set by name.
    """

    def __init__(self, evaluator: Evaluator, steps: Mapping[str, int]) -> None:
        self._evaluator, self._steps = evaluator, steps

    def run(
        self,
        state: TrainState,
        progress: Progress,
        stop: Callable[[], object],
        note_batch: Callable[[str, int], None],
    ) -> dict[str, float] | None:
        """Evaluate the pending sets; all sets if the evaluation begins here.

        Args:
            state: the state whose parameters are evaluated.
            progress: the counters of the run; holds the evaluation until it is complete.
            stop: called before each batch; a true result stops the evaluation.
            note_batch: called with set and number of each batch after its launch, for the
                parameters and not for their average.

        Returns:
            The metrics of the evaluated sets, and of all sets together if all were evaluated;
            None if the evaluation was stopped.
        """
        validation = progress.begin_validation(self._evaluator.names)
        if not state.ema:  # the average was dropped at this start
            validation.drop(lambda name: name.startswith(_AVERAGE))
        while validation.pending:
            name = validation.pending[0]
            dataset = name.removeprefix(_AVERAGE)
            is_average = name != dataset
            begun = SetSums(**validation.sums.get(name, {}))
            sums, is_whole = self._evaluator.evaluate(
                state.averaged_variables if is_average else state.variables,
                dataset, self._steps[dataset], begun, stop,
                (lambda *_: None) if is_average else note_batch,
            )  # fmt: skip
            validation.sums[name] = sums._asdict()
            if not is_whole:
                return None
            validation.pending.pop(0)
        progress.validation = None
        return self._metrics({name: SetSums(**sums) for name, sums in validation.sums.items()})

    def _metrics(self, sums: Mapping[str, SetSums]) -> dict[str, float]:
        """Return the metrics of the parameters, and those of their average."""
        average = {
            name.removeprefix(_AVERAGE): s for name, s in sums.items() if name.startswith(_AVERAGE)
        }
        sets = {name: s for name, s in sums.items() if not name.startswith(_AVERAGE)}
        are_all = len(sets) == len(self._evaluator.names)
        metrics = summary(sets, are_all=are_all)
        if average:
            metrics |= summary(average, are_all=are_all, prefix=AVERAGE_PREFIX)
        return metrics
