"""Keeps `progress.txt` while a run goes on."""

from pathlib import Path

import jax

from jaxforge.checkpoint.paths import is_durable
from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror
from jaxforge.telemetry.flops import causal_flops_per_token
from jaxforge.telemetry.progress_log import NAME, ProgressLog
from jaxforge.training.callbacks.callback import Callback


class ProgressTxt(Callback):
    """Tells the progress log of checkpoints: of asynchronous ones again when they are durable.

    That is noticed at the next evaluation, checkpoint or at the end. Only for process 0.

    Args:
        config: the run's.
        progress: the run's own counts, as of where it starts; read again at each checkpoint.
    """

    def __init__(self, config: JobConfig, progress: Progress) -> None:
        self._progress, self._being_saved = progress, dict[int, Path]()
        self._asynchronous = config.checkpoint.async_mode != "disabled"
        self._flops_per_token = causal_flops_per_token(config.model, config.train.seq_len)
        path = mirror.files(config.checkpoint.dir) / NAME
        self._log = ProgressLog(path, jax.device_count(), self._flops)

    @property
    def _flops(self) -> float:
        return float(self._progress.tokens * self._flops_per_token)

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """A moment to look for durable checkpoints."""
        self.note_durable()

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Writes the checkpoint's line; the one before it is durable, or its save has failed."""
        self.note_durable()
        event = "Saving async checkpoint" if self._asynchronous else "Saved checkpoint"
        self._log.append_checkpoint(event, step, self._flops, self._progress.tokens)
        if self._asynchronous:
            self._being_saved[step] = path

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Comes after the last save has ended.

        Raises:
            StorageError: lines are lost.
        """
        self.note_durable()
        self._log.close()

    def note_durable(self) -> None:
        """Writes a line for each checkpoint that has come to stand under its name."""
        for step, path in list(self._being_saved.items()):
            if is_durable(path):
                self._log.append("Saved async checkpoint", f"Iteration: {step}")
                del self._being_saved[step]
