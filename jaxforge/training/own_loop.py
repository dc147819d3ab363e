"""Building blocks for your own training loop around `jaxforge.Program` (examples/textbook.py).

`StepResult` is the result of a step under the names of Megatron's `train_step`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import PyTree

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.cli.running import run_main
from jaxforge.config.train import TrainConfig
from jaxforge.data.loader import training_batches
from jaxforge.data.sources import open_eval_data, open_training_data
from jaxforge.exit_codes import Exit
from jaxforge.optim.schedule import learning_rate
from jaxforge.parallel.multihost import initialize
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.step.train_step import Batch, Controls
from jaxforge.training import saving
from jaxforge.training.evaluation import Evaluator, summary

__all__ = [
    "Controls", "SavePolicy", "StepResult", "initialize", "learning_rate", "open_batches",
    "open_checkpoints", "open_evaluator", "run_main", "starting_state", "summary",
]  # fmt: skip


def open_checkpoints(program: Program) -> Checkpoints:
    """Open the checkpoints in `checkpoint.dir`, which may be empty."""
    return saving.open_checkpoints(program.config, program.model)


def open_batches(program: Program, progress: Progress) -> Iterator[Batch]:
    """Return the batches of all remaining updates, on the devices.

    Raises:
        UserError: the data are missing or damaged, or do not fit the model.
    """
    # From the recorded position on, so that a resumed loop draws what an uninterrupted one would.
    config, dataset = program.config, open_training_data(program.config)
    n_updates = config.train.max_steps - progress.step
    return training_batches(config, program.mesh, dataset, progress.samples, n_updates=n_updates)


def open_evaluator(program: Program) -> Evaluator:
    """Return an evaluator for the sets of `[eval]`.

    Raises:
        UserError: the data are missing or damaged, or do not fit the model.
    """
    config = program.config
    return Evaluator(config, program.mesh, program.model, open_eval_data(config), tokenizer=None)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """A typed view of a step's metrics. Values are fetched from the device when they are read.

    Reading one waits for the step; a loop that reads them every step should launch the next first.

    Attributes:
        metrics: metrics that the step returned, on the device.
        config: the `[train]` section, with the limit on bad steps.
    """

    metrics: Mapping[str, Any]
    config: TrainConfig

    @property
    def loss_dict(self) -> dict[str, float]:
        """Losses by name. "lm loss" is the minimised loss, normalised as `train.loss_norm` says.

        The terms in `metrics["losses"]` are added, reduced by `reduce_loss`.
        """
        terms = self.metrics.get("losses", {})
        return {
            "lm loss": float(self.metrics["loss"]),
            **{name: reduce_loss(name, value) for name, value in terms.items()},
        }

    @property
    def skipped_iter(self) -> int:
        """1 if the update was not applied because the step was bad or excluded; else 0."""
        return int(not self.metrics["applied"])

    @property
    def should_checkpoint(self) -> bool:
        """True if the state should be saved before continuing. It is always False.

        Skipped updates do not change the state, and a checkpoint of a run that gives up would
        displace a better one.
        """
        return False

    @property
    def should_exit(self) -> bool:
        """True if the guard has stopped the run: the state no longer changes (`step.guard`)."""
        return int(self.metrics["consecutive"]) >= self.config.nan_consecutive_max

    @property
    def exit_code(self) -> int:
        """Exit code (`training.preemption`); 0 unless `should_exit`."""
        return Exit.NON_FINITE.code if self.should_exit else 0

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return float(self.metrics["grad_norm"])

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self.metrics["lr"])

    @property
    def num_zeros_in_grad(self) -> int | None:
        """Zeros in the gradients; None if not collected."""
        value = self.metrics.get("num_zeros_in_grad")
        return None if value is None else int(value)

    @property
    def params_norm(self) -> float | None:
        """L2 norm of the parameters after the step; None if not collected."""
        return self._optional("params_norm")

    @property
    def update_norm(self) -> float | None:
        """L2 norm of the change of the parameters in the step; None if not collected."""
        return self._optional("update_norm")

    @property
    def grads(self) -> PyTree | None:
        """Gradients before clipping, on the device; None if not collected."""
        return self.metrics.get("grads")

    def _optional(self, name: str) -> float | None:
        value = self.metrics.get(name)
        return None if value is None else float(value)


def reduce_loss(name: str, value: Any) -> float:  # noqa: ANN401  # what numpy takes
    """Reduce a loss over microbatches to one number.

    Args:
        name: name of the loss, for the error message.
        value: [m, 2] or [2]: sums and divisors of m microbatches, or of all of them. The result is
            Σ sums / Σ divisors, or NaN if the divisor is 0. [m, 1] or [1]: means, which are
            averaged.

    Raises:
        ValueError: the value has another shape.
    """
    array = np.atleast_2d(np.asarray(value, np.float64))
    if array.ndim != 2 or array.shape[1] not in (1, 2):
        raise ValueError(
            f"loss {name!r} has shape {np.shape(value)}. Return [sum, divisor] or [mean], or one "
            "of these for each microbatch"
        )
    if array.shape[1] == 1:
        return float(array.mean())
    # Summed before the division: microbatches with few tokens count less.
    total, divisor = array.sum(axis=0)
    return float(total / divisor) if divisor else float("nan")
