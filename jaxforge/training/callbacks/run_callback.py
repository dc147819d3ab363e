"""The base class of the callbacks that a config turns on, and what they are built from."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Self

from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.dataset import Dataset
from jaxforge.model.transformer import Model
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror
from jaxforge.storage.run_lock import RunLock
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.frozen import FrozenFields


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run that callbacks are built from.

    Attributes:
        config: the resolved config.
        mesh: the mesh of the run.
        model: the model.
        eval_data: evaluation sets by name.
        progress: the counters of the run.
        lock: lock of the run directory.
        frozen: adds fields of the reference or teacher to batches, if the objective has one.
        directions: config key of a metric -> whether higher values are better. `Evaluation` adds
            the metrics of the config that it computes.
    """

    config: JobConfig
    mesh: Mesh
    model: Model
    eval_data: Mapping[str, Dataset]
    progress: Progress
    lock: RunLock
    frozen: FrozenFields | None = None
    directions: dict[str, bool] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        program: Program,
        eval_data: Mapping[str, Dataset],
        progress: Progress,
        lock: RunLock,
        frozen: FrozenFields | None,
    ) -> "RunParts":
        """Return the parts of a run with a program."""
        config, mesh, model = program.config, program.mesh, program.model
        return cls(config, mesh, model, eval_data, progress, lock, frozen)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run, read once; None if its data have none."""
        return run_directory.tokenizer_for(mirror.files(self.config.checkpoint.dir), self.config)


class RunCallback(Callback, abc.ABC):
    """Base class of the callbacks in `order.ORDER`."""

    judges_state = False

    @classmethod
    @abc.abstractmethod
    def of_run(cls, run: RunParts) -> Self | None:
        """Return the callback of a run, or None if its config does not ask for it.

        Raises:
            UserError: the callback lacks something it needs, such as a tokenizer.
        """
