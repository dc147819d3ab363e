"""Capsules: what a run is made of and its curve in one file, and steps replayed by such a file.

Where program, machine, mesh, flags and JAX are the same, so must be every bit of the losses. Where
one of them differs, sums are made in another order: losses may then differ by as much as
`compare.tolerance` allows gradients, and as much again with each further step.
"""

import argparse
import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

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
from jaxforge.tools.replay import capsule_file, compare
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

log = logging.getLogger(__name__)

_BITS = ("program", "machine", "mesh", "environment", "JAX")
"""Ingredients on which the last digits depend."""

_STEPS = 3  # replayed, unless a number is given
_SHOWN = 8  # differences of an ingredient


def make(args: argparse.Namespace) -> int:
    """Write a run's capsule; return the exit code."""
    begin_command()
    run = urls.path(args.what[0])
    output = args.output or Path(f"{run.absolute().name}.capsule.zip")
    urls.local(output, "--output", "copy it there afterwards")
    capsule = capsule_of(run)
    if jax.process_index() == 0:
        capsule_file.write(output, capsule)
        print(f"{output}: {output.stat().st_size:,} bytes")
    return 0


def capsule_of(run: Path) -> Capsule:
    """Return the capsule of a run, where it was trained.

    Args:
        run: its directory.

    Raises:
        UserError: there is no such run, it has logged nothing, or it had other devices.
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
                    f"the run's mesh was {config.distributed}, which {jax.device_count()} devices "
                    "do not make: make its capsule where it was trained"
                )
            about = ingredients_of(past)
            train = past.config.train
        programs[str(first)] = about.pop("program")
    about |= {
        "seeds": {"train.seed": train.seed, "train.data_seed": train.data_seed},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "jaxforge": version("jaxforge"),
        "programs": programs,
        "checkpoints": sorted(durable_steps(run)),
    }
    files = _files(run, about["packages"])
    return Capsule(redacted_value(about), {name: redacted(x) for name, x in files.items()})


def _mesh_settings(config: JobConfig) -> list[str]:
    """Return settings that take all devices, where nothing says how many the run had."""
    left = [axis for axis in axes.AXES if getattr(config.distributed, axis) == -1]
    if not left or not (config.train.global_batch_size or config.train.batch_ramp):
        return []
    log.info("distributed.%s = -1: taken to be the %d devices here", left[0], jax.device_count())
    return [f"--distributed.{left[0]}=-1"]


def _files(run: Path, packages: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of a capsule; its curve has loss and gradient norm digit for digit."""
    files = {"config.toml": (run / "config.toml").read_text()}
    for start in sorted((run / "configs").glob("from_step_*.toml")):
        files[f"configs/{start.name}"] = start.read_text()
    curve = [{name: values[name] for name in LOGGED} for values in logged_values(run)]
    files["packages.txt"] = "".join(f"{name}=={number}\n" for name, number in packages.items())
    return files | {CURVE: "".join(json.dumps(line) + "\n" for line in curve)}


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """One ingredient, in the capsule and here.

    Attributes:
        name: what it is.
        differences: in words; none where it is the same.
    """

    name: str
    differences: list[str]


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of replaying the steps of a capsule.

    Attributes:
        ingredients: all of them.
        steps: replayed steps that were logged; none where the data differ, for they would prove
            nothing.
        tolerances: for each step the relative difference that is allowed; 0: not a bit.
    """

    ingredients: list[Ingredient]
    steps: list[RepeatedStep]
    tolerances: list[float]

    @property
    def holds(self) -> bool:
        """True if every step matches the log."""
        return bool(self.steps) and all(
            step.difference is not None and step.difference <= allowed
            for step, allowed in zip(self.steps, self.tolerances, strict=True)
        )

    def differing(self, names: Sequence[str] | None = None) -> list[str]:
        """Return names of the ingredients that differ here; of some, or of all."""
        differing = [ingredient.name for ingredient in self.ingredients if ingredient.differences]
        return [name for name in differing if names is None or name in names]

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.differing(["data"]):
            return ("the data are not those of the run: nothing was repeated; name the right "
                    "ones (--data.dataset_path=DIR)")  # fmt: skip
        names = ", ".join(self.differing())
        if self.holds:
            exact = not any(self.tolerances)
            how = "bit for bit" if exact else f"to within rounding; what differs: {names}"
            return f"{len(self.steps)} steps came out as they were logged, {how}"
        why = f"what differs: {names}" if names else "although every ingredient is the same"
        return f"not every step came out as it was logged; {why}"


def run_verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Replay steps of a capsule and print the result; return the exit code."""
    begin_command()
    run = urls.local(args.run, "--run", "copy the checkpoint here") if args.run else None
    capsule = capsule_file.read(Path(args.what[1]))
    result = verify(capsule, args.steps or _STEPS, run, overrides)
    if jax.process_index() == 0:
        if args.json:
            write_json(args.json, _as_json(result), indent=2)
        if args.json != STDOUT:
            _print(result)
    return 0 if result.holds else 1


def verify(
    capsule: Capsule, steps: int, run: Path | None = None, overrides: Sequence[str] = ()
) -> Verification:
    """Replay the first steps, or those after a checkpoint.

    Args:
        capsule: of the run.
        steps: how many; fewer where fewer were logged.
        run: a run directory, or one of its checkpoints, to begin from.
        overrides: settings over the config, such as "--data.dataset_path=…".

    Raises:
        UserError: the data are not here, or there is nothing to begin from.
    """
    first, last = _range(capsule, steps, run)
    with _unpacked(capsule, run) as directory, open_past(directory, last, overrides) as past:
        start = str(run_directory.start_before(directory, first) + 1)
        compared = list(_compared(capsule.about, ingredients_of(past), start))
        result = Verification([*compared, Ingredient("config", list(overrides))], [], [])
        if result.differing(["data"]):
            return result
        config = past.config
        repeated = [step for step in replayed(directory, first, last, overrides) if step.logged]
    allowed = _tolerance(config) if result.differing(_BITS) else 0.0
    tolerances = [allowed * (step.step - first + 1) for step in repeated]
    return Verification(result.ingredients, repeated, tolerances)


def _range(capsule: Capsule, steps: int, run: Path | None) -> tuple[int, int]:
    """Return the first step to replay and the last: logged ones, after a checkpoint of `run`."""
    logged = sorted(json.loads(line)["step"] for line in capsule.files[CURVE].splitlines())
    newest = 0
    if run is not None:
        directory, newest = find(run)
        if directory == run.absolute():  # any of its checkpoints: the newest that steps follow
            before = [step for step in durable_steps(directory) if step < logged[-1]]
            newest = max(before, default=newest)
    if run is not None and newest >= logged[-1]:
        raise UserError(f"{run}: the capsule's curve ends at step {logged[-1]}, not after {newest}")
    return newest + 1, [step for step in logged if step > newest][:steps][-1]


@contextmanager
def _unpacked(capsule: Capsule, run: Path | None) -> Iterator[Path]:
    """Make a run directory of the capsule's configs and curve, with another run's checkpoints."""
    with tempfile.TemporaryDirectory(prefix="jaxforge-capsule-") as name:
        directory = Path(name)
        capsule_file.unpack(capsule, directory, capsule.about["mesh"])
        if run is not None:
            (directory / SUBDIRECTORY).symlink_to(find(run)[0] / SUBDIRECTORY)
        yield directory


def _compared(then: Mapping[str, Any], now: Mapping[str, Any], start: str) -> Iterator[Ingredient]:
    """Compare each ingredient; packages that decide the last digits are one of their own."""
    then = {**then, "program": then["programs"].get(start, {})}
    for name in ("data", "program", "mesh", "machine", "environment", "code"):
        yield Ingredient(name, differences(then[name], now[name]))
    of_jax = {name for names in PACKAGES.values() for name in names}
    for title, wanted in (("JAX", True), ("packages", False)):
        either = [
            {name: x for name, x in all_["packages"].items() if (name in of_jax) == wanted}
            for all_ in (then, now)
        ]
        yield Ingredient(title, differences(*either))


def _tolerance(config: JobConfig) -> float:
    """Return the relative difference of one step whose sums are in another order."""
    dtype = "float32" if config.train.mixed_precision == "fp32" else "bfloat16"
    model = config.model
    return compare.tolerance(dtype, max(model.dim, model.ffn_dim), 6 * model.n_layers)


def _print(result: Verification) -> None:
    console = wide_console()
    table = Table("ingredient", "here", title="ingredients", title_justify="left")
    for ingredient in result.ingredients:
        more = len(ingredient.differences) - _SHOWN
        lines = [*ingredient.differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        table.add_row(ingredient.name, "\n".join(lines).replace("[", "\\[") or "the same")
    console.print(table)
    for step, allowed in zip(result.steps, result.tolerances, strict=True):
        limit = f", up to {allowed:.1e} is rounding" if allowed else ""
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
