"""Exports checkpoints as Hugging Face directories while training goes on: `<run>/exports/step_<n>`.

Each export is a process of its own that reads a durable checkpoint, so that the loop neither waits
for it nor shares its interpreter with it. A failed export never stops a run, and is its last word.
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
from jaxforge.training.callbacks.callback import Callback

log = logging.getLogger(__name__)

SUBDIRECTORY = "exports"
_POLL = 0.2  # seconds


class Exporter(Callback):
    """Exports every n-th checkpoint, and the last one where asked.

    Args:
        config: the `[checkpoint]` section.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config, self._saves = config, 0
        self._threads: dict[Path, threading.Thread] = {}
        self._failures: list[str] = []
        self._last: Path | None = None
        self._ended = threading.Event()

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Begins the export of a checkpoint, if it is due, for when it is durable."""
        self._saves, self._last = self._saves + 1, path
        every = self._config.export_interval
        if every and self._saves % every == 0:
            self._begin(path)

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Waits for all exports; no save is under way any more.

        Raises:
            StorageError: one failed.
        """
        if self._config.export_last and (last := self._last or self._newest()):
            self._begin(last)
        self._ended.set()
        for thread in self._threads.values():
            thread.join()
        if self._failures:
            raise StorageError("not every export was made:\n  " + "\n  ".join(self._failures))

    def _newest(self) -> Path | None:
        """The last checkpoint of a run that has saved none since it was started."""
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
        while not is_durable(path):  # its directory appears under its name when it is durable
            if self._ended.wait(_POLL) and not is_durable(path):
                self._failures.append(f"{path}: the checkpoint was not written, or is deleted")
                return
        target = path.parent.parent / SUBDIRECTORY / path.name
        if target.exists():
            log.info("%s is there already", target)
            return
        command = [sys.executable, "-m", "torch_compat", "export", str(path), str(target)]
        options = ["--to=hf", f"--dtype={self._config.export_dtype}"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        if done.returncode:
            what = done.stderr.strip().splitlines()[-1:] or ["no message"]
            self._failures.append(f"{target}: {what[0]}")
            log.error("export failed: %s", what[0])
        else:
            log.info("exported to %s", target)
