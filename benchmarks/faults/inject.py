"""Training process with an injected fault, otherwise started like a user's.

    python -m benchmarks.faults.inject NAME '{"argument": value, ...}' --config FILE ...

Faults are injected by hooks and by replaced library functions; the loop is unchanged. A fault
occurs after its step. `signal` numbers are sent to the process itself.
"""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.faults import data, pace
from jaxforge import program as program_module
from jaxforge.checkpoint import restore
from jaxforge.cli.running import leave, run_main
from jaxforge.commands import train
from jaxforge.data.token_file import TokenFile
from jaxforge.data.tokens import TokenShards
from jaxforge.model.transformer import Params
from jaxforge.parallel import compilation
from jaxforge.state.train_state import TrainState
from jaxforge.step.gradients import Gradients
from jaxforge.step.train_step import Batch, CompiledSteps, Controls, Metrics, TrainStep
from jaxforge.step.update_loss import Loss
from jaxforge.training import evaluation, launch
from jaxforge.training.callbacks.callback import Callback, StepContext

FOREVER = 3600.0


class AfterStep(Callback):
    """Callback that calls a function after each step from `first` on, until it returns True."""

    def __init__(self, first: int, action: Callable[[int], bool | None]) -> None:
        self._first, self._action, self._done = first, action, False

    def on_step_end(self, context: StepContext) -> None:
        """Call the function."""
        if context.step >= self._first and not self._done:
            self._done = bool(self._action(context.step))


class AtSave(Callback):
    """Callback that calls a function once when a save of `step` or a later step has started."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self._step, self._actions = step, [action]

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Call the function."""
        if step >= self._step and self._actions:
            self._actions.pop()()


def hit(number: int) -> bool:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)
    return True


def later(seconds: float, action: Callable[[], object]) -> None:
    """Call a function in another thread."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def signal_in_step(step: int, number: int, pause: float = 0.0) -> Callback:
    """Send a signal while the loop runs, which then sleeps after each step.

    Other processes receive a signal once a second; without sleeping, a short run would end first.
    """
    todo = [functools.partial(hit, number)]

    def act(_: int) -> bool:
        if todo:
            todo.pop()()
        time.sleep(pause)
        return not pause

    return AfterStep(step, act)


def signal_in_save(step: int, number: int, seconds: float = 0.0) -> Callback:
    """Send a signal some time after a save has started."""
    return AtSave(step, lambda: later(seconds, lambda: hit(number)))


def signal_in_compilation(number: int) -> None:
    """Send a signal while the step is compiled, which takes a minute."""
    compile_step = compilation.compile_step

    def slowly(*args: object) -> jax.stages.Compiled:
        hit(number)
        time.sleep(60)
        return compile_step(*args)

    compilation.compile_step = slowly


def signal_in_evaluation(batch: int, number: int, pause: float = 0.0) -> None:
    """Send a signal before a batch of an evaluation, which then sleeps before each batch."""
    batches_of = evaluation.eval_batches

    def batches(*args: object) -> Iterator[Batch]:
        for i, item in enumerate(batches_of(*args)):
            if i == batch:
                hit(number)
            if i >= batch:
                time.sleep(pause)
            yield item

    evaluation.eval_batches = batches


def signal_in_restore(number: int, seconds: float = 0.0) -> None:
    """Send a signal some time after a restore has started."""

    def act() -> None:
        later(seconds, lambda: hit(number))
        if not seconds:
            time.sleep(0.2)  # the signal is received before the restore

    before_restore(act)


def make_file_in_restore(path: str) -> None:
    """Create a file when a restore starts, and wait until somebody may have reacted."""

    def act() -> None:
        Path(path).touch()
        time.sleep(1)

    before_restore(act)


def before_restore(action: Callable[[], object]) -> None:
    """Call a function before a start restores a checkpoint."""
    start_from = restore.start_from

    def restored(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        action()
        return start_from(*args, **options)

    restore.start_from = restored


def signal_while_waiting(window: int, number: int) -> None:
    """Send a signal while the loop waits for a read that never ends."""
    before_windows(window, functools.partial(_stall, number))


def _stall(number: int) -> None:
    later(1.0, lambda: hit(number))  # by then the steps before it are done
    time.sleep(FOREVER)


def hang_in_read(window: int) -> None:
    """Make a read hang forever."""
    before_windows(window, lambda: time.sleep(FOREVER))


def vanish(window: int, path: str) -> None:
    """Remove a file of tokens before `window` is read."""
    before_windows(window, lambda: Path(path).unlink(missing_ok=True))


def cut(window: int, path: str) -> None:
    """Truncate a file of tokens before `window` is read."""
    before_windows(window, lambda: os.truncate(path, 1000))


def cut_mapped(window: int, path: str, size: int) -> None:
    """Truncate a file of tokens once it is mapped for `window` or later ones.

    The kernel then sends the signal of a page that cannot be read.
    """
    armed = threading.Event()
    before_windows(window, armed.set)
    map_file = TokenFile.map

    def map_and_cut(self: TokenFile, *args: Any) -> Any:  # noqa: ANN401
        tokens = map_file(self, *args)
        if armed.is_set() and str(self.path) == path:
            os.truncate(path, size)
        return tokens

    TokenFile.map = map_and_cut


def make_file(step: int, path: str, until: int | None = None) -> Callback:
    """Create a file after a step, and remove it after another."""

    def act(now: int) -> bool:
        if until is not None and now >= until:
            Path(path).unlink()
            return True
        if now == step and until is not None:
            time.sleep(1)  # a save that is under way gets done
        Path(path).touch()
        return until is None

    return AfterStep(step, act)


def before_windows(window: int, action: Callable[[], object]) -> None:
    """Call a function before each read of a window from `window` on."""
    batch = TokenShards.batch

    def of(self: TokenShards, indices: Sequence[int]) -> np.ndarray:
        if self.directory.name == data.TRAINING and max(indices) >= window:
            action()
        return batch(self, indices)

    TokenShards.batch = of


def clock_jump(step: int, seconds: float) -> Callback:
    """Make Python's clocks jump; monotonic clocks only jump forwards."""

    def jump(_: int) -> bool:
        for name, offset in (("time", seconds), ("monotonic", abs(seconds)),
                             ("perf_counter", abs(seconds))):  # fmt: skip
            clock = getattr(time, name)
            setattr(time, name, lambda clock=clock, offset=offset: clock() + offset)
        return True

    return AfterStep(step, jump)


def clock_from_start(offset: float = 0.0, rate: float = 1.0) -> None:
    """Set Python's clocks off, or let them run slow or fast, from the first import on."""
    for name, shift in (("time", offset), ("monotonic", 0.0), ("perf_counter", 0.0)):
        clock = getattr(time, name)
        began = clock()

        def altered(
            clock: Callable[[], float] = clock, began: float = began, shift: float = shift
        ) -> float:
            return began + shift + (clock() - began) * rate

        setattr(time, name, altered)


def fill_disk(step: int, directory: str, until: int | None = None) -> Callback:
    """Fill the disk of `directory` from a step on, until after `until`."""
    ballast = Path(directory) / "ballast"

    def act(now: int) -> bool:
        if now == step and until is not None:
            time.sleep(1)  # a save that is under way gets done
        if until is not None and now >= until:
            ballast.unlink()
            return True
        _fill(ballast)
        return until is None

    return AfterStep(step, act)


def _fill(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            return


def read_only(step: int, directory: str) -> Callback:
    """Make a mounted directory read-only."""

    def act(_: int) -> bool:  # refused as long as a save is writing there
        command = ["mount", "-o", "remount,bind,ro", directory]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    return AfterStep(step, act)


def spoil(what: str, first: int, count: int = 1) -> None:
    """Make loss or gradients of batches from `first` on NaN, infinite or far too large."""
    make_gradients = program_module.make_gradients
    low = data.MARKS + first

    def make(*args: object) -> Gradients:
        gradients = make_gradients(*args)

        def of(
            params: Params, state: Params, batch: Batch, scale: Array | None = None
        ) -> tuple[Params, Loss]:
            grads, loss = gradients(params, state, batch, scale)
            ids = batch["input_ids"]
            bad = jnp.any((ids >= low) & (ids < low + count))
            return SPOILERS[what](bad, grads, loss)

        return of

    program_module.make_gradients = make


def _spoil_loss(value: float, bad: Array, grads: Params, loss: Loss) -> tuple[Params, Loss]:
    return grads, _with_value(loss, jnp.where(bad, value, loss.value))


def _spike(bad: Array, grads: Params, loss: Loss) -> tuple[Params, Loss]:
    return grads, _with_value(loss, loss.value * jnp.where(bad, 100.0, 1.0))


def _with_value(loss: Loss, value: Array) -> Loss:
    return loss._replace(aux=loss.aux._replace(loss_terms={"spoiled": value}))


def _spoil_gradients(bad: Array, grads: Params, loss: Loss) -> tuple[Params, Loss]:
    head = grads["output_head"]["proj"]
    first = head["weight"].at[0, 0].set(jnp.where(bad, jnp.nan, head["weight"][0, 0]))
    return {**grads, "output_head": {"proj": {**head, "weight": first}}}, loss


def mend_when_run_again(first: int) -> None:
    """Plant a NaN that disappears when the same step is run again, as a faulty machine would."""
    spoil("NaN loss", first)
    lookup = CompiledSteps.__getitem__

    def mended(self: CompiledSteps, microbatches: int) -> TrainStep:
        step = lookup(self, microbatches)

        def run_step(
            state: TrainState, batch: Batch, controls: Controls
        ) -> tuple[TrainState, Metrics]:
            if not controls.apply:
                ids = jnp.where(batch["input_ids"] == data.MARKS + first, 0, batch["input_ids"])
                batch = {**batch, "input_ids": ids}
            return step(state, batch, controls)

        return run_step

    CompiledSteps.__getitem__ = mended


SPOILERS = {
    "NaN loss": functools.partial(_spoil_loss, jnp.nan),
    "infinite loss": functools.partial(_spoil_loss, jnp.inf),
    "NaN gradient": _spoil_gradients,
    "spike": _spike,
}

FAULTS: dict[str, Callable[..., Callback | None]] = {
    fault.__name__: fault
    for fault in (signal_in_step, signal_in_save, signal_in_compilation, signal_in_evaluation,
                  signal_in_restore, signal_while_waiting, hang_in_read, vanish, cut, cut_mapped,
                  make_file, make_file_in_restore, clock_jump, clock_from_start, fill_disk,
                  read_only, spoil, mend_when_run_again, pace.measure)
}  # fmt: skip


def main() -> int:
    """Train with the fault of the command line."""
    name, arguments, *options = sys.argv[1:]
    hook = FAULTS[name](**json.loads(arguments))
    config = train.parse_command_line(options)
    assert config is not None
    return launch.fit(config, [hook] if hook else []).code


if __name__ == "__main__":
    leave(run_main(main, outlives_reader=True))
