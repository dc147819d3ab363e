"""The updates of a run: batches and the compiled step."""

import dataclasses
from collections.abc import Callable, Container

from jaxforge.state.progress import Progress
from jaxforge.step.train_step import Batch, CompiledSteps, Controls, TrainStep
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Signals
from jaxforge.training.training_data import TrainingData


@dataclasses.dataclass
class Updates:
    """The batches and the compiled step of a run.

    Attributes:
        lower: traces the step for a batch and returns the function that compiles it.
        data: the batches.
        iterations_to_skip: `train.iterations_to_skip`; the updates of these steps are skipped.
        step: the compiled step; set when compilation is done.
    """

    lower: Callable[[Batch], Callable[[], CompiledSteps]]
    data: TrainingData
    iterations_to_skip: Container[int] = ()
    step: CompiledSteps = dataclasses.field(init=False)

    def compile(self, progress: Progress, signals: Signals, watchdog: Watchdog) -> None:
        """Open the data and compile the step for the first batch.

        Raises:
            Interrupted: a signal has arrived.
        """
        with signals.interrupting(), watchdog.naming("loading data"):
            self.data.open(progress)
            batch = self.data.peek()
        with watchdog.naming("compiling"):
            with signals.interrupting():
                compile_step = self.lower(batch)
            self.step = signals.wait_for(compile_step)

    def next_batch(
        self, progress: Progress, signals: Signals, instruments: Instruments
    ) -> tuple[TrainStep, Batch, Controls]:
        """Return the compiled step for the next batch, the batch, and the controls.

        Raises:
            Interrupted: a signal has arrived.
        """
        waiting = instruments.watchdog.naming("waiting for data")
        with instruments.tracker.waiting_for_data(), waiting, signals.interrupting():
            batch = next(self.data)
        self.data.note_mixture(progress)
        controls = self.data.controls(progress.step, self.iterations_to_skip)
        return self.step[batch["labels"].shape[0]], batch, controls
