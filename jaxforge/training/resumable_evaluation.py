"""Evaluations during training: of several sets, one after the other, stopped and resumed anywhere.

What is evaluated and how far that is stands in `Progress.validation`, so that a run which stops in
the middle goes on there: no batch, set or hook is left out or repeated.
"""

from collections.abc import Callable

from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.training.evaluation import Evaluator, SetSums, summary


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
