"""Capture of activations while a run trains: `eval.activations_interval`.

After the updates where it is due, the first sequences of an evaluation set go through the model,
always the same ones, and the run directory gets `activations/step_<n>/` (`activation_files`). The
state is only read.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset
from jaxforge.data.loader import eval_batches
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.step.forward_values import Activations, Values
from jaxforge.storage import mirror
from jaxforge.training import activation_files
from jaxforge.training.callbacks.callback import Callback, IntervalContext

log = logging.getLogger(__name__)


class ActivationCapture(Callback):
    """Captures what `[eval]` names, on the mesh of the run.

    Args:
        config: `[eval]` says what and when.
        mesh: where parameters lie.
        model: the model.
        dataset: the evaluation set.
    """

    def __init__(self, config: JobConfig, mesh: Mesh, model: Model, dataset: Dataset) -> None:
        wanted = config.eval
        self._config, self._mesh, self._dataset = config, mesh, dataset
        self._compute = Activations(
            model, wanted.captured_points, wanted.activations_layers or None, mesh
        )
        self._numbers = range(min(wanted.activations_sequences, len(dataset)))

    follows_evaluation = True

    def is_due(self, step: int) -> bool:
        """Return whether activations are due after a step."""
        return self._config.eval.is_capture_due(step)

    def on_interval(self, context: IntervalContext) -> None:
        """Capture once a step: not where an evaluation was stopped, which will resume."""
        if context.progress.validation:
            return
        with context.examining_model("capturing activations"):
            self(context.state.variables, context.step, context.watchdog.tick)

    def __call__(self, params: Params, step: int, moved: Callable[[], object]) -> None:
        """Captures those of a step; all processes take part, and the first writes.

        Files that cannot be written are a warning.

        Args:
            params: of that step, as functions of the model take them.
            step: names the directory.
            moved: called after each sequence, as a sign of life.
        """
        sequences = self._sequences(params, moved)
        if jax.process_index() == 0:
            self._write(step, sequences)
        for values in sequences:  # where nothing is written; or not any more, and others go on
            jax.block_until_ready(values)

    def _write(self, step: int, sequences: Iterator[Values]) -> None:
        wanted, run = self._config.eval, mirror.files(self._config.checkpoint.dir)
        directory = activation_files.step_directory(run, step)
        layers = wanted.activations_layers or range(self._config.model.n_layers)
        about = {
            "step": step,
            "set": wanted.captured_set(),
            "points": list(wanted.captured_points),
            "layers": list(layers),
            "sequences": list(self._numbers),
        }
        try:
            n = activation_files.write(directory, map(jax.device_get, sequences), about)
        except OSError as error:
            log.warning("activations of step %d are not kept: %s; the run continues", step, error)
        else:
            log.info("activations of %d sequences after step %d in %s", n, step, directory)

    def _sequences(self, params: Params, moved: Callable[[], object]) -> Iterator[Values]:
        """Computed one at a time by each group of devices, however large a microbatch is."""
        sizes = {"batch_size": 1, "global_batch_size": None}
        train = self._config.train.model_copy(update=sizes)
        config = self._config.model_copy(update={"train": train})
        for values in sequence_activations(
            self._compute, params, config, self._mesh, self._dataset, self._numbers
        ):
            yield values
            moved()


def sequence_activations(
    compute: Activations,
    params: Params,
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset,
    numbers: Sequence[int],
) -> Iterator[Values]:
    """Activations of sequences of a set, one after another.

    Args:
        compute: computes them.
        params: as functions of the model take them.
        config: sizes of a batch come from `[train]`.
        mesh: where parameters lie.
        dataset: the set.
        numbers: of its sequences.
    """
    size = config.train.microbatch_size(data_parallel_size(mesh))
    batches = eval_batches(config, mesh, dataset, numbers)
    for first, batch in zip(range(0, len(numbers), size), batches, strict=True):
        yield from compute(params, batch, range(min(size, len(numbers) - first)))
