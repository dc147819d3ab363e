"""Choice of a step's gradient reduction and recomputation: the fastest that fits.

`train.grad_sync = "auto"` and `train.activation_checkpointing = "auto"` are resolved before
compilation, from the estimates of `step.memory` and `step.update_time`.
"""

import itertools
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.model.runtime import kernel_target
from jaxforge.model.transformer import Model, build_model
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel import device_memory
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.groups import group_view
from jaxforge.parallel.hardware import Chip
from jaxforge.parallel.mesh import token_parallel_size
from jaxforge.parallel.rates import chip_of
from jaxforge.state.train_state import TrainState
from jaxforge.step.frozen_model import frozen_bytes
from jaxforge.step.initial_state import shapes_of_state, shardings_of_state, with_shardings
from jaxforge.step.memory import step_memory
from jaxforge.step.update_time import update_seconds

AUTO = "auto"
RECOMPUTATIONS = ("none", "selective", "dots_with_no_batch_dims_saveable", "full")
"""Values of `train.activation_checkpointing` to choose from."""
_IN_WORDS = {
    "none": "nothing recomputed",
    "selective": "attention recomputed",
    "dots_with_no_batch_dims_saveable": "products saved",
    "full": "blocks recomputed",
}
USABLE = 0.9
"""Usable fraction of a device: estimates omit communication buffers and fragmentation."""


def in_words(recomputation: str) -> str:
    """Describe a value of `train.activation_checkpointing`."""
    return _IN_WORDS.get(recomputation, recomputation)


class Execution(NamedTuple):
    """Gradient reduction and recomputation of a step.

    Attributes:
        grad_sync: "update" or "microbatch" (`step.gradients`).
        recomputation: value of `train.activation_checkpointing` (`model.remat`).
        why: reason of an automatic choice, for the user; empty if there was none.
    """

    grad_sync: str
    recomputation: str
    why: str = ""

    def applied_to(self, config: JobConfig) -> JobConfig:
        """Return the config with these values in place of "auto"."""
        values = {
            "train.grad_sync": self.grad_sync,
            "train.activation_checkpointing": self.recomputation,
        }
        is_applied = all(config.settings[key] == value for key, value in values.items())
        return config if is_applied else config.with_values(values)


class _Option(NamedTuple):
    """An execution with its estimates.

    Attributes:
        execution: the execution.
        seconds: estimated seconds of an update.
        bytes: estimated memory of a device.
    """

    execution: Execution
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"gradients per {self.execution.grad_sync}, {in_words(self.execution.recomputation)} "
            f"({self.seconds:.3g} s an update, {gigabytes(self.bytes)})"
        )


def with_execution(
    config: JobConfig,
    mesh: Mesh,
    *,
    model: Model | None = None,
    capacity: int | None = None,
    chip: Chip | None = None,
    teacher: ModelConfig | None = None,
) -> tuple[JobConfig, str]:
    """Return the config with the fastest execution that fits in place of "auto", and the reason.

    Collective if the config has an "auto": all processes must call this function.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        mesh: mesh of the run.
        model: a model to use, which recomputes what its `runtime.save` says.
        capacity: bytes of one device; by default, those of the mesh's devices.
        chip: figures of the devices; by default, those of the mesh's devices.
        teacher: the `[model]` section of the teacher, whose memory counts.

    Raises:
        UserError: as `choose_execution`; or a kernel does not support the model, or the mesh splits
            a parameter into unequal parts.
    """
    if model is not None:
        config = Execution(config.train.grad_sync, model.runtime.save).applied_to(config)
    if AUTO not in (config.train.grad_sync, config.train.activation_checkpointing):
        return config, ""
    model = model or build_model(config, *kernel_target(mesh))
    optimizer = build_optimizer(config, model.axes)
    shapes = shapes_of_state(config, model, optimizer)
    state = with_shardings(shapes, shardings_of_state(config, model, optimizer, mesh))
    frozen = frozen_bytes(config, model, mesh, teacher)
    execution = choose_execution(
        config, model, state, mesh, capacity=capacity, chip=chip, frozen=frozen
    )
    return execution.applied_to(config), execution.why


def choose_execution(
    config: JobConfig,
    model: Model,
    state: TrainState,
    mesh: Mesh | AbstractMesh,
    *,
    capacity: int | None = None,
    chip: Chip | None = None,
    frozen: int = 0,
) -> Execution:
    """Return the configured values, and the fastest values that fit in place of "auto".

    A choice fits if the estimated memory leaves a tenth of a device free. If none fits, it is the
    one that needs the least memory. Collective: all processes must call this function, and all get
    the same answer.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        model: result of `build_model`, for any recomputation.
        state: shapes and shardings of the state.
        mesh: mesh of the run.
        capacity: bytes of one device; by default, those of the mesh's devices.
        chip: figures of the devices; by default, those of the mesh's devices.
        frozen: bytes of the frozen model on a device.

    Raises:
        UserError: no capacity is given, and the capacity of the devices is unknown.
    """
    candidates = executions(config, mesh)
    if len(candidates) == 1:
        return candidates[0]
    if capacity is None:
        capacity = device_memory.smallest_capacity(mesh)
    chip = chip or chip_of(mesh)
    stored = bytes_per_device(state)

    def option(execution: Execution) -> _Option:
        variant = execution.applied_to(config)
        memory = step_memory(variant, model, mesh, stored, frozen).total
        return _Option(execution, update_seconds(variant, model, mesh, chip), memory)

    options = [option(execution) for execution in candidates]
    fitting = [option for option in options if option.bytes <= USABLE * capacity]
    if not fitting:
        least = min(options, key=lambda option: option.bytes)
        return least.execution._replace(
            why=f"{least} needs the least memory; {gigabytes(capacity)} per device"
        )
    best, *alternatives = sorted(fitting, key=lambda option: option.seconds)
    return best.execution._replace(why=_reason(best, alternatives, options, capacity))


def executions(config: JobConfig, mesh: Mesh | AbstractMesh) -> list[Execution]:
    """Return the executions that the config allows, from the least recomputation on."""
    config, mesh = group_view(config, mesh)
    train = config.train
    syncs = ("update", "microbatch") if train.grad_sync == AUTO else (train.grad_sync,)
    if train.grad_sync == AUTO and token_parallel_size(mesh) == 1:  # nothing is reduced
        syncs = ("update",)
    save = train.activation_checkpointing
    saves = RECOMPUTATIONS if save == AUTO else (save,)
    return [Execution(sync, save) for save, sync in itertools.product(saves, syncs)]


def _reason(
    best: _Option, alternatives: list[_Option], options: list[_Option], capacity: int
) -> str:
    """Return estimates: of the choice, of a faster one that is too large, of the next best."""
    faster = min(options, key=lambda option: option.seconds)
    text = f"{best} of {gigabytes(capacity)} is estimated to be the fastest that fits"
    if faster.seconds < best.seconds:
        text += f"; too large: {faster}"
    return text + (f"; next: {alternatives[0]}" if alternatives else "")
