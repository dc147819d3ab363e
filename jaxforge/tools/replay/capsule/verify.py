"""Makes steps of a capsule again, and says of each ingredient whether it is the same here.

Where program, machine, mesh, flags and JAX are the same, so must be every bit of the losses. Where
one of them is another, sums are made in another order: losses may then differ by as much as
`replay.compare.tolerance` allows gradients, and as much again with each further step.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.paths import SUBDIRECTORY, find, whole_steps
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.runs import run_directory
from jaxforge.step.executable import PACKAGES
from jaxforge.tools.replay import compare
from jaxforge.tools.replay.account import Made, replayed
from jaxforge.tools.replay.capsule import ingredients
from jaxforge.tools.replay.capsule.archive import CURVE, Capsule, unpack
from jaxforge.tools.replay.past import open_past

_BITS = ("program", "machine", "mesh", "environment", "JAX")
"""Ingredients on which the last digits depend."""


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """One of them, there and here.

    Attributes:
        name: what it is.
        differences: in words; none where it is the same.
    """

    name: str
    differences: list[str]


@dataclasses.dataclass(frozen=True)
class Verification:
    """What came of it.

    Attributes:
        ingredients: all of them.
        steps: those made again that were logged; none where the data differ, for they would prove
            nothing.
        tolerances: for each step the relative difference that is allowed; 0: not a bit.
    """

    ingredients: list[Ingredient]
    steps: list[Made]
    tolerances: list[float]

    @property
    def holds(self) -> bool:
        """Whether every step came out as it was logged."""
        apart = [one.difference for one in self.steps]
        return bool(apart) and all(
            found is not None and found <= allowed
            for found, allowed in zip(apart, self.tolerances, strict=True)
        )

    def differing(self, names: Sequence[str] | None = None) -> list[str]:
        """Names of the ingredients that are not the same here; of some, or of all."""
        found = [one.name for one in self.ingredients if one.differences]
        return [name for name in found if names is None or name in names]


def verify(
    capsule: Capsule, steps: int, run: Path | None = None, overrides: Sequence[str] = ()
) -> Verification:
    """Makes the first steps again, or those after a checkpoint.

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
        now = _here(past.config, dict(past.mesh.shape), ingredients.program(past))
        found = list(_compared(capsule.about, now, _start(directory, first)))
        config, changed = past.config, list(overrides)
        found.append(Ingredient("config", changed))
        result = Verification(found, [], [])
        if result.differing(["data"]):
            return result
        made = [one for one in replayed(directory, first, last, overrides) if one.logged]
    exact = not result.differing(_BITS)
    allowed = 0.0 if exact else _tolerance(config)
    return Verification(found, made, [allowed * (one.step - first + 1) for one in made])


def _range(capsule: Capsule, steps: int, run: Path | None) -> tuple[int, int]:
    """The first step to make again and the last: logged ones, after a checkpoint of `run`."""
    logged = sorted(json.loads(line)["step"] for line in capsule.files[CURVE].splitlines())
    if run is None:
        return 1, _kth(logged, 0, steps)
    directory, newest = find(run)
    if directory == run.absolute():  # any of its checkpoints: the newest that something follows
        before = [step for step in whole_steps(directory) if step < logged[-1]]
        newest = max(before, default=newest)
    if newest >= logged[-1]:
        raise UserError(f"{run}: the capsule's curve ends at step {logged[-1]}, not after {newest}")
    return newest + 1, _kth(logged, newest, steps)


def _kth(logged: Sequence[int], after: int, k: int) -> int:
    """The k-th step that was logged after one, or the last."""
    return [step for step in logged if step > after][:k][-1]


@contextmanager
def _unpacked(capsule: Capsule, run: Path | None) -> Iterator[Path]:
    """A run directory of the capsule's configs and curve, with another run's checkpoints."""
    with tempfile.TemporaryDirectory(prefix="jaxforge-capsule-") as name:
        directory = Path(name)
        unpack(capsule, directory, capsule.about["mesh"])
        if run is not None:
            (directory / SUBDIRECTORY).symlink_to(find(run)[0] / SUBDIRECTORY)
        yield directory


def _start(directory: Path, first: int) -> str:
    """By what the capsule has the program of a step: the first step under the same config."""
    return str(run_directory.start_before(directory, first) + 1)


def _here(config: JobConfig, mesh: dict[str, int], program: dict[str, str]) -> dict[str, Any]:
    return {
        "code": ingredients.code(config),
        "machine": ingredients.machine(),
        "mesh": mesh,
        "environment": ingredients.environment(),
        "packages": ingredients.packages(),
        "program": program,
        "data": ingredients.data(config),
    }


def _compared(then: Mapping[str, Any], now: Mapping[str, Any], start: str) -> Iterator[Ingredient]:
    """Each ingredient; of packages, those that make the last digits are one of their own."""
    then = {**then, "program": then["programs"].get(start, {})}
    for name in ("data", "program", "mesh", "machine", "environment", "code"):
        yield Ingredient(name, ingredients.differences(then[name], now[name]))
    of_jax = {name for names in PACKAGES.values() for name in names}
    for title, wanted in (("JAX", True), ("packages", False)):
        either = [
            {name: x for name, x in all_["packages"].items() if (name in of_jax) == wanted}
            for all_ in (then, now)
        ]
        yield Ingredient(title, ingredients.differences(*either))


def _tolerance(config: JobConfig) -> float:
    """Of one step whose sums are in another order: relative, of loss and gradient norm."""
    dtype = "float32" if config.train.mixed_precision == "fp32" else "bfloat16"
    model = config.model
    return compare.tolerance(dtype, max(model.dim, model.ffn_dim), 6 * model.n_layers)
