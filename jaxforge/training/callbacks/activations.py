"""Capture of activations during training (`eval.activations_interval`), and their files.

When a capture is due, the first sequences of the first evaluation set, always the same, pass
through the model. The state is not changed. A capture is a directory `activations/step_<n>/` of the
run, written sequence by sequence:

<point>.npy        float32 [sequences, layers, tokens, dim]; of attention_weights [sequences,
                   layers, heads, queries, keys], of logits [sequences, tokens, vocabulary]
tokens.npy         int32 [sequences, tokens]
activations.json   step, dataset, points, layers and sequences of the capture
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset
from jaxforge.data.loader import eval_batches
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.step.forward_values import Activations, Values
from jaxforge.storage import mirror, safe_files
from jaxforge.training.callbacks import activations as activation_files
from jaxforge.training.callbacks.callback import IntervalContext, RunCallback, RunParts

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


DIRECTORY = "activations"
"""Subdirectory of a run directory with `step_<n>/` of each capture during training."""

_ABOUT = "activations.json"


def write(
    directory: Path, sequences: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]
) -> int:
    """Write a directory of activations; it appears under its name only when it is complete.

    Args:
        directory: the path; an existing directory is replaced.
        sequences: arrays by name, for each sequence. Only one sequence is in memory at a time.
        about: contents of `activations.json`.

    Returns:
        The number of sequences.

    Raises:
        OSError: the directory cannot be written; nothing of it remains.
    """
    n = 0
    with _replacing(directory) as partial, contextlib.ExitStack() as opened:
        files: dict[str, AppendableArray] = {}
        for sequence in sequences:
            for name, values in sequence.items():
                if name not in files:
                    path = partial / f"{name}.npy"
                    files[name] = opened.enter_context(AppendableArray(path, values))
                files[name].add(values)
            n += 1
        for file in files.values():
            file.finish()
        (partial / _ABOUT).write_text(json.dumps(dict(about), indent=2) + "\n")
    return n


def read(directory: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a directory by name, memory-mapped."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(directory.glob("*.npy"))}


def steps(run: Path) -> list[int]:
    """Return the steps whose activations a run directory contains."""
    names = (path.name.removeprefix("step_") for path in (run / DIRECTORY).glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def step_directory(run: Path, step: int) -> Path:
    """Return the directory of the activations of a step."""
    return run / DIRECTORY / f"step_{step}"


class AppendableArray(contextlib.AbstractContextManager):
    """A `.npy` file to which arrays are appended along a new first axis.

    The header is written first with length 0, and again with the final length by `finish`: NumPy
    pads headers so that a longer number does not move the data.
    """

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self._file, self._like, self._n = path.open("w+b"), like, 0
        self._header()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        """Append an array."""
        self._file.write(np.ascontiguousarray(values).data)
        self._n += 1

    def finish(self) -> None:
        """Write the final header and make the file durable."""
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._like.dtype)
        shape = (self._n, *self._like.shape)
        described = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)  # padded, see the class


@contextlib.contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    safe_files.make_directory(directory.parent)
    for torn in directory.parent.glob(
        f".{directory.name}.*partial"
    ):  # left by a process that was killed
        shutil.rmtree(torn, ignore_errors=True)
    partial, old = safe_files.temporary_path(directory), safe_files.temporary_path(directory)
    try:
        partial.mkdir()
        yield partial
        if directory.exists():
            directory.replace(old)
        partial.replace(directory)
    finally:  # frees the space on a full disk
        for torn in (partial, old):
            shutil.rmtree(torn, ignore_errors=True)
