"""The updates of a run: its batches, and the compiled step on them."""

import dataclasses
from collections.abc import Callable

from jaxforge.step.train_step import Batch, CompiledSteps
from jaxforge.training.training_data import TrainingData


@dataclasses.dataclass
class Updates:
    """The batches and the step of a run.

    Attributes:
        lower: traces the step for such a batch; its result compiles the step.
        data: the batches.
        step: the compiled step, once it is compiled.
    """

    lower: Callable[[Batch], Callable[[], CompiledSteps]]
    data: TrainingData
    step: CompiledSteps = dataclasses.field(init=False)
