"""Entries of `progress.txt` during a run."""

from pathlib import Path

import jax

from jaxforge.checkpoint.paths import is_durable
from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.model.flops import causal_flops_per_token
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror
from jaxforge.telemetry.progress_log import NAME, ProgressLog
from jaxforge.training.callbacks.callback import EvalContext, RunCallback, RunParts


class ProgressTxt(RunCallback):
    """Writes a line for each checkpoint, and another when an asynchronous one is durable.

    Durability is checked at the next evaluation or checkpoint and at the end. Only for process 0.

    Args:
        progress: the counters of the run, read at each checkpoint.
    """

    def __init__(self, config: JobConfig, progress: Progress) -> None:
        self._progress, self._being_saved = progress, dict[int, Path]()
        self._asynchronous = config.checkpoint.async_mode != "disabled"
        self._flops_per_token = causal_flops_per_token(config.model, config.train.seq_len)
        path = mirror.files(config.checkpoint.dir) / NAME
        self._log = ProgressLog(path, jax.device_count(), self._flops)

    @classmethod
    def of_run(cls, run: RunParts) -> "ProgressTxt | None":
        """Return the callback of process 0 if `metrics.log_progress` is set."""
        is_writer = run.config.metrics.log_progress and jax.process_index() == 0
        return cls(run.config, run.progress) if is_writer else None

    @property
    def _flops(self) -> float:
        return float(self._progress.tokens * self._flops_per_token)

    def on_eval_end(
        self, metrics: dict[str, float], step: int, context: EvalContext | None = None
    ) -> None:
        """Check for durable checkpoints."""
        self.note_durable()

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Write the line of a checkpoint; the previous save has ended by now."""
        self.note_durable()
        event = "Saving async checkpoint" if self._asynchronous else "Saved checkpoint"
        self._log.append_checkpoint(event, step, self._flops, self._progress.tokens)
        if self._asynchronous:
            self._being_saved[step] = path

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Write the remaining lines; the last save has ended by now.

        Raises:
            StorageError: lines are lost.
        """
        self.note_durable()
        self._log.close()

    def note_durable(self) -> None:
        """Write a line for each checkpoint that has become durable."""
        for step, path in list(self._being_saved.items()):
            if is_durable(path):
                self._log.append("Saved async checkpoint", f"Iteration: {step}")
                del self._being_saved[step]
