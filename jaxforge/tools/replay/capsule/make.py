"""Makes the capsule of a run."""

import json
import logging
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.cli.redaction import redacted, redacted_value
from jaxforge.config import axes
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.tools.replay.account import logged_steps, logged_values
from jaxforge.tools.replay.capsule import ingredients
from jaxforge.tools.replay.capsule.archive import CURVE, Capsule
from jaxforge.tools.replay.past import open_past

log = logging.getLogger(__name__)

_CURVE = ("train/loss", "train/grad_norm")


def capsule_of(run: Path) -> Capsule:
    """What is to be known of a run, where it was trained.

    Args:
        run: its directory.

    Raises:
        UserError: there is no such run, it has logged nothing, or it had other devices.
    """
    run_directory.read_config(run)
    steps = logged_steps(run)
    if not steps:
        raise UserError(f"{run / 'metrics.jsonl'} has no steps: a capsule needs the run's curve")
    programs: dict[str, dict[str, str]] = {}
    about: dict[str, Any] = {}
    for first, last in run_directory.steps_by_start(run, 1, max(steps)):
        config = run_directory.config_of_step(run, last)
        with open_past(run, last, _mesh(config)) as past:
            _check_devices(config, past.config)
            programs[str(first)] = ingredients.program(past)
            about = {
                "mesh": dict(past.mesh.shape),
                "seeds": {"train.seed": past.config.train.seed,
                          "train.data_seed": past.config.train.data_seed},
                "code": ingredients.code(past.config),
                "data": ingredients.data(past.config),
            }  # fmt: skip
    about |= {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxforge": version("jaxforge"),
        "machine": ingredients.machine(),
        "environment": ingredients.environment(),
        "packages": ingredients.packages(),
        "programs": programs,
        "checkpoints": _checkpoints(run),
    }
    files = _files(run, about["packages"])
    return Capsule(redacted_value(about), {name: redacted(x) for name, x in files.items()})


def _mesh(config: JobConfig) -> list[str]:
    """Settings that take the devices that are here, where nothing says how many there were."""
    left = [axis for axis in axes.AXES if getattr(config.distributed, axis) == -1]
    if not left or not (config.train.global_batch_size or config.train.batch_ramp):
        return []
    log.info("distributed.%s = -1: taken to be the %d devices here", left[0], jax.device_count())
    return [f"--distributed.{left[0]}=-1"]


def _check_devices(config: JobConfig, here: JobConfig) -> None:
    """A capsule says which devices the run had: they must be here."""
    if config.distributed != here.distributed:
        raise UserError(
            f"the run's mesh was {config.distributed}, which {jax.device_count()} devices do not "
            "make: make its capsule where it was trained"
        )


def _checkpoints(run: Path) -> list[int]:
    checkpoints = Checkpoints(run, run_directory.read_config(run).checkpoint, read_only=True)
    try:
        return sorted(checkpoints.steps())
    finally:
        checkpoints.close()


def _files(run: Path, packages: dict[str, str]) -> dict[str, str]:
    files = {"config.toml": (run / "config.toml").read_text()}
    for start in sorted((run / "configs").glob("from_step_*.toml")):
        files[f"configs/{start.name}"] = start.read_text()
    files["packages.txt"] = "".join(f"{name}=={number}\n" for name, number in packages.items())
    return files | {CURVE: _curve(run)}


def _curve(run: Path) -> str:
    """Write loss and gradient norm of each logged step, digit for digit."""
    return "".join(
        json.dumps({name: values[name] for name in ("step", *_CURVE)}) + "\n"
        for values in logged_values(run)
    )
