"""Your own code in the loop: subclass `Hook`, name it in `plugins.hooks` or pass it to `run`."""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What a hook sees of a step. Scalars are fetched from the device when they are read.

    Attributes:
        step: steps attempted.
        state: parameters and optimizer state after the step; gone once the next step starts.
        metrics: the step's metrics, on the device.
    """

    step: int
    state: TrainState
    metrics: dict[str, Any]

    @property
    def tokens_seen(self) -> int:
        """Tokens of applied updates."""
        return int(self.metrics["counts"].tokens)

    @property
    def loss(self) -> float:
        """Loss of the update; NaN if no label counts."""
        return float(self.metrics["loss"])

    @property
    def losses(self) -> dict[str, float]:
        """Its terms by name, where it has several."""
        return {name: float(term) for name, term in self.metrics.get("losses", {}).items()}

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return float(self.metrics["grad_norm"])

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self.metrics["lr"])

    @property
    def gradients(self) -> PyTree:
        """Gradients before clipping; only for hooks that collect "grads"."""
        return self.metrics["grads"]


class Hook:
    """Does nothing at every event; override what you need."""

    collect: tuple[str, ...] = ()
    """What every step is to compute for `on_step_end`, among `step.collect.COLLECTED`."""

    def on_train_begin(self, config: JobConfig) -> None:
        """Before the first step."""

    def on_step_end(self, context: StepContext) -> None:
        """After each step, once its metrics (where due) are logged."""

    def on_eval_begin(self, step: int) -> None:
        """Before each evaluation; not again where a run resumes in one."""

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """After each evaluation, once its metrics are logged."""

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """When a save has started; it may not be durable yet."""

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Last of all, also when the run fails (`reason` is None then).

        Threads of yours that must come to their end do so in here: `python -m jaxforge.train` waits
        half a minute for others, and leaves.
        """


def named_hook(path: str) -> Hook:
    """A hook of `plugins.hooks`.

    Args:
        path: such as "my_module.MyHook".

    Raises:
        UserError: it is no class of hooks.
    """
    module, _, name = path.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    if not (isinstance(made, type) and issubclass(made, Hook)):
        raise UserError(f"plugins.hooks: {path} is no subclass of jaxforge.training.hooks.Hook")
    return made()


class HookRunner(Hook):
    """Calls each hook in order."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = tuple(hooks)
        self.collect = tuple(name for hook in hooks for name in hook.collect)
        self.watches_steps = any(type(h).on_step_end is not Hook.on_step_end for h in hooks)

    def on_train_begin(self, config: JobConfig) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_train_begin(config)

    def on_step_end(self, context: StepContext) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_step_end(context)

    def on_eval_begin(self, step: int) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_eval_begin(step)

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_eval_end(metrics, step)

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_checkpoint_save(step, path)

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Calls each hook."""
        for hook in self._hooks:
            hook.on_train_end(step, tokens_seen, reason)
