"""Activations in files: what `python -m jaxforge.activations` does."""

import argparse
import contextlib
import functools
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.console import Console

from jaxforge import inference, run_directory, storage
from jaxforge.data import loader, sources
from jaxforge.errors import UserError
from jaxforge.inference.evaluation import set_overrides
from jaxforge.model import capture
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel import host_memory
from jaxforge.replay.past import open_past
from jaxforge.step.context import spread_sequences
from jaxforge.step.gradients import Batch
from jaxforge.telemetry.console import setup_logging

log = logging.getLogger(__name__)

LOGITS = "logits"
POINTS = (*capture.POINTS, LOGITS)


class Wanted(NamedTuple):
    """What to keep.

    Attributes:
        points: names among `POINTS`.
        layers: numbers from 0; None: all.
        sequences: at most so many.
    """

    points: tuple[str, ...] = ("residual",)
    layers: tuple[int, ...] | None = None
    sequences: int = 64


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Captures, and says where."""
    wanted = Wanted(_points(args.points), _layers(args.layers), args.sequences)
    if args.output.exists():
        raise UserError(f"--output {args.output}: it exists already; name one that does not")
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    run = storage.path(args.run)
    if args.step is not None:
        from_step(run, args.step, wanted, args.output, overrides)
    else:
        from_set(run, wanted, args.output, overrides, sets=args.set)
    return 0


def from_step(
    run: Path, step: int, wanted: Wanted, output: Path, overrides: Sequence[str] = ()
) -> None:
    """Activations of the batch of a training step, with the parameters before it.

    Raises:
        UserError: there is no such step, point or layer, or `output` cannot be made.
    """
    with open_past(run, step, overrides) as past:
        walk = past.walk(step)
        batches = iter([walk.batch])
        about = {"run": str(run), "training_step": step}
        capture_to(output, past.model, walk.state.variables, batches, wanted, about)


def from_set(
    path: Path,
    wanted: Wanted,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    sets: Sequence[str] = (),
) -> None:
    """Activations of sequences of the run's evaluation set, or of `sets` ("NAME=DIR").

    Raises:
        UserError: there is no such checkpoint, set, point or layer, or `output` cannot be made.
    """
    trained = inference.open_run(path, [*overrides, *set_overrides(sets)])
    config = run_directory.read_config(trained.run, [*overrides, *set_overrides(sets)])
    config = trained.config.model_copy(update={"eval": config.eval})
    if not config.eval.sources():
        raise UserError(f"{trained.run} has no [eval]: give --set NAME=DIR or --step N")
    with trained.in_use() as params:
        batches = itertools.chain.from_iterable(
            loader.eval_batches(config, trained.mesh, dataset)
            for dataset in sources.open_eval_data(config).values()
        )
        about = {"run": str(trained.run), "checkpoint": trained.step}
        capture_to(output, trained.model, params, batches, wanted, about)


def capture_to(
    output: Path,
    model: Model,
    params: Params,
    batches: Iterator[Batch],
    wanted: Wanted,
    about: Mapping[str, Any],
) -> None:
    """Writes activations of batches [microbatches, rows, tokens] until there are enough of them."""
    layers = wanted.layers or tuple(range(model.config.n_layers))
    if absent := [n for n in layers if not 0 <= n < model.config.n_layers]:
        raise UserError(f"--layers: there is no layer {absent[0]}: the model has 0 to "
                        f"{model.config.n_layers - 1}")  # fmt: skip
    look = jax.jit(functools.partial(_values, model, wanted.points, layers))
    with _directory(output) as partial:
        files: dict[str, _Growing] = {}
        for microbatch in _microbatches(batches):
            left = wanted.sequences - (len(files["tokens"]) if files else 0)
            if left <= 0:
                break
            for name, values in _in_order(look(params, microbatch)).items():
                if name not in files:
                    files[name] = _Growing(partial / f"{name}.npy", values)
                files[name].add(values[:left])
        for file in files.values():
            file.close()
        told = {**about, "points": list(wanted.points), "layers": list(layers)}
        (partial / "activations.json").write_text(json.dumps(told, indent=2) + "\n")
    log.info("%d sequences in %s", len(files["tokens"]) if files else 0, output)


def _microbatches(batches: Iterator[Batch]) -> Iterator[Batch]:
    for batch in batches:
        for i in range(len(batch["labels"])):
            yield {name: x[i : i + 1] for name, x in batch.items()}


def _values(
    model: Model, points: Sequence[str], layers: tuple[int, ...], params: Params, batch: Batch
) -> dict[str, Array]:
    """Values [rows, ...] by name, and the `place` of each token in its sequence."""

    def keep(name: str, x: Array) -> Array | None:
        return x if name in points else None

    length = batch["labels"].shape[-1]
    place = jnp.broadcast_to(jnp.arange(length), batch["labels"].shape)
    batch = {name: x[0] for name, x in spread_sequences(model, {**batch, "place": place}).items()}
    place = batch.pop("place")
    with capture.watching(keep):
        hidden, out = model.forward(params, batch)
    values = {"place": place, "tokens": batch["input_ids"]}
    for name, of_layers in (out.seen or {}).items():
        chosen = model.stack.unstack(of_layers)[jnp.array(layers)]
        values[name] = jnp.moveaxis(chosen, 0, 1).astype(jnp.float32)
    if LOGITS in points:
        values[LOGITS] = model.logits(params, hidden)
    return values


def _in_order(values: dict[str, Array]) -> dict[str, np.ndarray]:
    """On the host, tokens in the order of their sequences."""
    found = jax.device_get(values)
    order = np.argsort(found.pop("place"), axis=-1)
    rows = np.arange(len(order))

    def sort(name: str, x: np.ndarray) -> np.ndarray:
        if name in capture.POINTS:  # [rows, layers, tokens, dim]
            return x[rows[:, None, None], np.arange(x.shape[1])[:, None], order[:, None]]
        return x[rows[:, None], order]

    return {name: sort(name, x) for name, x in found.items()}


class _Growing:
    """A `.npy` file that arrays are added to along their first axis."""

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self._file, self._like, self._n = path.open("w+b"), like, 0
        self._header()

    def __len__(self) -> int:
        return self._n

    def add(self, values: np.ndarray) -> None:
        """Adds rows at the end."""
        np.ascontiguousarray(values).tofile(self._file)
        self._n += len(values)

    def close(self) -> None:
        """Says in the header how many there are."""
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _header(self) -> None:
        shape = (self._n, *self._like.shape[1:])
        descr = np.lib.format.dtype_to_descr(self._like.dtype)
        described = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)  # with room for the number


@contextlib.contextmanager
def _directory(output: Path) -> Iterator[Path]:
    """A directory that has its name once it is whole."""
    partial = output.with_name(f".{output.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(output)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error


def _points(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in POINTS]:
        raise UserError(f"--points: there is no {unknown[0]!r}; choose of {', '.join(POINTS)}")
    return names


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = text.split(",")
    if not all(number.isdigit() for number in numbers):
        raise UserError(f"--layers {text}: expected numbers of layers, such as 0,5")
    return tuple(map(int, numbers))
