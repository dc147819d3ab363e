"""Capsules: the ingredients of a run and its loss curve in a file, and their verification.

Replayed losses must be bit-identical if program, machine, mesh, flags and JAX are the same. If one
of them differs, the order of sums may differ. Losses may then differ by the `rounding.tolerance`
of gradients, multiplied by the number of replayed steps.
"""

import argparse
import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxforge import __version__
from jaxforge.checkpoint.paths import SUBDIRECTORY, durable_steps, find
from jaxforge.cli.redaction import redacted, redacted_value
from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.config import axes
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.step.executable import PACKAGES
from jaxforge.storage import urls
from jaxforge.telemetry.console import begin_command
from jaxforge.tools.replay import capsule_file
from jaxforge.tools.replay.account import (
    LOGGED,
    RepeatedStep,
    logged_steps,
    logged_values,
    replayed,
)
from jaxforge.tools.replay.capsule_file import CURVE, Capsule
from jaxforge.tools.replay.capsule_ingredients import differences, ingredients_of
from jaxforge.tools.replay.past import open_past
from jaxforge.tools.replay.rounding import tolerance

log = logging.getLogger(__name__)

_BITS = ("program", "machine", "mesh", "environment", "JAX")
"""Ingredients on which the last digits depend."""

_STEPS = 3  # replayed by default
_SHOWN = 8  # printed differences of an ingredient


def make(args: argparse.Namespace) -> int:
    """Write a run's capsule; return the exit code."""
    begin_command()
    urls.local(args.capsule, "--capsule", "copy it there afterwards")
    capsule = capsule_of(urls.path(args.run))
    if jax.process_index() == 0:
        capsule_file.write(args.capsule, capsule)
        print(f"{args.capsule}: {args.capsule.stat().st_size:,} bytes")
    return 0


def capsule_of(run: Path) -> Capsule:
    """Return the capsule of a run; must be called on the devices of the run.

    Args:
        run: the run directory.

    Raises:
        UserError: the run does not exist, has logged nothing, or had other devices.
    """
    run_directory.read_config(run)
    if not (steps := logged_steps(run)):
        raise UserError(f"{run / 'metrics.jsonl'} has no steps: a capsule needs the run's curve")
    programs: dict[str, dict[str, str]] = {}
    about: dict[str, Any] = {}
    for first, last in run_directory.steps_by_start(run, 1, max(steps)):
        config = run_directory.config_of_step(run, last)
        with open_past(run, last, _mesh_settings(config)) as past:
            if config.distributed != past.config.distributed:
                raise UserError(
                    f"the run's mesh was {config.distributed}, which does not fit "
                    f"{jax.device_count()} devices: make the capsule where the run was trained"
                )
            about = ingredients_of(past)
            train = past.config.train
        programs[str(first)] = about.pop("program")
    about |= {
        "seeds": {"train.seed": train.seed, "train.data_seed": train.data_seed},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxforge": __version__,
        "programs": programs,
        "checkpoints": sorted(durable_steps(run)),
    }
    files = _files(run, about["packages"])
    # Names of packages such as google-auth look like keys of secrets, but versions are not secret.
    ingredients = redacted_value(about) | {"packages": about["packages"]}
    return Capsule(ingredients, {name: redacted(x) for name, x in files.items()})


def _mesh_settings(config: JobConfig) -> list[str]:
    """Return settings that use all devices if the run's number of devices is unknown."""
    left = [axis for axis in axes.AXES if getattr(config.distributed, axis) == -1]
    if not left or not (config.train.global_batch_size or config.train.batch_ramp):
        return []
    log.info("distributed.%s = -1: assuming the %d local devices", left[0], jax.device_count())
    return [f"--distributed.{left[0]}=-1"]


def _files(run: Path, packages: Mapping[str, str]) -> dict[str, str]:
    """Return the text files of a capsule; the curve has all digits of loss and gradient norm."""
    files = {"config.toml": (run / "config.toml").read_text()}
    for start in sorted((run / "configs").glob("from_step_*.toml")):
        files[f"configs/{start.name}"] = start.read_text()
    curve = [{name: values[name] for name in LOGGED} for values in logged_values(run)]
    files["packages.txt"] = "".join(f"{name}=={number}\n" for name, number in packages.items())
    return files | {CURVE: "".join(json.dumps(line) + "\n" for line in curve)}


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """Comparison of an ingredient with this process.

    Attributes:
        name: name of the ingredient.
        differences: differences in words; empty if it is the same.
    """

    name: str
    differences: list[str]


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of replaying the steps of a capsule.

    Attributes:
        ingredients: comparisons of all ingredients.
        steps: replayed steps that the run has logged; empty if the data differ.
        tolerances: allowed relative difference of each step; 0: bit-identical.
    """

    ingredients: list[Ingredient]
    steps: list[RepeatedStep]
    tolerances: list[float]

    @property
    def holds(self) -> bool:
        """True if steps were replayed and each matches the log."""
        return bool(self.steps) and all(
            step.difference is not None and step.difference <= allowed
            for step, allowed in zip(self.steps, self.tolerances, strict=True)
        )

    def differing(self, names: Sequence[str] | None = None) -> list[str]:
        """Return the names of the ingredients that differ, among `names` or all."""
        differing = [ingredient.name for ingredient in self.ingredients if ingredient.differences]
        return [name for name in differing if names is None or name in names]

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.differing(["data"]):
            return ("the data have changed since the capsule was made: nothing was replayed. Name "
                    "the run's data (--data.dataset_path=DIR)")  # fmt: skip
        names = ", ".join(self.differing())
        if self.holds:
            is_exact = not any(self.tolerances)
            how = "bit for bit" if is_exact else f"up to rounding; different: {names}"
            return f"{len(self.steps)} steps match the log, {how}"
        why = f"different: {names}" if names else "although all ingredients are the same"
        return f"not every step matches the log; {why}"


def run_verify(args: argparse.Namespace, steps: int | None, overrides: Sequence[str]) -> int:
    """Replay steps of a capsule and print the result; return 1 if they differ."""
    begin_command()
    run = urls.local(args.start, "--from", "copy the checkpoint here") if args.start else None
    result = verify(capsule_file.read(Path(args.run)), steps or _STEPS, run, overrides)
    if jax.process_index() == 0:
        if args.json:
            write_json(args.json, _as_json(result), indent=2)
        if args.json != STDOUT:
            _print(result)
    return 0 if result.holds else 1


def verify(
    capsule: Capsule, steps: int, run: Path | None = None, overrides: Sequence[str] = ()
) -> Verification:
    """Replay the first steps of a run, or the steps after a checkpoint.

    Args:
        capsule: capsule of the run.
        steps: number of steps; fewer if the run has logged fewer.
        run: run directory or checkpoint to start from; None: start from the beginning.
        overrides: settings over the config, such as "--data.dataset_path=…".

    Raises:
        UserError: the data do not exist, or no state to start from does.
    """
    first, last = step_range(capsule, steps, run)
    with _unpacked(capsule, run) as directory, open_past(directory, last, overrides) as past:
        start = str(run_directory.start_before(directory, first) + 1)
        compared = list(_compared(capsule.about, ingredients_of(past), start))
        result = Verification([*compared, Ingredient("config", list(overrides))], [], [])
        if result.differing(["data"]):
            return result
        config = past.config
        repeated = [step for step in replayed(directory, first, last, overrides) if step.logged]
    allowed = 0.0
    if result.differing(_BITS):  # sums may be in another order
        model = config.model
        dtype = "float32" if config.train.mixed_precision == "fp32" else "bfloat16"
        allowed = tolerance(dtype, max(model.dim, model.ffn_dim), 6 * model.n_layers)
    tolerances = [allowed * (step.step - first + 1) for step in repeated]
    return Verification(result.ingredients, repeated, tolerances)


def step_range(capsule: Capsule, steps: int, run: Path | None) -> tuple[int, int]:
    """Return the first and the last step to replay, after a checkpoint of `run` if it is given."""
    logged = sorted(json.loads(line)["step"] for line in capsule.files[CURVE].splitlines())
    newest = 0
    if run is not None:
        directory, newest = find(run)
        if directory == run.absolute():  # a run: its newest checkpoint with logged steps after it
            before = [step for step in durable_steps(directory) if step < logged[-1]]
            newest = max(before, default=newest)
    if run is not None and newest >= logged[-1]:
        raise UserError(
            f"{run}: the capsule's curve ends at step {logged[-1]}, not after step {newest}"
        )
    return newest + 1, [step for step in logged if step > newest][:steps][-1]


@contextmanager
def _unpacked(capsule: Capsule, run: Path | None) -> Iterator[Path]:
    """Create a run directory from the capsule's configs and curve and the checkpoints of `run`."""
    with tempfile.TemporaryDirectory(prefix="jaxforge-capsule-") as name:
        directory = Path(name)
        capsule_file.unpack(capsule, directory, capsule.about["mesh"])
        if run is not None:
            (directory / SUBDIRECTORY).symlink_to(find(run)[0] / SUBDIRECTORY)
        yield directory


def _compared(then: Mapping[str, Any], now: Mapping[str, Any], start: str) -> Iterator[Ingredient]:
    """Compare each ingredient; packages that affect the last digits form the ingredient "JAX"."""
    then = {**then, "program": then["programs"].get(start, {})}
    for name in ("data", "program", "mesh", "machine", "environment", "code"):
        yield Ingredient(name, differences(then[name], now[name]))
    jax_packages = {name for names in PACKAGES.values() for name in names}
    for title, is_jax in (("JAX", True), ("packages", False)):
        versions = [
            {name: x for name, x in each["packages"].items() if (name in jax_packages) == is_jax}
            for each in (then, now)
        ]
        yield Ingredient(title, differences(*versions))


def _print(result: Verification) -> None:
    console = wide_console()
    table = Table("ingredient", "difference", title="ingredients", title_justify="left")
    for ingredient in result.ingredients:
        more = len(ingredient.differences) - _SHOWN
        lines = [*ingredient.differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        table.add_row(ingredient.name, "\n".join(lines).replace("[", "\\[") or "the same")
    console.print(table)
    for step, allowed in zip(result.steps, result.tolerances, strict=True):
        limit = f", rounding up to {allowed:.1e}" if allowed else ""
        line = f"step {step.step:6}  loss {step.loss:.9g}  {step.comparison}{limit}"
        console.print(line, highlight=False)
    console.print(result.verdict, soft_wrap=True, markup=False)


def _as_json(result: Verification) -> dict[str, Any]:
    return {
        "holds": result.holds,
        "verdict": result.verdict,
        "ingredients": {
            ingredient.name: ingredient.differences for ingredient in result.ingredients
        },
        "steps": [
            {**step.as_json(), "tolerance": allowed}
            for step, allowed in zip(result.steps, result.tolerances, strict=True)
        ],
    }
