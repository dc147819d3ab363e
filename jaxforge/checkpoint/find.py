"""Where the checkpoints of a run are: `<run>/checkpoints/step_<n>`."""

from pathlib import Path

from jaxforge.errors import UserError

SUBDIRECTORY = "checkpoints"
PREFIX = "step"


def has_run(path: Path) -> bool:
    """Whether a path means a run of ours, or one of its checkpoints."""
    try:
        run, step = find(path)
    except UserError:
        return False
    # KempnerForge's steps have the same names.
    return (run / SUBDIRECTORY / f"{PREFIX}_{step}" / "state").is_dir()


def find(path: Path) -> tuple[Path, int]:
    """The run directory and step that a path to a run, or to one of its checkpoints, means.

    Raises:
        UserError: there is no checkpoint.
    """
    path = path.absolute()
    name, _, number = path.name.rpartition("_")
    if name == PREFIX and number.isdigit() and path.parent.name == SUBDIRECTORY:
        run, steps = path.parent.parent, [int(number)] if path.is_dir() else []
    else:
        run = path.parent if path.name == SUBDIRECTORY else path
        found = (run / SUBDIRECTORY).glob(f"{PREFIX}_*")
        steps = [int(n) for p in found if (n := p.name.removeprefix(f"{PREFIX}_")).isdigit()]
    if not steps:
        raise UserError(
            f"no checkpoint at {path}: expected a run directory with "
            f"{SUBDIRECTORY}/{PREFIX}_<n>, or one such checkpoint"
        )
    return run, max(steps)


def check_ours(directory: Path) -> None:
    """Checkpoints of PyTorch may have the same names; they must not be swept away with old ones.

    Raises:
        UserError: there are such.
    """
    for step in directory.glob(f"{PREFIX}_*"):
        if (step / ".metadata").exists() or (step / "pp0").is_dir():
            raise UserError(
                f"{step} is a checkpoint of PyTorch: give another checkpoint.dir, and "
                f"checkpoint.load_path = {str(directory)!r} to go on from there"
            )
