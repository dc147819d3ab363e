"""Evaluations during training: of several sets, one after the other, stopped and resumed anywhere.

What is evaluated and how far that is stands in `Progress.validation`, so that a run which stops in
the middle goes on there: no batch, set or hook is left out or repeated.
"""

from collections.abc import Callable

from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.garbage import collecting_garbage
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts
from jaxforge.training.evaluation import Evaluator, SetSums, summary


class Evaluation(RunCallback):
    """Evaluates on the sets of `[eval]`.

    Args:
        config: a resolved config.
        evaluation: evaluates all sets.
        progress: the counters of the run; a run may resume in an evaluation.
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
        evaluator = Evaluator(config, run.mesh, run.model, run.eval_data, run.tokenizer)
        evaluator.check_reports(config.checkpoint.best_metric)
        if config.early_stop.active and config.early_stop.metric.startswith("eval/"):
            evaluator.check_reports(config.early_stop.metric, "early_stop.metric")
        return cls(config, ResumableEvaluation(evaluator, config.eval.steps), run.progress)

    def is_due(self, step: int) -> bool:
        """Return whether to evaluate after a step, or whether its evaluation was stopped."""
        return self._progress.validation is not None or self._config.eval.is_due(step)

    def on_interval(self, context: IntervalContext) -> None:
        """Evaluate, and log the metrics; nothing where the evaluation was stopped."""
        step, is_resumed = context.step, context.progress.validation is not None
        if not is_resumed:
            for callback in context.callbacks:
                callback.on_eval_begin(step)

        def stop_requested() -> Exit | None:
            context.watchdog.tick()
            return context.stop_requested()

        with context.examining_model(), collecting_garbage(self._config):
            metrics = self._evaluation.run(context.state, context.progress, stop_requested)
        if metrics is None:
            return
        context.tracker.log(step, metrics)
        for callback in context.callbacks:
            callback.on_eval_end(metrics, step)
        if is_resumed:
            context.amend_checkpoint(context.progress)
        context.evaluation.update(metrics)


class ResumableEvaluation:
    """The sets of `[eval]`.

    Args:
        evaluator: evaluates them.
        steps: batches of each set.
    """

    def __init__(self, evaluator: Evaluator, steps: int) -> None:
        self._evaluator, self._steps = evaluator, steps

    def run(
        self, state: TrainState, progress: Progress, stop: Callable[[], object]
    ) -> dict[str, float] | None:
        """Evaluates what is pending, from where that stands.

        Args:
            state: the parameters to evaluate.
            progress: of their step; holds the validation as long as it lasts.
            stop: asked between batches whether to stop there.

        Returns:
            The metrics of all sets; None if it was stopped.
        """
        validation = progress.begin_validation(self._evaluator.names)
        while validation.pending:
            name = validation.pending[0]
            begun = SetSums(**validation.sums.get(name, {}))
            sums, is_whole = self._evaluator.evaluate(
                state.variables, name, self._steps, begun, stop
            )
            validation.sums[name] = sums._asdict()
            if not is_whole:
                return None
            validation.pending.pop(0)
        progress.validation = None
        return summary({name: SetSums(**sums) for name, sums in validation.sums.items()})
