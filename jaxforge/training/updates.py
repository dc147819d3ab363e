"""The updates of a run: batches and the compiled step."""

import dataclasses
from collections.abc import Callable

from jaxforge.step.train_step import Batch, CompiledSteps
from jaxforge.training.training_data import TrainingData


@dataclasses.dataclass
class Updates:
    """The batches and the compiled step of a run.

    Attributes:
        lower: traces the step for a batch and returns the function that compiles it.
        data: the batches.
        step: the compiled step; set when compilation is done.
    """

    lower: Callable[[Batch], Callable[[], CompiledSteps]]
    data: TrainingData
    step: CompiledSteps = dataclasses.field(init=False)
