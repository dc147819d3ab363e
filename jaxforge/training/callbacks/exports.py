"""Export of checkpoints to Hugging Face directories during training: `<run>/exports/step_<n>`.

Each export is a separate process that reads a durable checkpoint, so the loop neither waits for it
nor shares an interpreter with it. A failed export does not stop the run, but fails it at its end.
"""

import base64
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxforge.checkpoint.paths import PREFIX, find, is_durable
from jaxforge.checkpoint.paths import SUBDIRECTORY as CHECKPOINTS
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import StorageError, UserError
from jaxforge.exit_codes import Exit
from jaxforge.storage import urls
from jaxforge.training.callbacks.callback import RunCallback, RunParts

log = logging.getLogger(__name__)

_ARRAY, _BYTES, _TUPLE = "__array__", "__bytes__", "__tuple__"


def encode(value: Any, name: str) -> Any:  # noqa: ANN401 (any JSON)
    """Return the JSON of a state.

    Args:
        value: JSON values, tuples, bytes, and arrays of NumPy or JAX, in dicts with text keys.
        name: name of the value in error messages.

    Raises:
        UserError: the state contains a value of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key in (_ARRAY, _BYTES, _TUPLE):
                raise UserError(f"{name} has the key {key!r}. Use other text as the key")
        return {key: encode(part, f"{name}[{key!r}]") for key, part in value.items()}
    # Exact types: a subclass, such as a named tuple, would come back as another type.
    if type(value) in (list, tuple):
        parts = [encode(part, f"{name}[{i}]") for i, part in enumerate(value)]
        return parts if type(value) is list else {_TUPLE: parts}
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        # bfloat16 has kind V, as structured arrays, but those have no type of their name.
        if array.dtype.kind not in "biufcV" or np.dtype(array.dtype.name) != array.dtype:
            raise UserError(f"{name} is an array of {array.dtype}. Use an array of numbers")
        content = base64.b64encode(array.tobytes()).decode()
        shape = None if isinstance(value, np.generic) else list(array.shape)
        return {_ARRAY: content, "dtype": array.dtype.name, "shape": shape}
    raise UserError(
        f"{name} is of type {type(value).__name__}, which a checkpoint cannot store. Use numbers, "
        "text, bytes, arrays, lists, tuples and dicts"
    )


def decode(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    """Return the state whose JSON is `value`. Arrays are writable NumPy arrays."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    if _TUPLE in value:
        return tuple(decode(part) for part in value[_TUPLE])
    if _ARRAY in value:
        array = np.frombuffer(base64.b64decode(value[_ARRAY]), np.dtype(value["dtype"]))
        shape = value["shape"]
        return array[0] if shape is None else array.reshape(shape).copy()
    return {key: decode(part) for key, part in value.items()}


SUBDIRECTORY = "exports"
_POLL = 0.2  # seconds


class Exporter(RunCallback):
    """Exports every n-th checkpoint, and the last one if `checkpoint.export_last` is set."""

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
        # Exports read the checkpoint from disk, so one process is enough.
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
        # A process of its own: an export needs torch_compat and memory, and may fail.
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
