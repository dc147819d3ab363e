"""Estimate, from shapes, of whether a step fits a device, and of the largest batch that fits.

The estimate (`step.memory`) is exact for the state and a rule of thumb for everything else.
`jaxforge plan` compiles the step and reports the compiler's figure.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.state.train_state import TrainState
from jaxforge.step.execution import Execution, choose_execution, executions
from jaxforge.step.memory import StepMemory, step_memory

SLACK = 1.1
"""Largest factor by which the estimate may be too high. A step that needs more does not fit."""

_MAX_ROWS = 1 << 16


class Fit(NamedTuple):
    """Memory estimate of a config on devices of one kind.

    Attributes:
        memory: estimated memory of a device.
        execution: gradient reduction and recomputation, as a run would choose.
        rows: sequences of a microbatch on a device.
        most_rows: largest number of such sequences that fits; 0 if not even one fits.
    """

    memory: StepMemory
    execution: Execution
    rows: int
    most_rows: int


def estimate_fit(
    config: JobConfig,
    model: Model,
    state: TrainState,
    mesh: Mesh | AbstractMesh,
    capacity: int,
    frozen: int = 0,
    chip: Chip | None = None,
) -> Fit:
    """Estimate a step's memory on a device, and the number of sequences that would fit.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        model: the model, from `build_model`.
        state: shapes and shardings of the state.
        mesh: concrete or abstract mesh.
        capacity: bytes of a device.
        frozen: bytes of the frozen model on a device.
        chip: figures of a device; by default, those of the mesh's devices.
    """
    execution = choose_execution(
        config, model, state, mesh, capacity=capacity, chip=chip, frozen=frozen
    )
    stored = bytes_per_device(state)
    dp = data_parallel_size(mesh)
    rows = -(-config.train.microbatch_size(dp) // dp)

    def memory(execution: Execution, resized: JobConfig) -> StepMemory:
        return step_memory(execution.applied_to(resized), model, mesh, stored, frozen)

    def fits(n: int) -> bool:
        resized = with_batch_size(config, n)
        return any(memory(option, resized).total <= capacity for option in executions(config, mesh))

    return Fit(memory(execution, config), execution, rows, _largest(fits))


def with_batch_size(config: JobConfig, rows: int) -> JobConfig:
    """Return the config with this number of sequences per device in a microbatch."""
    return config.with_values({"train.batch_size": rows, "train.global_batch_size": None})


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `_MAX_ROWS` that fits; every smaller number fits, too."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= _MAX_ROWS and fits(high):
        low, high = high, 2 * high
    # Invariant of the bisection: `low` fits, `high` does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
