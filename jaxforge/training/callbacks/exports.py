"""Export of checkpoints to Hugging Face directories during training: `<run>/exports/step_<n>`.

Each export is a separate process that reads a durable checkpoint, so the loop neither waits for it
nor shares an interpreter with it. A failed export does not stop the run, but fails it at its end.
"""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import jax

from jaxforge.checkpoint.paths import PREFIX, find, is_durable
from jaxforge.checkpoint.paths import SUBDIRECTORY as CHECKPOINTS
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import StorageError
from jaxforge.exit_codes import Exit
from jaxforge.storage import urls
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)

SUBDIRECTORY = "exports"
_POLL = 0.2  # seconds


class Exporter(RunCallback):
    """Exports every n-th checkpoint, and the last one if `checkpoint.export_last` is set.

    Args:
        config: the `[checkpoint]` section.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config, self._saves = config, 0
        self._threads: dict[Path, threading.Thread] = {}
        self._failures: list[str] = []
        self._last: Path | None = None
        self._ended = threading.Event()

    @classmethod
    def of_run(cls, run: RunParts) -> "Exporter | None":
        """Return the callback if `checkpoint.export_interval` or `export_last` is set."""
        section = run.config.checkpoint
        return cls(section) if section.export_interval or section.export_last else None

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Start an export if it is due; it begins when the checkpoint is durable."""
        self._saves, self._last = self._saves + 1, path
        every = self._config.export_interval
        if every and self._saves % every == 0:
            self._begin(path)

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Wait for all exports; the last save is done by now.

        Raises:
            StorageError: an export failed.
        """
        if self._config.export_last and (last := self._last or self._newest()):
            self._begin(last)
        self._ended.set()
        for thread in self._threads.values():
            thread.join()
        if self._failures:
            raise StorageError("some exports failed:\n  " + "\n  ".join(self._failures))

    def _newest(self) -> Path | None:
        """Return the last checkpoint of a run that has saved none since this start."""
        run = urls.path(self._config.dir, "checkpoint.dir")
        if not (run / CHECKPOINTS).is_dir():
            return None
        _, step = find(run)
        return run.absolute() / CHECKPOINTS / f"{PREFIX}_{step}"

    def _begin(self, path: Path) -> None:
        if jax.process_index() == 0 and path not in self._threads:
            self._threads[path] = threading.Thread(target=self._export, args=(path,))
            self._threads[path].start()

    def _export(self, path: Path) -> None:
        while not is_durable(path):  # the directory appears under its name when it is durable
            if self._ended.wait(_POLL) and not is_durable(path):
                self._failures.append(f"{path}: the checkpoint was not written or has been deleted")
                return
        target = path.parent.parent / SUBDIRECTORY / path.name
        if target.exists():
            log.info("%s exists already: not exported again", target)
            return
        command = [sys.executable, "-m", "jaxforge", "convert", str(path), str(target)]
        dtype, weights = self._config.export_dtype, self._config.export_weights
        options = ["--to=hf", f"--dtype={dtype}", f"--weights={weights}"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            message = done.stderr.strip().splitlines()[-1:] or ["no message"]
            self._failures.append(f"{target}: {message[0]}")
            log.error("export failed: %s", message[0])
        else:
            log.info("exported to %s", target)
