"""Activations of sequences in files: `--activations` of `jaxforge replay` and `evaluate`."""

import argparse
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxforge import inference
from jaxforge.checkpoint.paths import Weights
from jaxforge.config.eval import matching_points, unknown_point
from jaxforge.data import sources
from jaxforge.errors import UserError
from jaxforge.inference.evaluation import set_overrides
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel import host_memory
from jaxforge.runs import run_directory
from jaxforge.step.forward_values import Activations, Values
from jaxforge.step.update_loss import Batch
from jaxforge.storage import urls
from jaxforge.telemetry.console import setup_logging
from jaxforge.tools.replay.past import open_past
from jaxforge.training import activation_files
from jaxforge.training.callbacks.activations import sequence_activations

log = logging.getLogger(__name__)


class Selection(NamedTuple):
    """Selection of activations to capture.

    Attributes:
        points: names of points (`config.points`).
        layers: indices of layers; None: all.
        sequences: a number of sequences from the first, or ascending indices of sequences.
    """

    points: tuple[str, ...] = ("residual",)
    layers: tuple[int, ...] | None = None
    sequences: int | Sequence[int] = 64


def save_of_step(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run `jaxforge replay RUN --step N --activations DIR`; return the exit code."""
    if args.step is None:
        raise UserError("--activations requires --step N; `jaxforge evaluate` takes it with sets")
    selection = _begin(args)
    from_step(urls.path(args.run), args.step, selection, args.activations, overrides)
    return 0


def save_of_sets(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run `jaxforge evaluate RUN --activations DIR`; return the exit code."""
    selection = _begin(args)
    from_set(
        urls.path(args.run), selection, args.activations, overrides,
        sets=args.set, step=args.step, weights=args.weights,
    )  # fmt: skip
    return 0


def _begin(args: argparse.Namespace) -> Selection:
    """Return the selection of a command line, and set up the process."""
    patterns = args.points.split(",")
    if problem := unknown_point(patterns):
        raise UserError(f"--points: {problem}")
    sequences = _sequences(args.sequences)
    selection = Selection(matching_points(patterns), _layers(args.layers), sequences)
    if args.activations.exists():
        raise UserError(f"--activations {args.activations}: already exists. Name a new directory")
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    return selection


def from_step(
    run: Path, step: int, selection: Selection, output: Path, overrides: Sequence[str] = ()
) -> None:
    """Write activations of a training step's batch, computed with the parameters before the step.

    Raises:
        UserError: the step, a point, a layer or a sequence does not exist, or `output` cannot be
            created.
    """
    with open_past(run, step, overrides) as past:
        compute = _capture_function(past.model, past.mesh, selection)
        walk = past.walk(step)
        microbatches, rows = walk.batch["labels"].shape[:2]
        numbers = _selected(selection.sequences, microbatches * rows, "the step's batch")
        values = _of_batch(compute, walk.state.variables, walk.batch, numbers)
        about = {"run": str(run), "training_step": step}
        _write(output, values, selection, numbers, past.model, about)


def from_set(
    path: Path,
    selection: Selection,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    sets: Sequence[str] = (),
    step: int | None = None,
    weights: Weights = "raw",
) -> None:
    """Write activations of sequences of the run's evaluation sets, or of `sets` ("NAME=DIR").

    Sequences are numbered over the concatenated sets.

    Raises:
        UserError: the checkpoint, a set, a point, a layer or a sequence does not exist, or
            `output` cannot be created.
    """
    trained = inference.open_run(
        path, [*overrides, *set_overrides(sets)], step=step, weights=weights
    )
    compute = _capture_function(trained.model, trained.mesh, selection)
    config = run_directory.read_config(trained.run, [*overrides, *set_overrides(sets)])
    config = trained.config.with_values({"eval": config.eval})
    if not config.eval.sources():
        raise UserError(f"{trained.run} has no [eval] section. Give --set NAME=DIR")
    datasets = list(sources.open_eval_data(config).values())
    numbers = _selected(selection.sequences, sum(map(len, datasets)), "the evaluation set")

    def values(params: Params) -> Iterator[Values]:
        capture = functools.partial(sequence_activations, compute, params, config, trained.mesh)
        first = 0
        for dataset in datasets:
            end = first + len(dataset)
            yield from capture(dataset, [n - first for n in numbers if first <= n < end])
            first = end

    with trained.in_use() as params:
        about = {"run": str(trained.run), "checkpoint": trained.step}
        _write(output, values(params), selection, numbers, trained.model, about)


def _capture_function(model: Model, mesh: Mesh, selection: Selection) -> Activations:
    last = model.config.n_layers - 1
    if absent := [n for n in selection.layers or () if n > last]:
        raise UserError(f"--layers: layer {absent[0]} does not exist: the model has 0 to {last}")
    return Activations(model, selection.points, selection.layers, mesh)


def _selected(sequences: int | Sequence[int], n: int, source: str) -> Sequence[int]:
    """Return the selected indices out of `n` sequences of a source."""
    if isinstance(sequences, int):
        return range(min(sequences, n))
    if sequences[-1] >= n:
        raise UserError(
            f"--sequences: sequence {sequences[-1]} does not exist: {source} has 0 to {n - 1}"
        )
    return sequences


def _of_batch(
    compute: Activations, params: Params, batch: Batch, numbers: Sequence[int]
) -> Iterator[Values]:
    """Yield the values of selected sequences of a batch [microbatches, rows, tokens]."""
    microbatches, size = batch["labels"].shape[:2]
    for i in range(microbatches):
        rows = [n - i * size for n in numbers if n // size == i]
        if rows:
            yield from compute(params, {name: x[i : i + 1] for name, x in batch.items()}, rows)


def _write(
    output: Path,
    values: Iterator[Values],
    selection: Selection,
    numbers: Sequence[int],
    model: Model,
    about: dict[str, Any],
) -> None:
    description = {
        **about,
        "points": list(selection.points),
        "layers": list(selection.layers or range(model.config.n_layers)),
        "sequences": list(numbers),
    }
    try:
        n = activation_files.write(output, map(jax.device_get, values), description)
    except OSError as error:
        raise UserError(f"--activations {output}: {error.strerror}") from error
    log.info("%d sequences in %s", n, output)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"--layers {text}: expected numbers of layers, such as 0,5")
    return tuple(map(int, numbers))


def _sequences(text: str) -> int | Sequence[int]:
    """Parse a number of sequences, a range, or a list of indices."""
    numbers, (first, colon, end) = text.split(","), text.partition(":")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if colon and first.isdecimal() and end.isdecimal() and int(first) < int(end):
        return range(int(first), int(end))
    if len(numbers) > 1 and all(number.isdecimal() for number in numbers):
        return sorted(set(map(int, numbers)))
    raise UserError(
        f"--sequences {text}: expected a number (64), a range (10:20) or indices (3,17)"
    )
