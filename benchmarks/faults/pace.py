"""Slow steps: for faults from outside that must hit a short run, and to measure the loop."""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxforge.runs.attempts import AttemptLog
from jaxforge.step.train_step import Batch, CompiledSteps, TrainStep
from jaxforge.storage import run_lock
from jaxforge.telemetry.metric_writers import MetricWriter
from jaxforge.training.callbacks.callback import Callback, StepContext
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.saving import Saver
from jaxforge.training.training_data import TrainingData

STEP_SEC = 0.1
SETTLING, COUNTED = 4, 20
"""Updates of a block before and while it is measured: two lines of metrics."""
BLOCK = SETTLING + COUNTED


class Pace(Callback):
    """Callback that sleeps after each step."""

    def on_step_end(self, context: StepContext) -> None:
        """Sleep."""
        time.sleep(STEP_SEC)


def _skip(*_: Any, **__: Any) -> None:  # noqa: ANN401 (whatever the replaced method takes)
    pass


LOOP = "loop"
_THREADS = [(Watchdog, "idle", _skip), (AttemptLog, "_write", _skip), (run_lock, "_read", _skip)]
FEATURES: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    LOOP: _THREADS,
    "batches": [],
    "metrics": [(MetricWriter, "due", lambda *_: False)],
    "watching": [*_THREADS, (run_lock.RunLock, "check", _skip), (Watchdog, "tick", _skip)],
}
"""Feature -> the methods that are replaced to leave it out."""
EVENTS: dict[str, tuple[type, str]] = {
    "checkpoint": (Saver, "is_due"),
    "replica": (Saver, "is_replica_due"),
}
"""Event -> the method that returns after which step it takes place."""


def measure(path: str, plan: Sequence[str]) -> None:
    """Measure the updates of this process with `meter`."""
    launches, usual = meter(Path(path), plan), CompiledSteps.__getitem__
    next(launches)

    def paced(steps: CompiledSteps, microbatches: int) -> TrainStep:
        step = usual(steps, microbatches)
        return lambda *arguments: launches.send((step, *arguments))

    CompiledSteps.__getitem__ = paced


def meter(path: Path, plan: Sequence[str]) -> Generator[Any, Any, None]:
    """Launch the steps of a run; measure blocks of updates that differ from the usual loop.

    The host sleeps after each launch, as it does while an accelerator computes. Sleeping takes no
    CPU time, and the step of a tiny model little. No work of the loop is hidden behind the step.

    Args:
        path: file for a sample of each block: its name, CPU seconds and seconds of an update.
        plan: the blocks: a feature that is left out, an event, `LOOP` for the step without the
            loop, or "" for the usual loop.
    """
    samples, launched = [], 0
    step, state, batch, controls = yield
    for name in plan:
        copy = jax.tree.map(jnp.copy, state) if name == LOOP else None
        with _replaced(name, batch, launched + SETTLING + 1):
            for update in range(BLOCK):
                if update == SETTLING:
                    since = _clocks()
                if name == LOOP:
                    copy, _ = step(copy, batch, controls)
                    time.sleep(STEP_SEC)
                    continue
                result = step(state, batch, controls)
                time.sleep(STEP_SEC)
                launched += 1
                step, state, batch, controls = yield result
            elapsed = zip(_clocks(), since, strict=True)
        samples.append((name, *((now - before) / COUNTED for now, before in elapsed)))
    path.write_text(json.dumps(samples))
    while True:
        step, state, batch, controls = yield step(state, batch, controls)


@contextlib.contextmanager
def _replaced(name: str, batch: Batch, step: int) -> Iterator[None]:
    """Replace methods within a block: repeat `batch`, or cause an event after `step`."""
    replaced = list(FEATURES.get(name, []))
    if name == "batches":
        replaced.append((TrainingData, "__next__", lambda _: batch))
    if name in EVENTS:
        replaced.append((*EVENTS[name], lambda _, at, *__, **___: at == step))
    with contextlib.ExitStack() as stack:
        for replacement in replaced:
            stack.enter_context(mock.patch.object(*replacement))
        yield


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()
