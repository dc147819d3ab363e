"""Resolution of `train.grad_sync = "auto"`: "update" if whole gradients fit on a device."""

from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.parallel import device_memory
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.mesh import token_parallel_size
from jaxforge.state.train_state import TrainState
from jaxforge.step.memory import step_memory

_USABLE = 0.85
"""Usable fraction of a device: estimates omit communication buffers and fragmentation."""


class GradSync(NamedTuple):
    """Reduction of gradients between data-parallel devices.

    Attributes:
        mode: "update" or "microbatch" (`step.gradients`).
        why: reason of an automatic choice, for the user; empty for a configured mode.
    """

    mode: str
    why: str = ""

    def applied_to(self, config: JobConfig) -> JobConfig:
        """Return the config with this mode in place of "auto"."""
        if config.train.grad_sync == self.mode:
            return config
        train = config.train.model_copy(update={"grad_sync": self.mode})
        return config.model_copy(update={"train": train})


def resolve_grad_sync(
    config: JobConfig,
    model: Model,
    state: TrainState,
    mesh: Mesh | AbstractMesh,
    capacity: int | None = None,
    frozen: int = 0,
) -> GradSync:
    """Return `train.grad_sync`, or the mode that "auto" selects.

    "auto" selects "update" if the estimated memory leaves 15 % of a device free. Otherwise it
    selects "microbatch", which is slower but needs less memory. Collective: all processes must call
    it, and all get the same answer.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        model: result of `build_model`.
        state: shapes and shardings of the state.
        mesh: mesh of the run.
        capacity: bytes of one device; by default, those of the mesh's devices.
        frozen: bytes of the frozen model on a device.

    Raises:
        UserError: no capacity is given, and the capacity of the devices is unknown.
    """
    if config.train.grad_sync != "auto":
        return GradSync(config.train.grad_sync)
    if token_parallel_size(mesh) == 1:
        return GradSync("update")
    if capacity is None:
        capacity = device_memory.smallest_capacity(mesh)
    needs = step_memory(config, model, mesh, "update", bytes_per_device(state), frozen).total
    mode = "update" if needs <= _USABLE * capacity else "microbatch"
    fits = "fit" if mode == "update" else "would not fit"
    return GradSync(
        mode,
        f"whole weights and gradients {fits}: about {gigabytes(needs)} of "
        f"{gigabytes(capacity)} per device",
    )
