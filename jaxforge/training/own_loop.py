"""Building blocks for your own training loop around `jaxforge.Program` (examples/textbook.py)."""

from collections.abc import Iterator

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.cli.running import run_main
from jaxforge.data.loader import training_batches
from jaxforge.data.sources import open_eval_data, open_training_data
from jaxforge.optim.schedule import learning_rate
from jaxforge.parallel.multihost import initialize
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.step.train_step import Batch, Controls
from jaxforge.training import saving
from jaxforge.training.evaluation import Evaluator, summary
from jaxforge.training.result import StepResult

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
