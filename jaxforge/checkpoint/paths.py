"""Paths of checkpoints: `<run>/checkpoints/step_<n>`."""

import json
from pathlib import Path
from typing import Any

from jaxforge.cli.suggestions import path_hint
from jaxforge.errors import UserError
from jaxforge.storage import COMMITTED, urls

SUBDIRECTORY = "checkpoints"
PREFIX = "step"
EMA = "ema"
"""Name of the average of the parameters in a saved state."""
GROUPS = "groups"
"""Name of what groups that train apart have of their own in a saved state."""


def is_precision_specific(array: str) -> bool:
    """Return whether an array, given by its dotted name, exists only with some precision settings.

    When a run changes `train.mixed_precision` or `train.param_rounding`, such an array starts from
    zeros or is dropped.
    """
    # Tables of the config take a third of a second to declare; a supervisor needs none.
    from jaxforge.config.model import AMAX_HISTORIES
    from jaxforge.config.train import COMPENSATION

    prefixes = ("guard.loss_scale", f"optimizer.{COMPENSATION}.")
    return array.startswith(prefixes) or array.endswith(AMAX_HISTORIES)


def is_optional(array: str) -> bool:
    """Return whether a run can start without an array, or drop it, given its dotted name.

    These are precision-specific arrays and the average of the parameters.
    """
    return array.startswith(f"{EMA}.") or is_precision_specific(array)


def no_average(checkpoint: object) -> str:
    """Return the message for a checkpoint that has no average of the parameters."""
    return (
        f"--weights ema: {checkpoint} has no average of the parameters, which a run keeps with "
        "train.ema_decay. Remove --weights ema, or choose another checkpoint"
    )


def is_durable(checkpoint: Path) -> bool:
    """Return whether a checkpoint is durable; a local one has its name only then."""
    if urls.in_bucket(checkpoint):
        return (checkpoint / COMMITTED).exists()
    return checkpoint.is_dir()


def has_run(path: str | Path) -> bool:
    """Return whether a path or URL is a run of jaxforge or one of its checkpoints."""
    try:
        run, step = find(urls.path(path))
    except UserError:
        return False
    # KempnerForge names its steps in the same way.
    return (run / SUBDIRECTORY / f"{PREFIX}_{step}" / "state").is_dir()


def stored_config(path: str | Path) -> dict[str, Any]:
    """Return the config that the newest checkpoint at a path was written with.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    run, step = find(urls.path(path))
    file = run / SUBDIRECTORY / f"{PREFIX}_{step}" / "config" / "metadata"
    try:
        values = json.loads(file.read_text())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({str(error)[:160]})") from error
    return values


def find(path: Path) -> tuple[Path, int]:
    """Return the run directory and step of a checkpoint, or of the newest checkpoint of a run.

    Args:
        path: path of a run, of its checkpoint directory or of a checkpoint.

    Raises:
        UserError: there is no checkpoint.
    """
    path = path.absolute()
    hint = ""
    name, _, number = path.name.rpartition("_")
    if name == PREFIX and number.isdigit() and path.parent.name == SUBDIRECTORY:
        run, steps = path.parent.parent, [int(number)] if is_durable(path) else []
    else:
        run = path.parent if path.name == SUBDIRECTORY else path
        steps, hint = durable_steps(run), path_hint(run)
    if not steps:
        raise UserError(
            f"no checkpoint at {path}: expected a run directory with "
            f"{SUBDIRECTORY}/{PREFIX}_<n>, or one such checkpoint{hint}"
        )
    return run, max(steps)


def find_step(path: Path, step: int | None) -> tuple[Path, int]:
    """Return the run directory and step of a checkpoint.

    Args:
        path: path of a run or of one of its checkpoints.
        step: the step; None: the newest, or the one that `path` names.

    Raises:
        UserError: there is no such checkpoint.
    """
    run, newest = find(path)
    if step is None:
        return run, newest
    try:
        return find(run / SUBDIRECTORY / f"{PREFIX}_{step}")
    except UserError as error:
        raise UserError(f"{error}; the newest of {run} is step {find(run)[1]}") from None


def durable_steps(run: Path) -> list[int]:
    """Return the steps of a run's durable checkpoints, unordered."""
    paths = filter(is_durable, (run / SUBDIRECTORY).glob(f"{PREFIX}_*"))
    return [int(n) for p in paths if (n := p.name.removeprefix(f"{PREFIX}_")).isdigit()]


def check_path(directory: Path) -> None:
    """Check that checkpoints written to a path can be read again.

    Raises:
        UserError: the path contains characters that Orbax or TensorStore interpret.
    """
    path = str(directory.absolute())
    if special := sorted({"*", "?", "[", "\\"} & set(path)):
        raise UserError(
            f"{path}: checkpoints under a path with {' or '.join(special)} could not be read "
            "again: Orbax looks for its files by patterns, and TensorStore takes \\ for /; give a "
            "directory without"
        )


def check_no_torch_checkpoints(directory: Path) -> None:
    """Check that a directory has no PyTorch checkpoints, which retention would delete.

    Raises:
        UserError: there is a PyTorch checkpoint.
    """
    for step in directory.glob(f"{PREFIX}_*"):
        if (step / ".metadata").exists() or (step / "pp0").is_dir():
            raise UserError(
                f"{step} is a checkpoint of PyTorch: give another checkpoint.dir, and "
                f"checkpoint.load_path = {str(directory)!r} to continue from there"
            )
