"""The train step of a config, lowered for a mesh whose devices need not be here."""

from collections.abc import Collection, Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import build_model, matmul_precision
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.state.train_state import TrainState, abstract_state
from jaxforge.step.train_step import Controls, make_train_step


def lower_train_step(
    config: JobConfig,
    mesh: Mesh,
    capacity: int | None = None,
    *,
    collect: Iterable[str] = (),
) -> jax.stages.Lowered:
    """The whole update as a user's run would compile it; no array is made.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        mesh: of devices here or elsewhere (`parallel.targets`).
        capacity: bytes of one device, by which `train.grad_sync = "auto"` goes; by default what is
            known of these devices.
        collect: what hooks want besides `metrics.collect`.

    Raises:
        UserError: a parameter does not divide, the attention kernel asked for cannot serve, or it
            is not known what a device holds.
    """
    largest = config.train.grad_accum_steps
    return lower_train_steps(config, mesh, {largest}, capacity, collect=collect)[largest]


def lower_train_steps(
    config: JobConfig,
    mesh: Mesh,
    sizes: Collection[int],
    capacity: int | None = None,
    *,
    collect: Iterable[str] = (),
) -> dict[int, jax.stages.Lowered]:
    """The same update for batches of several sizes, by the number of their microbatches."""
    device = mesh.devices.flat[0]
    model = build_model(config, device.platform, gpu_capability(device))
    optimizer = build_optimizer(config, model.axes)
    with jax.set_mesh(mesh), matmul_precision(config):
        collect = (*config.metrics.collect, *collect)
        step = make_train_step(model, optimizer, config, mesh, collect=collect, capacity=capacity)
        state = abstract_state(model, optimizer, mesh)
        batch = abstract_batch(config, mesh)
        return lower_sizes(step, state, batch, sizes)


def lower_sizes(
    step: jax.stages.Wrapped,
    state: TrainState,
    batch: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    sizes: Collection[int],
) -> dict[int, jax.stages.Lowered]:
    """A step for each size of batch.

    Args:
        step: as of `make_train_step`.
        state: to be trained.
        batch: of any size.
        sizes: microbatches of an update.
    """

    def of_size(n: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=x.sharding)
            for name, x in batch.items()
        }

    controls = Controls(next_lr_scale=1.0)  # as `TrainingData.controls` has them
    return {n: step.lower(state, of_size(n), controls) for n in sizes}


def abstract_batch(config: JobConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch: [microbatches, sequences, tokens]."""
    train = config.train
    rows = train.microbatch_size(data_parallel_size(mesh))
    shape = (train.grad_accum_steps, rows, train.seq_len)
    shapes: dict[str, tuple[int, ...]] = {"input_ids": shape, "labels": shape}
    if config.data.pack_sequences:
        shapes["segment_ids"] = shape
    if config.data.datasets:
        shapes["dataset_idx"] = shape[:2]
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    split = batch_shardings(mesh, batch)
    return {name: leaf.update(sharding=split[name]) for name, leaf in batch.items()}
