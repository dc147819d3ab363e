"""Capture of activations during training: `eval.activations_interval`.

When a capture is due, the first sequences of an evaluation set, always the same, pass through the
model. Their activations are written to `activations/step_<n>/` of the run directory
(`activation_files`). The state is not changed.
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
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)


class ActivationCapture(RunCallback):
    """Captures the activations that `[eval]` names.

    Args:
        config: `[eval]` has the points, layers and interval.
    """

    def __init__(self, config: JobConfig, mesh: Mesh, model: Model, dataset: Dataset) -> None:
        section = config.eval
        self._config, self._mesh, self._dataset = config, mesh, dataset
        self._compute = Activations(
            model, section.captured_points, section.activations_layers or None, mesh
        )
        self._numbers = range(min(section.activations_sequences, len(dataset)))

    @classmethod
    def of_run(cls, run: RunParts) -> "ActivationCapture | None":
        """Return the callback if `eval.activations_interval` is set."""
        section = run.config.eval
        if not section.activations_interval:
            return None
        return cls(run.config, run.mesh, run.model, next(iter(run.eval_data.values())))

    follows_evaluation = True

    def is_due(self, step: int) -> bool:
        """Return whether activations are due after a step."""
        return self._config.eval.is_capture_due(step)

    def on_interval(self, context: IntervalContext) -> None:
        """Capture activations, unless an evaluation of this step was stopped and will resume."""
        if context.progress.validation:
            return
        with context.examining_model("capturing activations"):
            self(context.state.variables, context.step, context.watchdog.tick)

    def __call__(self, params: Params, step: int, moved: Callable[[], object]) -> None:
        """Capture the activations of a step. Collective; process 0 writes the files.

        A failed write is logged as a warning.

        Args:
            params: parameters after the step, with non-trainable state.
            step: names the directory.
            moved: called after each sequence, to show progress to the watchdog.
        """
        sequences = self._sequences(params, moved)
        if jax.process_index() == 0:
            self._write(step, sequences)
        # The remaining sequences are still computed: on processes that write nothing, and on
        # process 0 after a failed write. Every process must run the same programs.
        for values in sequences:
            jax.block_until_ready(values)

    def _write(self, step: int, sequences: Iterator[Values]) -> None:
        section, run = self._config.eval, mirror.files(self._config.checkpoint.dir)
        directory = activation_files.step_directory(run, step)
        layers = section.activations_layers or range(self._config.model.n_layers)
        about = {
            "step": step,
            "set": section.datasets[0].name,
            "points": list(section.captured_points),
            "layers": list(layers),
            "sequences": list(self._numbers),
        }
        try:
            n = activation_files.write(directory, map(jax.device_get, sequences), about)
        except OSError as error:
            log.warning("activations of step %d are not saved: %s. The run continues", step, error)
        else:
            log.info("saved activations of %d sequences after step %d to %s", n, step, directory)

    def _sequences(self, params: Params, moved: Callable[[], object]) -> Iterator[Values]:
        """Yield the activations; each group of devices computes one sequence at a time."""
        sizes = {"train.batch_size": 1, "train.global_batch_size": None}
        config = self._config.with_values(sizes)
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
    """Yield the activations of sequences of a dataset, one after another.

    Args:
        compute: computes the activations of a batch.
        params: parameters, with non-trainable state.
        config: its `eval_batch_size` is the size of a batch.
        mesh: the mesh of the parameters.
        dataset: the dataset.
        numbers: indices of the sequences.
    """
    size = config.eval_batch_size(data_parallel_size(mesh))
    batches = eval_batches(config, mesh, dataset, numbers)
    for first, batch in zip(range(0, len(numbers), size), batches, strict=True):
        yield from compute(params, batch, range(min(size, len(numbers) - first)))
