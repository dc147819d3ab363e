"""The updates of a run: their batches, and the compilation of all programs before the first."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import jax

from jaxforge.config.job import JobConfig
from jaxforge.parallel import compilation
from jaxforge.parallel.xla_flags import Option
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.step.executable import Executable
from jaxforge.step.train_step import Batch, CompiledSteps, Controls, TrainStep
from jaxforge.training.frozen import FrozenFields, LoweredFields
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Signals
from jaxforge.training.training_data import TrainingData

log = logging.getLogger(__name__)


class StepCompiler(NamedTuple):
    """Compiles the step of a run, or loads it from a file.

    Attributes:
        flags: flags of XLA that its compiler accepts.
        saved: the executable of `train.executable`; None: the step is compiled.
    """

    flags: dict[str, Option]
    saved: Executable | None

    @classmethod
    def of(cls, program: Program) -> "StepCompiler":
        """Turn on the compilation cache, check the flags and open the executable of a run.

        Raises:
            UserError: a flag or the executable cannot be used.
        """
        config, path = program.config, program.config.train.executable
        compilation.use_cache(config.train)
        flags = compilation.accepted_flags(config, program.model.runtime.unroll)
        return cls(flags, Executable(path, program.mesh) if path else None)

    def lower(
        self, program: Program, frozen: FrozenFields | None, batch: Batch
    ) -> Callable[[], CompiledSteps]:
        """Trace the programs of a run, and return a function that compiles them.

        All sizes of a batch are traced here and compiled together before the first step, so that a
        run never compiles the step again.
        """
        fields: LoweredFields = {}
        if frozen is not None:
            batches = program.abstract_batches(batch).values()
            fields = frozen.lower(program.abstract_state().variables, batches)
        return functools.partial(
            self._compile,
            program.config,
            frozen,
            program.lower_sizes(batch),
            program.lower_paddings(batch),
            fields,
        )

    def _compile(
        self,
        config: JobConfig,
        frozen: FrozenFields | None,
        lowered: Mapping[int, jax.stages.Lowered],
        paddings: Mapping[int, jax.stages.Lowered],
        fields: LoweredFields,
    ) -> CompiledSteps:
        if frozen is not None:
            frozen.compile(fields)
        pad = {n: program.compile() for n, program in paddings.items()}
        # Lowered programs are compared with those in the file, so that stale code never runs.
        if self.saved is not None:
            steps = self.saved.load(lowered, config)
            log.info("loaded the train step from %s; nothing is compiled", config.train.executable)
            return CompiledSteps(steps, pad, frozen)
        steps = {n: compilation.compile_step(step, self.flags) for n, step in lowered.items()}
        return CompiledSteps(steps, pad, frozen)


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
            # The first batch gives the shapes; it is drawn again by the first update.
            self.data.open(progress)
            batch = self.data.peek()
        with watchdog.naming("compiling"):
            with signals.interrupting():
                compile_step = self.lower(batch)
            # XLA compiles for minutes without returning to Python, which handles signals.
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
        # After the batch was drawn: an interrupted wait must not record it.
        self.data.note_mixture(progress)
        controls = self.data.controls(progress.step, self.iterations_to_skip)
        return self.step[batch["labels"].shape[0]], batch, controls
